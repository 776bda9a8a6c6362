"""Sub-room."""
