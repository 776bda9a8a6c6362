"""Appends: staging, linking, outcomes."""
