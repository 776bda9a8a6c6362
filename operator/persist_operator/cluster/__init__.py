"""The only talk with the API server: a small port, the real client, an in-memory server for tests, the leader's Lease."""
