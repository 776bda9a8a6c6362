"""Inputs of sinks that are more than a format of Spark."""
