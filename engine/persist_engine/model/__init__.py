"""The functional core: frozen values and pure functions. No clock, no randomness, no I/O, no protobuf."""
