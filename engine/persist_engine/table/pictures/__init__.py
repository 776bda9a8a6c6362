"""What notebooks show of tables."""
