"""Reading, merging and writing the blobs with rows."""
