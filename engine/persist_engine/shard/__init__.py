"""The imperative shell around one shard: its log, its commands, its waits."""
