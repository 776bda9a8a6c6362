"""What the status of a sink says: how far a driver is, how fresh the rows are, why a driver failed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from shard_runs import IDLE, patch
from sink_manifests import AIRLINES, airlines_input, airlines_sink, numbers_stream

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

TARGET_S = 60
#: In the rows of the airlines, so that a task on an executor fails, and not the analysis of the query.
FAILING = "select carrier, cast(name as int) as name from input"


@pytest.mark.wish(12)
def test_wish_the_innermost_cause_and_the_last_log_lines_of_a_failed_driver_stand_on_the_sink(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """A task fails on an executor: the driver has a Spark exception with a Java exception in it."""
    shard, _ = new_shard("fails", schema={"key": "carrier STRING", "value": "name INT"}, **IDLE)
    sink = named("fails")
    once = {"policy": "OnFailure", "backoffSeconds": 1, "maxConsecutiveFailures": 1}
    cluster.apply(airlines_sink(sink, shard, input=airlines_input(sql=FAILING), restart=once))
    failed = cluster.wait_condition("sparksink", sink, "Stalled", timeout_s=400)
    failure = cluster.status("sparksink", sink)["lastFailure"]
    first, _, rest = failure["message"].partition("\n")
    assert (failure["class"], failure["exitCode"]) == ("Configuration", 72), "the same rows fail again"
    assert "CAST_INVALID_INPUT" in first, "the cause, not the stage that failed by it"
    log = rest.partition("--- last log lines\n")[2]
    assert log.strip(), failure["message"]
    assert "CAST_INVALID_INPUT" in failed["message"]
    (attempt,) = cluster.status("sparksink", sink)["history"]
    assert (attempt["outcome"], attempt["class"]) == ("Failed", "Configuration")
    assert "CAST_INVALID_INPUT" in attempt["message"]
    described = cluster.kubectl("describe", "sparksink", sink)
    assert "CAST_INVALID_INPUT" in described
    assert failure["podName"] in described


def test_fresh_turns_false_when_a_stream_stops_and_true_when_it_runs_again_with_its_progress_on_the_status(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, _ = new_shard("fresh", schema={"key": "id BIGINT", "value": "number BIGINT"}, **IDLE)
    sink = named("fresh")

    def fresh_s() -> float:
        return datetime.fromisoformat(cluster.status("sparksink", sink)["freshness"]["time"]).timestamp()

    def running() -> dict[str, Any]:
        return dict(cluster.status("sparksink", sink).get("progress", {}).get("running", {}))

    cluster.apply(numbers_stream(sink, shard, freshness={"targetSeconds": TARGET_S}))
    cluster.wait_condition("sparksink", sink, "Fresh", reason="Current", timeout_s=400)
    first = cluster.wait("rows", lambda: running().get("rowsRead") and running(), timeout_s=120)
    assert first["stage"] == "Streaming"
    assert cluster.status("sparksink", sink)["driver"]["phase"] == "Running"
    cluster.wait("more rows of the same driver", lambda: running()["rowsRead"] > first["rowsRead"], timeout_s=120)
    assert running()["batches"] > first["batches"]

    patch(cluster, "sparksink", sink, {"suspend": True})
    late = cluster.wait_condition("sparksink", sink, "Fresh", "False", reason="Suspended", timeout_s=TARGET_S + 180)
    turned_s = datetime.fromisoformat(late["lastTransitionTime"]).timestamp()
    assert TARGET_S <= turned_s - fresh_s() < TARGET_S + 60
    assert not running(), "no driver runs"

    patch(cluster, "sparksink", sink, {"suspend": False})
    cluster.wait_condition("sparksink", sink, "Fresh", reason="Current", timeout_s=400)
    assert fresh_s() > turned_s


def test_a_batch_driver_shows_what_it_has_read_while_it_runs(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """A slow input: each row takes a second."""
    shard, _ = new_shard("shows", schema=AIRLINES, **IDLE)
    sink = named("shows")
    slow = "select carrier, java_method('java.lang.Thread', 'sleep', 1000L) || name as name from input"
    cluster.apply(airlines_sink(sink, shard, input=airlines_input(sql=slow), envelope={"type": "Append"}))
    seen = cluster.wait(
        "the progress of the driver",
        lambda: cluster.status("sparksink", sink).get("progress", {}).get("running"),
        timeout_s=300,
        every_s=0.5,
    )
    assert seen["stage"] in {"Reading", "Appending"}
    assert cluster.status("sparksink", sink)["driver"]["phase"] == "Running"
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=400)
    progress = cluster.status("sparksink", sink)["progress"]
    assert (progress["rowsRead"], progress["updatesWritten"]) == (16, 16)
    assert "running" not in progress
