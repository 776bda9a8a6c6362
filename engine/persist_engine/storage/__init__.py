"""Room 2: the two ports, Blob and Consensus, and their adapters. Has never heard of a shard."""
