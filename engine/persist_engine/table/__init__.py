"""A table in three lines: see README.md."""
