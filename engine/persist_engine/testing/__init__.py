"""Helps to test adapters, and programs that use the engine: conformance suites, faults, and an oracle."""
