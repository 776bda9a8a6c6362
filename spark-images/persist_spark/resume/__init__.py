"""Lets the next driver of a run reuse batches that earlier drivers of the run staged (docs/adr/0006-sinks.md)."""
