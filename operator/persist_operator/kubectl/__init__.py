"""`kubectl persist`: a user's commands on the shards and sinks of a cluster."""
