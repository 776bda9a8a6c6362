"""The work of simulated processes."""
