"""The batches of a shard: the spine, its merges, and its flat form."""
