"""Decisions about the data that a shard keeps."""
