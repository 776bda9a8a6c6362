"""Room 1: the functional core. Frozen values and pure functions; no clock, no randomness, no I/O, no protobuf."""
