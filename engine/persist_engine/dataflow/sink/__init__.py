"""A running sink and its threads."""
