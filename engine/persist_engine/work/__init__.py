"""Room 4: maintenance, done after the write and never inside it."""
