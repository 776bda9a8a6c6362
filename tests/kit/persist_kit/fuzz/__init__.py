"""Fuzzing of every decoder."""
