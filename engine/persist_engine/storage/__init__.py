"""The two ports, Blob and Consensus, and their adapters. Knows nothing of shards."""
