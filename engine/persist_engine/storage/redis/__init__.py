"""Redis: the log of versions, news of commits, durability checks."""
