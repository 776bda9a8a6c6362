"""List-append histories on real servers: the engine's are linearizable, and those of planted bugs are not.

`make linearizability HISTORIES=200` for more. A history that is not linearizable stays in the folder that the failure
names, with a drawing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from persist_kit.fault_proxy import Trouble
from persist_kit.histories.bugs import BUGS
from persist_kit.histories.main import Cluster, Plan, cluster

pytestmark = [pytest.mark.redis, pytest.mark.s3]

#: Histories in which each planted bug must show. Real processes race as they like: each shows in nine of ten.
HISTORIES_MAX = 15
_BUG_SHOWS_MOSTLY = Plan(seed=0, processes=2, nodes=2, transactions=10, read_only=0.3)
#: Only a process that reads without appending, while others append without its knowledge, meets a stale upper.
_BUG_SHOWS = {"stale upper": Plan(seed=0, processes=3, nodes=1, transactions=16, read_only=0.6)}
_LOSSES = Trouble(lose_answer=0.12, reset=0.02, delay=0.2, delay_s_max=0.01)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("histories")) as servers:
        yield servers


def test_a_history_under_losses_is_linearizable(running: Cluster):
    """Spec 21.2."""
    verdict = running.play(Plan(seed=1, processes=2, transactions=6, redis=_LOSSES, s3=_LOSSES))
    assert verdict.is_linearizable, verdict
    assert verdict.counts["lost answers"] > 0
    assert verdict.counts["ok transactions"] > 12


def test_a_history_through_partition_and_restarts_is_linearizable(running: Cluster):
    events = ((30, "partition"), (60, "redis"), (90, "s3"))
    verdict = running.play(Plan(seed=2, processes=2, transactions=6, redis=_LOSSES, events=events))
    assert verdict.is_linearizable, verdict
    assert verdict.counts["partition events"] == verdict.counts["redis events"] == verdict.counts["s3 events"] == 1


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_shows(running: Cluster, bug: str):
    for seed in range(HISTORIES_MAX):
        plan = replace(_BUG_SHOWS.get(bug, _BUG_SHOWS_MOSTLY), seed=seed, redis=_LOSSES, bug=bug)
        verdict = running.play(plan)
        if verdict.answer == "not linearizable":
            assert verdict.kept is not None
            assert (verdict.kept / "history.html").exists()
            return
    pytest.fail(f"{HISTORIES_MAX} histories with this bug look linearizable")


def test_a_killed_process_leaves_transactions_of_unknown_outcome(running: Cluster):
    """Last, since the processes start anew after it."""
    verdict = running.play(Plan(seed=3, processes=2, transactions=6, redis=_LOSSES, events=((80, "worker"),)))
    assert verdict.is_linearizable, verdict
    assert verdict.counts["worker events"] == 1
    assert verdict.counts.get("unknown transactions", 0) > 0
