"""Sinks and upserts: they write a shard from its desired contents."""
