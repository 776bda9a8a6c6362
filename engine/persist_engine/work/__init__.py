"""Maintenance: work that is done after a write, never inside it."""
