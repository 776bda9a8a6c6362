"""What one version of a state changed."""
