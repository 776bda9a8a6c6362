"""For tests of adapters and of programs on the engine: conformance suites, faults, an oracle."""
