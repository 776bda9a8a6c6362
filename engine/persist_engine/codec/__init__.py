"""Room 2: values to bytes and back, pure."""
