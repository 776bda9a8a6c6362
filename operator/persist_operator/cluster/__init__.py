"""All communication with the API server: a small port, the real client, copies of resources, the leader's Lease."""
