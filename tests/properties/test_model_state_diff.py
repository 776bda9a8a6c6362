"""apply(a, between(a, b)) == b, whatever happened between a and b, and without looking at more than what happened."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.model import commands as c
from persist_engine.model.diff.state_diff import StateDiff, apply, between, deleted_blobs, inserted_blobs, live_blobs
from persist_engine.model.invariants import check_invariants
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.flat import FlatTrace
from persist_engine.model.spine.spine import MergeReq, MergeRes
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import SchemaPair, ShardState, SourceProgress
from persist_kit.depth import draws
from persist_kit.states import (
    DEBUG,
    SCHEMA,
    Stepper,
    append,
    batch,
    critical_id,
    frontier,
    leased_id,
    rollup,
    writer_id,
)

SETTINGS = Settings(
    maintenance=MaintenanceSettings(rollup_threshold=4, gc_versions_min=3, rollup_claim_ms=2, gc_claim_ms=3)
)
KINDS = """
    append append append append empty progress register heartbeat downgrade expire_reader expire_writer critical
    critical_downgrade expire_critical rollup rollup remove_rollups merge merge schema exert claim tick host
""".split()  # noqa: SIM905 - reads better than a list, and repetition is weight
small = st.integers(0, 3)
actions = st.tuples(
    st.sampled_from(KINDS),
    small,
    st.integers(0, 20),
)


class Shard(Stepper):
    """A stepper that turns small numbers into legal commands."""

    def __init__(self) -> None:
        super().__init__(settings=SETTINGS)
        self.requests: list[MergeReq] = []
        self.hostname = "host"

    def act(self, kind: str, which: int, value: int) -> None:
        cmd = self.command(kind, which, value)
        if cmd is not None:
            self.do(cmd, is_write=kind == "append", hostname=self.hostname)
            self.requests += self.maintenance.requests

    def command(self, kind: str, which: int, value: int) -> c.Command | None:
        upper = self.state.trace.upper.time or 0
        match kind:
            case "append":
                content = batch(
                    upper, upper + 1 + which, value, keys=(f"w{which}/p{self.state.seqno}",) if value else ()
                )
                return append(content, by=which, token_number=self.state.seqno, lease_ms=10)
            case "empty":
                return append(batch(upper, upper), by=which, token_number=self.state.seqno, lease_ms=10)
            case "progress":
                cmd = append(batch(upper, upper + 1, value), by=which, token_number=self.state.seqno)
                stored = self.state.progress.get("sink")
                progress = ("sink", SourceProgress(bytes([value]), frontier(value)))
                return replace(cmd, progress=progress, expected_progress=None if stored is None else stored.token)
            case "register":
                return c.RegisterLeasedReader(
                    reader_id=leased_id(which), lease_ms=value, debug=DEBUG, since_from_critical=value % 2 == 0
                )
            case "heartbeat":
                return c.HeartbeatLeasedReader(leased_id(which))
            case "downgrade":
                return c.DowngradeSince(reader_id=leased_id(which), outstanding_seqno=None, new_since=frontier(value))
            case "expire_reader":
                return c.ExpireLeasedReader(leased_id(which))
            case "expire_writer":
                return c.ExpireWriter(writer_id(which))
            case "critical":
                return c.RegisterCriticalReader(reader_id=critical_id(which), opaque=b"0", debug=DEBUG)
            case "critical_downgrade":
                reader = self.state.critical_readers.get(critical_id(which))
                if reader is None:
                    return None
                return c.CompareAndDowngradeSince(
                    reader_id=critical_id(which),
                    expected_opaque=reader.opaque if value % 3 else b"wrong",
                    new_opaque=bytes([value]),
                    new_since=frontier(value),
                )
            case "expire_critical":
                return c.ExpireCriticalReader(critical_id(which))
            case "rollup":
                return c.AddRollup(self.state.seqno, rollup(self.state.seqno))
            case "remove_rollups":
                return c.RemoveRollups(tuple(self.state.rollups.items()[:-1][:which]))
            case "merge":
                return self.merge(which, value)
            case "schema":
                return c.RegisterSchema(SCHEMA if which else SchemaPair(b"other", b""))
            case "exert":
                return c.SpineExert(value)
            case "claim":
                return c.ClaimCompactions(max_requests=which, claim_ms=value)
            case "tick":
                self.now_ms += value
            case "host":
                self.hostname = f"host{which}"
        return None

    def merge(self, which: int, value: int) -> c.Command | None:
        if not self.requests:
            return None
        request = self.requests[value % len(self.requests)]
        total = sum(each.rows for _, each in request.inputs)
        keys = (f"out/{request.id}-{self.state.seqno}",) if total else ()
        output = replace(batch(0, 1, total, keys=keys), desc=request.desc)
        return c.ApplyMergeRes(MergeRes(output, request.id if which else None))


@pytest.mark.slow
@settings(max_examples=draws(120), deadline=None)
@given(st.lists(actions, max_size=50), st.booleans())
def test_every_version_follows_from_its_diff(script: list[tuple[str, int, int]], closing: bool) -> None:
    """A replica that starts at version 1 and sees only diffs stays equal; one diff leads from first to last (spec 8.10)."""
    shard = Shard()
    first = replica = rebuilt(shard.state)
    counted: Counter[str] = Counter()
    for action in [*script, *([("close", 0, 0)] if closing else [])]:
        seen = len(shard.diffs)
        close(shard) if action[0] == "close" else shard.act(*action)
        for diff in shard.diffs[seen:]:
            live = set(live_blobs(replica))
            replica = apply(replica, diff, count=lambda path: counted.update([path]))
            came, went = set(inserted_blobs(diff)), set(deleted_blobs(diff))
            assert set(live_blobs(replica)) == (live - went) | came
            assert apply(replica, diff) is replica
        assert replica == shard.state
        check_invariants(None, replica, deep=True)
    assert set(counted) <= {"structured"}
    if shard.state.seqno > first.seqno:
        assert apply(first, between(first, shard.state)) == shard.state


def close(shard: Shard) -> None:
    """Close both frontiers and finalize."""
    for reader_id in list(shard.state.critical_readers):
        shard.do(c.ExpireCriticalReader(reader_id))
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(9), lease_ms=1000, debug=DEBUG))
    upper = shard.state.trace.upper.time or 0
    shard.do(append(batch(upper, None), by=9, token_number=10_000))
    for reader_id in list(shard.state.leased_readers):
        shard.do(c.DowngradeSince(reader_id=reader_id, outstanding_seqno=None, new_since=frontier(None)))
    assert shard.state.trace.since.is_empty()
    for _ in range(500):
        answer = shard.do(c.BecomeTombstone())
        assert isinstance(answer, c.TombstoneStep)
        if not answer.progressed:
            break
    assert answer == c.TombstoneStep(finalized=True, progressed=False)
    assert not [each for each in live_blobs(shard.state) if each.kind == "part"]


def rebuilt(state: ShardState) -> ShardState:
    """The same contents without any sharing, as if decoded."""
    copies = {
        field.name: SharedMap(getattr(state, field.name).items())
        for field in dataclasses.fields(state)
        if isinstance(getattr(state, field.name), SharedMap)
    }
    return replace(state, trace=Trace.unflatten(state.trace.flatten()), **copies)


@pytest.mark.slow
@settings(max_examples=draws(60), deadline=None)
@given(st.lists(actions, max_size=30))
def test_diff_does_not_depend_on_sharing(script: list[tuple[str, int, int]]) -> None:
    """Between states that share nothing, the diff is the same as between those that do."""
    shard = Shard()
    for action in script:
        before, seen = shard.state, len(shard.diffs)
        shard.act(*action)
        if len(shard.diffs) == seen + 1:
            assert between(rebuilt(before), rebuilt(shard.state)) == shard.diffs[-1]


def test_every_field_of_state_is_in_the_diff() -> None:
    """A new field that no diff carries would be lost on replicas."""
    fixed = {"shard_id", "codecs", "seqno"}
    names = {field.name for field in dataclasses.fields(ShardState)} - fixed - {"trace"}
    names |= {field.name for field in dataclasses.fields(FlatTrace)}
    assert names | {"seqno_from", "seqno_to", "latest_rollup_key", "shard_id", "predecessor"} == {
        f.name for f in dataclasses.fields(StateDiff)
    }
