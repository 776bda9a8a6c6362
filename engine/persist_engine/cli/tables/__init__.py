"""Commands on tables by name."""
