"""Room 5: the handles users hold."""
