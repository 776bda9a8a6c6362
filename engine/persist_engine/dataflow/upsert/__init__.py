"""Upserts: the last value of each key."""
