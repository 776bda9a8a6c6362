"""What the format `persist` does beside reading the contents of a shard."""
