"""The values that a write commits beside its rows."""
