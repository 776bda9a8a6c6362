"""S3: objects under keys."""
