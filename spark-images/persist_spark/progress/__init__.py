"""What a run reports about itself while it goes on."""
