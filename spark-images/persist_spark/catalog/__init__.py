"""The Python side of the SQL catalog: see README.md."""
