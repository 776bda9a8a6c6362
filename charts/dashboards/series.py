"""How the dashboards choose series, and the rows that two of them share. Unknown stays unknown: nothing here fills a gap with 0."""

from __future__ import annotations

from panels import Row, lines

#: The chosen namespaces. The series of one resource differ in `instance` and `pod` only.
_SOME = '{namespace=~"$namespace"}'


def of(series: str, labels: str) -> str:
    """A series of resources, whichever replica exports it."""
    return f"max without (instance, pod) ({series}{labels})"


def some(series: str) -> str:
    """A series of all resources in the chosen namespaces."""
    return of(series, _SOME)


def rate(series: str, *by: str, labels: str = "") -> str:
    """How fast a counter grows, by these labels."""
    return f"sum by ({', '.join(by)}) (rate({series}{labels}[$__rate_interval]))"


def quantile(share: float, series: str, *by: str, labels: str = "") -> str:
    """The time that this share of the calls does not exceed."""
    return f"histogram_quantile({share}, {rate(f'{series}_bucket', 'le', *by, labels=labels)})"


STORES = Row(
    "Stores",
    (
        lines(
            "Commit time in Redis",
            "Time of one compare-and-set. Every write waits for it. Half of them are faster than p50, 99 in 100 than p99.",
            "s",
            (quantile(0.5, "persist_consensus_seconds", labels='{verb="compare_and_set"}'), "p50"),
            (quantile(0.99, "persist_consensus_seconds", labels='{verb="compare_and_set"}'), "p99"),
        ),
        lines(
            "Attempts to commit",
            "By outcome. cas_mismatch: another writer was faster, and the attempt is repeated. Many mean too many writers.",
            "ops",
            (rate("persist_command_total", "outcome"), "{{outcome}}"),
        ),
        lines(
            "Calls to the blob store",
            "Requests to the bucket by method. Each costs money and time.",
            "reqps",
            (rate("persist_blob_calls_total", "verb"), "{{verb}}"),
        ),
        lines(
            "Time of calls to the blob store",
            "99 in 100 calls are faster.",
            "s",
            (quantile(0.99, "persist_blob_seconds", "verb"), "{{verb}}"),
        ),
        lines(
            "Errors of both stores",
            "Calls that ended with an error. Each is repeated. Lost races are not errors.",
            "reqps",
            (rate("persist_blob_calls_total", "outcome", labels='{outcome!~"ok|stopped"}'), "blob {{outcome}}"),
            (
                rate("persist_consensus_calls_total", "outcome", labels='{outcome!~"ok|stopped|mismatch"}'),
                "consensus {{outcome}}",
            ),
        ),
    ),
)

MAINTENANCE = Row(
    "Maintenance",
    (
        lines(
            "Runs that ended",
            "Compaction merges batches, rollup writes a copy of the metadata, GC deletes what nothing needs. By outcome, an hour.",
            "short",
            ("sum by (type, outcome) (increase(persist_maintenance_runs_total[1h]))", "{{type}} {{outcome}}"),
        ),
        lines(
            "Bytes rewritten",
            "What maintenance reads and writes. Compaction costs this much traffic with the bucket.",
            "Bps",
            (rate("persist_maintenance_read_bytes_total", "type"), "{{type}} read"),
            (rate("persist_maintenance_written_bytes_total", "type"), "{{type}} written"),
        ),
        lines(
            "Time in runs",
            "How many runs are under way on average, by type and by where they run.",
            "short",
            (rate("persist_maintenance_run_seconds_total", "type", "runner"), "{{type}} {{runner}}"),
        ),
        lines(
            "Blobs deleted",
            "Objects that garbage collection deleted from the bucket, an hour.",
            "short",
            ("sum by (type) (increase(persist_maintenance_deleted_blobs_total[1h]))", "{{type}}"),
        ),
        lines(
            "Calls of pods to the stores that failed",
            "As the pods of maintenance and the drivers of sinks reported at their end, an hour. Each was repeated.",
            "short",
            (
                'sum by (type, store) (increase(persist_run_store_calls_total{outcome="error"}[1h]))'
                " or 0 * sum by (type, store) (persist_run_store_calls_total)",
                "{{type}} {{store}}",
            ),
        ),
        lines(
            "Commit time of pods in Redis",
            "Of the runs that ended in the last hour. 99 in 100 of their commits were faster.",
            "s",
            ("histogram_quantile(0.99, sum by (type, le) (rate(persist_run_commit_seconds_bucket[1h])))", "{{type}}"),
        ),
    ),
)
