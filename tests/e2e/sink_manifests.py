"""Sinks that several end-to-end tests apply."""

from typing import Any


def airlines_sink(name: str, shard: str, **spec: Any) -> dict[str, Any]:
    """A sink that runs once and makes `shard` equal to the sixteen airlines of the example. `spec` has further fields."""
    options = {"path": "examples/flights/data/airlines.csv", "header": "true"}
    source = {"name": "csv", "schema": "carrier STRING, name STRING", "options": options}
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "SparkSink",
        "metadata": {"name": name},
        "spec": {
            "shardRef": {"name": shard},
            "mode": "Once",
            "input": {"type": "Format", "format": source},
            "envelope": {"type": "Mirror"},
            **spec,
        },
    }
