"""Seeded histories of the whole engine, the sameness of a seed, and proof that the simulation sees bugs."""

import contextlib
import functools
import os
import signal
import subprocess
import sys

import pytest
from persist_kit.sim.main import explain, main, minimise
from persist_kit.sim.mutants import MUTANTS, planted
from persist_kit.sim.plan import plan_of
from persist_kit.sim.simulation import Report, simulate

#: CI runs 200 seeds, `make sim` any number.
SEEDS = 50
CHUNK = 10
#: Seeds with what few histories contain: names, a sink that ends, a compaction of a closed shard, and recoveries.
SELDOM = (94, 210, 234, 634)
PATIENCE_S = 60
#: Histories in which each planted bug must show; `make sim` and CI run many more without bugs.
MUTANT_SEEDS = 400
EVERYWHERE = {"writers", "background", "sinks", "upserts", "streams", "tables", "names"}
#: The kinds of histories, or of actors, that alone can show a bug: no need to look at the others.
WHERE_IT_SHOWS = {
    "a sink's lost append joins later": {"sinks"},
    "a sink stages before it has read back": {"sinks"},
    "a sink does not read what is appended": {"sinks"},
    "a lapsed sink skips history": {"sinks"},
    "a stopped compaction is applied": {"background"},
    "an upsert does not follow": {"upserts"},
    "late commands come to pass": {"upserts"},
    "order keys are not asked": {"upserts"},
    "keyed reads do not follow": {"upserts"},
    "upserts replace any progress": {"upserts"},
    "progress of nothing is not stored": {"upserts"},
    "older schemas retract": {"upserts"},
    "refreshes come early": {"sinks"},
    "errors are not awaited": {"sinks"},
    "positions alone are not compared": {"streams"},
    "positions end before their rows": {"streams"},
    "copies are deleted whole": {"streams"},
    "a transaction is done again": {"tables"},
    "the expected time is not asked": {"tables"},
    "a correction follows nothing": {"tables"},
    "rows that an overwrite left are of any time": {"tables"},
    "a feed skips what it waited for": {"tables"},
    "idle handles end in use": {"tables"},
    "retention passes holds": {"admin", "tables"},
    "an operator does not take over": {"admin"},
    "leased parts end with their snapshot": {"examiner"},
    "changes hold no version": {"examiner"},
    "freed names come back": {"names"},
    "a renaming takes any name": {"names"},
    "a recovered log has the old birth": {"recoverer"},
    "a recovery takes the oldest rollup": {"recoverer"},
    "a recovery replaces any log": {"recoverer"},
    "a recovered log takes old stages": {"recoverer"},
    "a recovered log leaves no gap": {"recoverer"},
}
#: What only histories show in which consensus loses versions.
WHERE_VERSIONS_ARE_LOST = {
    "a refresh takes its own entry for granted",
    "consensus compares seqnos only",
    "consensus truncates at any entry",
    "a lost shard is created anew",
    "verification sees no lost versions",
}
#: The first seed to look at, for what shows in one of thousands of histories only: versions must be lost between the last look of a
#: collection and its truncation. To be found anew when histories change.
SHOWS_FROM = {"consensus truncates at any entry": 500_200}
#: A seed that shows the planted bug, looked at first. Where histories have changed and it no longer does, the search begins.
SHOWS_AT = {
    "no token": 2,
    "no refetch before a mismatch": 0,
    "initial rollup deleted when not surely lost": 10,
    "rollup deleted when unknown": 56,
    "compaction output deleted when unknown": 7,
    "only the last attempt counts": 7,
    "compaction deletes its inputs": 11,
    "a stopped compaction is applied": 389,
    "gc does not subtract live parts": 0,
    "gc truncates before it deletes": 0,
    "gc ignores holds": 58,
    "gc unlinks rollups before it truncates": 9,
    "expiry moves since": 19,
    "listen without lower filter": 40,
    "progress is not compared": 39,
    "fencing token is not compared": 40,
    "finalize under readers": 47,
    "stages older than the floor are linked": 221,
    "a sink's lost append joins later": 136,
    "a sink stages before it has read back": 38,
    "a sink does not read what is appended": 114,
    "a lapsed sink skips history": 117,
    "an upsert does not follow": 304,
    "late commands come to pass": 17,
    "order keys are not asked": 46,
    "a refresh takes its own entry for granted": 4,
    "consensus compares seqnos only": 40,
    "consensus truncates at any entry": 500_399,
    "a lost shard is created anew": 32,
    "verification sees no lost versions": 276,
    "keyed reads do not follow": 346,
    "upserts replace any progress": 862,
    "progress of nothing is not stored": 19,
    "compactions forget columns": 3,
    "older schemas retract": 1034,
    "refreshes come early": 38,
    "errors are not awaited": 55,
    "positions alone are not compared": 175,
    "positions end before their rows": 2,
    "copies are deleted whole": 2,
    "a transaction is done again": 269,
    "a correction follows nothing": 62,
    "a feed skips what it waited for": 1166,
    "retention passes holds": 27,
    "changes hold no version": 849,
    "idle handles end in use": 848,
    "freed names come back": 896,
    "the expected time is not asked": 206,
    "rows that an overwrite left are of any time": 733,
    "leased parts end with their snapshot": 219,
    "an operator does not take over": 548,
    "a renaming takes any name": 104,
    "a recovered log has the old birth": 472,
    "a recovery takes the oldest rollup": 634,
    "a recovery replaces any log": 586,
    "a recovered log takes old stages": 78,
    "a recovered log leaves no gap": 580,
    "listings are deleted alone": 5,
}


