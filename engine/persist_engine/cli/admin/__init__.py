"""`persist admin`."""
