"""Durable, versioned, time-varying collections of updates ((key, value), time, diff)."""
