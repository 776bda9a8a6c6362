"""Sinks and upserts: what writes a shard from its desired contents."""
