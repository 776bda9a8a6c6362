"""Room 3: the imperative shell around one shard."""
