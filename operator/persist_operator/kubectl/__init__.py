"""`kubectl persist`: a person's commands on the shards and sinks of a cluster."""
