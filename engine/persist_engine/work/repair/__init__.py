"""Repairs that an administrator starts."""
