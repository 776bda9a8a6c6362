"""Reading under a lease: snapshots, splits, listening, changes."""
