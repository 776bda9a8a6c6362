"""The reports of a run about itself while it runs."""