@functools.cache
def report_of(seed: int) -> Report:
    """Both laws below look at the same histories."""
    return simulate(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_history_breaks_a_rule(first: int) -> None:
    """`make sim SEEDS=2000` for more. A failure prints the command that shows it again (spec 21.3)."""
    for seed in range(first, first + CHUNK):
        report = report_of(seed)
        assert report.failure is None, explain(report)


@pytest.mark.slow
def test_the_same_seed_is_the_same_history_in_any_process() -> None:
    """Event by event, whatever the order of hashes: a failing seed can be handed on."""
    plans = [plan for seed in range(400) if (plan := plan_of(seed)).weather.crash and plan.weather.late]
    seeds = [next(plan.seed for plan in plans if plan.written_by == kind) for kind in sorted(EVERYWHERE)]
    traces = [simulate(seed).trace for seed in seeds]
    assert len(set(traces)) == len(seeds)
    code = f"from persist_kit.sim.simulation import simulate; print(*[simulate(s).trace for s in {seeds}])"
    answer = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "1"}, check=True, capture_output=True, text=True
    )
    assert answer.stdout.split() == traces


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed() -> None:
    """No other process would end them: they wait for more seeds. What they inherit of it ends with the last of them."""
    code = (
        "import os, signal\n"
        "from persist_kit.sim.main import workers\n"
        "with workers(1) as pool:\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        assert parent.communicate(timeout=PATIENCE_S) == (b"", None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


@pytest.mark.slow
def test_histories_contain_what_they_are_for() -> None:
    """A quiet simulation proves nothing: faults, crashes, sleeping machines, late calls and refusals all occur."""
    totals: dict[str, int] = {}
    for seed in (*range(SEEDS), *SELDOM):
        for name, count in report_of(seed).counts.items():
            totals[name] = totals.get(name, 0) + count
    happened = [
        "appends",
        "refusals",
        "unknown",
        "faults",
        "late calls",
        "crashes",
        "freezes",
        "closed",
        "evolved",
        "upserts",
        "positions",
        "takeovers",
        "comparisons on standby",
        "writes of tables",
        "changes of tables",
        "steps of names",
        "lost versions",
        "forked logs found",
        "recoveries",
    ]
    paths = ["news", "inline flushes", "compactions applied exact", "compactions applied subset", "updates slow"]
    sinks = ["corrections appended", "corrections lost", "lapses of a sink's reader", "sinks ended"]
    for name in [*happened, *paths, *sinks, "compactions skipped as closed"]:
        assert totals.get(name, 0) > 0, totals


def kinds_of(seed: int) -> set[str]:
    """The kind of its history, and of its actors."""
    plan = plan_of(seed)
    return {plan.written_by, *(name.rstrip("0123456789") for name, _ in plan.actors)}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bug_is_caught(mutant: str) -> None:
    """Taking a safety rule out of the engine breaks a history soon."""
    first = SHOWS_FROM.get(mutant, 0)
    looked_at = range(first, first + MUTANT_SEEDS)
    seeds = [seed for seed in looked_at if kinds_of(seed) & WHERE_IT_SHOWS.get(mutant, EVERYWHERE)]
    if mutant in WHERE_VERSIONS_ARE_LOST:
        seeds = [seed for seed in seeds if plan_of(seed).disaster is not None]
    with planted(mutant):
        assert any(simulate(seed).failure is not None for seed in [SHOWS_AT[mutant], *seeds])


@pytest.mark.slow
def test_a_broken_seed_is_made_small_and_can_be_seen_again(capsys: pytest.CaptureFixture) -> None:
    """The report names the command, the rule and the end of the history."""
    with planted("gc ignores holds"):
        seeds = [SHOWS_AT["gc ignores holds"], *range(MUTANT_SEEDS)]
        seed = next(seed for seed in seeds if simulate(seed).failure is not None)
        without, report = minimise(seed)
        assert report.failure is not None
        assert without, "some of its actors have nothing to do with it"
        assert main(["--seed", str(seed), "--without", ",".join(sorted(without))]) == 1
    shown = capsys.readouterr().out
    assert f"make sim SEED={seed} WITHOUT={','.join(sorted(without))}" in shown
    assert "VIOLATION" in shown
    assert main(["--seed", str(seed)]) == 0
