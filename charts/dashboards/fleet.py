"""The dashboard Fleet: all shards and sinks of the chosen namespaces."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models
from panels import Row, board, number, ranking, variable
from series import MAINTENANCE, STORES, some

_STALLED = "Nothing happens for them until a person changes their spec or their stores. Their condition Stalled says what to do."
_ROWS = [
    Row(
        "Health",
        (
            number(
                "Shards",
                "PersistShards that the operator sees.",
                "short",
                f"count({some('persist_shard_ready')})",
            ),
            number(
                "Shards not Ready",
                "PersistShards that are not maintained now.",
                "short",
                f"count({some('persist_shard_ready')}) - sum({some('persist_shard_ready')})",
                bad_from=(1, 2),
            ),
            number("Sinks", "SparkSinks that the operator sees.", "short", f"count({some('spark_sink_ready')})"),
            number(
                "Sinks not Ready",
                "SparkSinks that are not as their spec wants them. A Once sink is not Ready while it runs.",
                "short",
                f"count({some('spark_sink_ready')}) - sum({some('spark_sink_ready')})",
                bad_from=(1, 2),
            ),
            number("Stalled shards", _STALLED, "short", f"sum({some('persist_shard_stalled')})", bad_from=(1, 2)),
            number("Stalled sinks", _STALLED, "short", f"sum({some('spark_sink_stalled')})", bad_from=(1, 2)),
            number(
                "Stores unreachable",
                "Shards with a store that does not answer.",
                "short",
                f"count({some('persist_shard_storage_reachable')}) - sum({some('persist_shard_storage_reachable')})",
                bad_from=(1, 1),
            ),
            number(
                "Suspended shards",
                "Shards whose maintenance is switched off in their spec.",
                "short",
                f"sum({some('persist_shard_suspended')})",
            ),
            number(
                "Suspended sinks",
                "Sinks that are switched off in their spec.",
                "short",
                f"sum({some('spark_sink_suspended')})",
            ),
            number(
                "Alerts that fire",
                "Alerts of this chart in Prometheus. Unknown when Grafana evaluates them.",
                "short",
                'count(ALERTS{alertstate="firing",alertname=~"Persist.*|SparkSink.*"})',
                bad_from=(1, 5),
            ),
        ),
    ),
    Row(
        "Risk",
        (
            ranking(
                "Oldest data that no compaction merged",
                "Deleted and replaced rows may be in the bucket for this long. A deadline is a promise about this age.",
                "s",
                f"topk(10, {some('persist_shard_oldest_uncompacted_seconds')})",
            ),
            ranking(
                "Largest compaction debt",
                "Bytes that compaction would have to read. Reads become slower with it.",
                "bytes",
                f"topk(10, {some('persist_shard_debt_bytes')})",
            ),
            ranking(
                "Shards written longest ago",
                "Seconds from the last time that a shard has data for, to now.",
                "s",
                f"topk(10, {some('persist_shard_upper_lag_seconds')})",
            ),
            ranking(
                "Longest holds by readers",
                "For how long readers have kept since from its target. What they hold cannot be deleted.",
                "s",
                f"topk(10, {some('persist_shard_reader_hold_seconds')})",
            ),
            ranking(
                "Slowest streams",
                "From the choice of the newest batch to its commit.",
                "s",
                f"topk(10, {some('spark_sink_lag_seconds')})",
            ),
            ranking(
                "Failing sinks",
                "Attempts that failed in a row.",
                "short",
                f"topk(10, {some('spark_sink_consecutive_failures')} > 0)",
            ),
        ),
    ),
    MAINTENANCE,
    STORES,
]


def made() -> models.Dashboard:
    """The dashboard."""
    variables = [
        variable(
            "namespace",
            "Namespace",
            'label_values({__name__=~"persist_shards|spark_sink_ready"}, namespace)',
            multi=True,
        )
    ]
    return board(
        "persist-fleet",
        "persist / Fleet",
        "All shards and sinks: what is well, what is at risk, what is being done.",
        variables,
        _ROWS,
    )
