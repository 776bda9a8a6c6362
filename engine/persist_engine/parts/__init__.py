"""Parts, the blobs with rows: reads, merges and writes them."""
