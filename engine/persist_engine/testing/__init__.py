"""Proof kit, shipped: conformance suites, oracle, strategies, faults."""
