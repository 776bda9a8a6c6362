"""Values to bytes and back. Pure."""
