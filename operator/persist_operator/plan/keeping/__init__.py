"""Decisions about what a shard keeps."""
