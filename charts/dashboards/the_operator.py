"""The dashboard Operator: the operator itself."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models
from panels import Row, board, lines, number
from series import MAINTENANCE, STORES, quantile, rate

#: Series of every process; these are those of the operator.
_ONLY = " and on (instance) persist_operator_leader"
_ROWS = [
    Row(
        "Now",
        (
            number("Leaders", "Must be 1 for each installation.", "short", "sum(persist_operator_leader)"),
            number("Replicas", "Replicas that Prometheus scrapes.", "short", "count(persist_operator_leader)"),
            number(
                "Oldest key in the queue",
                "How long the oldest resource has waited for a worker.",
                "s",
                "max(persist_operator_queue_oldest_seconds)",
                bad_from=(60, 600),
            ),
            number(
                "Last list of all resources",
                "Time since the leader last listed everything.",
                "s",
                "time() - max(persist_operator_last_resync_timestamp_seconds)",
                bad_from=(900, 1800),
            ),
        ),
    ),
    Row(
        "Reconciles",
        (
            lines(
                "Reconciles",
                "By kind and result. store_busy: all calls of a store were in use; it is tried again a second later.",
                "ops",
                (rate("persist_operator_reconcile_total", "kind", "result"), "{{kind}} {{result}}"),
            ),
            lines(
                "Time of a reconcile",
                "99 in 100 are faster.",
                "s",
                (quantile(0.99, "persist_operator_reconcile_seconds", "kind"), "{{kind}}"),
            ),
            lines(
                "Queue",
                "Resources that are due and wait for a worker.",
                "short",
                ("max without (instance, pod) (persist_operator_queue_depth)", "keys"),
            ),
            lines(
                "Refused",
                "Actions, observations (plan) and statuses that were refused, an hour.",
                "short",
                ("sum by (what) (increase(persist_operator_refusals_total[1h]))", "{{what}}"),
            ),
            lines(
                "Canary",
                "How long the operator takes to commit a row to a shard of its own and to read it back. Empty without canary.enabled.",
                "s",
                (quantile(0.5, "persist_operator_canary_seconds"), "p50"),
                (quantile(0.99, "persist_operator_canary_seconds"), "p99"),
            ),
            lines(
                "Leaked pods",
                "Pods whose resource or driver is gone, as of the last list. More than 0 for long is an alert.",
                "short",
                ("max without (instance, pod) (persist_operator_leaked_pods)", "pods"),
            ),
            lines(
                "Pods and Jobs started",
                "By type, an hour.",
                "short",
                ("sum by (type) (increase(persist_operator_jobs_started_total[1h]))", "{{type}}"),
            ),
            lines(
                "Statuses behind",
                "Resources whose stored status does not cover their spec.",
                "short",
                (
                    "count(max without (instance, pod) (persist_resource_generations_behind)) or 0 * max(persist_operator_leader)",
                    "resources",
                ),
            ),
        ),
    ),
    Row(
        "API server",
        (
            lines(
                "Requests",
                "By verb and code. 0: no answer. 429: throttled.",
                "reqps",
                (rate("persist_operator_api_requests_total", "verb", "code"), "{{verb}} {{code}}"),
            ),
            lines(
                "Restarts of the watches",
                "An hour. A few are normal.",
                "short",
                ("sum(increase(persist_operator_watch_restarts_total[1h]))", "restarts"),
            ),
        ),
    ),
    Row(
        "Process",
        (
            lines(
                "Memory",
                "Resident memory by replica.",
                "bytes",
                (f"process_resident_memory_bytes{_ONLY}", "{{pod}}{{instance}}"),
            ),
            lines(
                "CPU",
                "Cores in use by replica.",
                "short",
                (f"rate(process_cpu_seconds_total[$__rate_interval]){_ONLY}", "{{pod}}{{instance}}"),
            ),
        ),
    ),
    MAINTENANCE,
    STORES,
]


def made() -> models.Dashboard:
    """The dashboard."""
    variables = []
    return board(
        "persist-operator",
        "persist / Operator",
        "The operator: whether it leads, keeps up, and is answered by the API server.",
        variables,
        _ROWS,
    )
