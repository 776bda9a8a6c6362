"""The parts of the format `persist` other than reading the contents of a shard."""
