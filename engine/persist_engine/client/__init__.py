"""The handles of a shard."""
