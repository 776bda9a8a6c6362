"""`persist inspect`."""
