"""Envelopes whose rows are commands on keys."""
