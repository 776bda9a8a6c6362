"""What earlier drivers of a run staged, and what of it the next one need not stage again (docs/adr/0006-sinks.md)."""
