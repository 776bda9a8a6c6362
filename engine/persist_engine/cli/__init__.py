"""Room 6: the `persist` command line."""
