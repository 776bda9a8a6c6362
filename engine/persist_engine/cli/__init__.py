"""The `persist` command line."""
