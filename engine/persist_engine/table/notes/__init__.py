"""What is committed beside the rows of a write."""
