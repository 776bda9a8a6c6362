"""Sinks that several end-to-end tests apply, and the schemas of the shards that these write."""

from typing import Any

#: As declared in examples/flights.
FLIGHTS = {
    "key": "time_hour TIMESTAMP, carrier STRING, flight INT, origin STRING",
    "value": "dest STRING, tailnum STRING, year INT, month INT, day INT, hour INT, minute INT, sched_dep_time INT, "
    "dep_time INT, dep_delay INT, sched_arr_time INT, arr_time INT, arr_delay INT, air_time INT, distance INT",
}
AIRLINES = {"key": "carrier STRING", "value": "name STRING"}


def sink(name: str, shard: str, **spec: Any) -> dict[str, Any]:
    """A SparkSink into `shard`."""
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "SparkSink",
        "metadata": {"name": name},
        "spec": {"shardRef": {"name": shard}, **spec},
    }


def airlines_input(*, file: str = "airlines", **more: Any) -> dict[str, Any]:
    """An input with the sixteen airlines of the example, from `file` beside its data. `more` has further fields of the format."""
    options = {"path": f"examples/flights/data/{file}.csv", "header": "true"}
    declared = {"name": "csv", "schema": "carrier STRING, name STRING", "options": options}
    return {"type": "Format", "format": {**declared, **more}}


def airlines_sink(name: str, shard: str, *, file: str = "airlines", **spec: Any) -> dict[str, Any]:
    """A sink that runs once and makes `shard` equal to the airlines. `spec` has further fields."""
    return sink(
        name, shard, **{"mode": "Once", "input": airlines_input(file=file), "envelope": {"type": "Mirror"}, **spec}
    )


def flights_sink(name: str, shard: str, **spec: Any) -> dict[str, Any]:
    """A sink on two executors that runs once and appends the 336,776 flights of the example. `spec` has further fields."""
    source = {"name": "parquet", "options": {"path": "examples/flights/data/flights.parquet"}}
    declared = {
        "input": {"type": "Format", "format": source},
        "envelope": {"type": "Append", "timestampColumn": "time_hour"},
        "spark": {"executor": {"instances": 2}},
        "restart": {"backoffSeconds": 1},
    }
    return sink(name, shard, **{**declared, **spec})


def rate_input(rows_per_second: int, sql: str) -> dict[str, Any]:
    """An input of Spark that counts by itself."""
    declared = {"name": "rate", "options": {"rowsPerSecond": str(rows_per_second)}, "sql": sql}
    return {"type": "Format", "format": declared}


def numbers_stream(name: str, shard: str, **spec: Any) -> dict[str, Any]:
    """A stream of five rows a second on one executor. `spec` has further fields."""
    declared = {
        "mode": "Streaming",
        "commitIntervalSeconds": 1,
        "input": rate_input(5, "select value as id, value as number from input"),
        "envelope": {"type": "Append"},
        "spark": {"executor": {"instances": 1}},
    }
    return sink(name, shard, **{**declared, **spec})
