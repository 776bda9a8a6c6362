"""The batches of a shard: the spine, its merges, its flat form."""
