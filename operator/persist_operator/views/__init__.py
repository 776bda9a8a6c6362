"""Texts about resources for people, the same on a laptop and in a cluster."""
