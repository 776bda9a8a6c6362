"""Upserts: the last value per key."""
