"""Repairs that a person starts."""
