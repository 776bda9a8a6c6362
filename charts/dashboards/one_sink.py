"""The dashboard Sink: one SparkSink."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models
from panels import Row, board, lines, number, variable
from series import of


def _sink(series: str) -> str:
    return of(f"spark_sink_{series}", '{namespace="$namespace",name="$sink"}')


_ROWS = [
    Row(
        "Now",
        (
            number(
                "Ready",
                "1: the sink is as its spec wants it. A Once sink is not Ready while it runs.",
                "short",
                _sink("ready"),
            ),
            number("Driver runs", "1: a driver runs.", "short", _sink("running")),
            number("Executors", "Executors that run.", "short", _sink("executors")),
            number(
                "Failures in a row",
                "Failed attempts since the last success.",
                "short",
                _sink("consecutive_failures"),
                bad_from=(1, 3),
            ),
        ),
    ),
    Row(
        "Freshness",
        (
            lines(
                "Time of a batch",
                "From the choice of the newest batch of a stream to its commit. Only of streams.",
                "s",
                (_sink("lag_seconds"), "lag"),
            ),
            lines(
                "Within the target",
                "1: the shard has what spec.freshness asks for. Only of sinks that ask.",
                "short",
                (_sink("fresh"), "fresh"),
            ),
        ),
    ),
    Row(
        "Throughput",
        (
            lines(
                "Rows read by the driver that runs",
                "Grows while it reads, and begins at 0 with each driver.",
                "short",
                (_sink("running_rows_read"), "rows"),
            ),
            lines(
                "Batches committed",
                "Batches of a stream that the driver that runs has committed.",
                "short",
                (_sink("running_batches"), "batches"),
            ),
            lines(
                "Last run",
                "What the last run that succeeded read and appended.",
                "short",
                (_sink("rows_read"), "rows read"),
                (_sink("updates_written"), "updates written"),
            ),
            lines(
                "Bytes read",
                "As far as the source counts them.",
                "bytes",
                (_sink("running_bytes_read"), "bytes"),
            ),
        ),
    ),
    Row(
        "Correctness",
        (
            lines(
                "Rows that are errors",
                "Rows that could not be written. They are in the shard, in its column err.",
                "short",
                (_sink("errors"), "last run"),
                (_sink("running_errors"), "running"),
            ),
            lines(
                "Difference from the input",
                "What a ReadOnly sink found when it last compared.",
                "short",
                (_sink("missing"), "missing in the shard"),
                (_sink("extra"), "too many in the shard"),
            ),
        ),
    ),
    Row(
        "Driver and executors",
        (
            lines(
                "Executors",
                "Those that run, beside those that the spec asks for.",
                "short",
                (_sink("executors"), "running"),
                (_sink("executors_wanted"), "wanted"),
            ),
            lines(
                "Attempts",
                "Drivers started so far. Steps are restarts or further runs.",
                "short",
                (_sink("attempts"), "drivers"),
            ),
            lines(
                "Driver waits",
                "1: the pod of the driver exists and does not run yet.",
                "short",
                (_sink("driver_pending"), "pending"),
            ),
            lines(
                "Since the last failure",
                "Time since the last attempt that failed, by its class.",
                "s",
                (f"time() - {_sink('last_failure_timestamp_seconds')}", "{{class}}"),
            ),
        ),
    ),
    Row(
        "Rollout",
        (
            lines(
                "Rollout",
                "1: a new revision is on its way, or was rolled back.",
                "short",
                (_sink("rollout"), "under way"),
                (_sink("rolled_back"), "rolled back"),
            ),
            lines(
                "The new revision beside the old",
                "Updates that one of the two would write and the other not.",
                "short",
                (_sink("rollout_missing"), "only the new"),
                (_sink("rollout_extra"), "only the old"),
            ),
            lines(
                "The new revision behind the old",
                "From a commit of the driver that runs to its comparison.",
                "s",
                (_sink("rollout_lag_seconds"), "lag"),
            ),
        ),
        collapsed=True,
    ),
    Row(
        "Spark",
        (
            lines(
                "Time in tasks",
                "Of the driver that runs, all executors together: it grows by 4 seconds a second while four cores are busy. "
                "Much garbage collection means too little memory.",
                "s",
                (_sink("running_task_seconds"), "tasks"),
                (_sink("running_gc_seconds"), "of it garbage collection"),
            ),
            lines(
                "Bytes of shuffles",
                "What tasks have written for other tasks. Grows while the driver runs.",
                "bytes",
                (_sink("running_shuffle_bytes"), "bytes"),
            ),
        ),
        collapsed=True,
    ),
]


def made() -> models.Dashboard:
    """The dashboard."""
    variables = [
        variable("namespace", "Namespace", "label_values(spark_sink_ready, namespace)"),
        variable("sink", "Sink", 'label_values(spark_sink_ready{namespace="$namespace"}, name)'),
    ]
    return board(
        "persist-sink",
        "persist / Sink",
        "One sink: whether it runs, how fast, what it wrote, and what it could not write.",
        variables,
        _ROWS,
    )
