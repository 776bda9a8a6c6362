"""Compaction on Spark; see README.md."""
