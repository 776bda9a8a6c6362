"""Starts that wait for a place."""
