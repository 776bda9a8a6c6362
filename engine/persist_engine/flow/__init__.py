"""Dataflow machines without I/O."""
