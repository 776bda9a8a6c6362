"""Retention under any interleaving: since never passes what is retained and never goes back, and every time in the window is
read as it was written, whatever readers, upserts, listeners and maintenance do meanwhile.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Antichain, CriticalReaderId
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.client.read.listen import Progress
from persist_engine.dataflow.open import open_upsert
from persist_engine.model import commands as c
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.frontier import EMPTY
from persist_engine.model.state import ShardState
from persist_engine.work.perform import perform_due
from persist_engine.work.repair.force import force_compaction, force_gc
from persist_kit.depth import draws
from persist_kit.states import DEBUG, Stepper, append, batch, critical_id, first_state, leased_id
from persist_kit.world import SCHEMA, AheadEnv, World, contents

A = Antichain.of
retentions = st.none() | st.integers(1, 300)
ids = st.integers(1, 3)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 120), st.integers(0, 2)),
        st.tuples(st.just("lease"), ids, st.booleans()),
        st.tuples(st.just("let go"), ids, st.integers(0, 500)),
        st.tuples(st.just("expire"), ids, st.none()),
        st.tuples(st.just("hold"), ids, st.none()),
        st.tuples(st.just("move"), ids, st.integers(0, 500)),
        st.tuples(st.just("release"), ids, st.none()),
        st.tuples(st.just("retain"), retentions, st.none()),
        st.tuples(st.just("later"), st.integers(1, 1500), st.none()),
    ),
    max_size=30,
)


def command(shard: Stepper, what: str, one, other) -> c.Command | None:
    upper = shard.state.trace.upper.time
    match what:
        case "append":
            return append(batch(upper, upper + one, rows=other if one else 0), token_number=shard.state.seqno)
        case "lease":
            return c.RegisterLeasedReader(
                reader_id=leased_id(one), lease_ms=1000, debug=DEBUG, since_from_critical=other
            )
        case "let go":
            new = EMPTY if other == 500 else A(other)
            return c.DowngradeSince(reader_id=leased_id(one), outstanding_seqno=None, new_since=new)
        case "expire":
            return c.ExpireLeasedReader(leased_id(one))
        case "hold":
            return c.RegisterCriticalReader(reader_id=critical_id(one), opaque=b"", debug=DEBUG)
        case "move" if critical_id(one) in shard.state.critical_readers:
            new = EMPTY if other == 500 else A(other)
            return c.CompareAndDowngradeSince(
                reader_id=critical_id(one), expected_opaque=b"", new_opaque=b"", new_since=new
            )
        case "release":
            return c.ExpireCriticalReader(critical_id(one))
        case "retain":
            return c.SetRetention(one)
        case "later":
            shard.now_ms += one
    return None


def check(before: ShardState, after: ShardState) -> None:
    """What holds of any version, and of the step to it."""
    was, now, upper = before.trace.since, after.trace.since, after.trace.upper
    assert was <= now
    if after.retain_ms is None or now == was:
        return
    assert now <= A(max(0, upper.time - after.retain_ms)), "since passed what is retained"


@pytest.mark.slow
@given(retentions, commands)
@settings(max_examples=draws(250), deadline=None)
def test_since_never_passes_what_is_retained_nor_goes_back(retain_ms, todo):
    shard = Stepper(replace(first_state()[0], retain_ms=retain_ms))
    for what, one, other in todo:
        before, known = shard.state, len(shard.diffs)
        cmd = command(shard, what, one, other)
        if cmd is None:
            continue
        shard.do(cmd)
        after = shard.state
        check(before, after)
        if len(shard.diffs) > known:
            assert apply(before, shard.diffs[-1]) == after
        is_free = not (after.leased_readers or after.critical_readers)
        if what == "append" and after.retain_ms is not None and is_free and after.trace.since.time is not None:
            lag = after.trace.upper.time - after.retain_ms - after.trace.since.time
            assert lag < max(1, after.retain_ms // 100), "since lags behind what it may let go of"


BUSY = Settings(
    batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=200),
    maintenance=MaintenanceSettings(rollup_threshold=3, gc_versions_min=2, validate_roundtrip=True),
    compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1, memory_bytes_max=8192),
)
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("upsert"), st.integers(0, 3), st.integers(1, 6)),
        st.tuples(st.just("delete"), st.integers(0, 3), st.integers(1, 6)),
        st.tuples(st.just("listen"), st.none(), st.none()),
        st.tuples(st.just("let go"), st.integers(0, 40), st.none()),
        st.tuples(st.just("hold"), st.none(), st.none()),
        st.tuples(st.just("retain"), st.sampled_from([None, 3, 10, 30]), st.none()),
        st.tuples(st.just("maintain"), st.booleans(), st.none()),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.slow
@given(st.sampled_from([None, 5, 12, 300]), deeds)
@settings(max_examples=draws(10), deadline=None)
def test_every_time_in_the_window_is_read_as_it_was_written(retain_ms, todo):
    """Upserts, whose handle lets go of all but the last time; two processes; time moves as the test says."""
    world = World(settings=BUSY, env=AheadEnv(), retain_ms=retain_ms)
    client, other, shard_id = world.process(), world.process(), world.shard_id()
    now: dict[int, str] = {}
    paper: list[dict[int, str]] = []  # by time
    with ExitStack() as stack:
        orders = stack.enter_context(open_upsert(client, shard_id, SCHEMA, purpose="test"))
        machine = other.machine(shard_id)
        before = machine.state
        for what, one, two in todo:
            upper = len(paper)
            if what in {"upsert", "delete"}:
                values = [None if what == "delete" else {"name": f"{one} at {upper}"}]
                table = pa.table(
                    {
                        "key": pa.array([{"id": one}], SCHEMA.key_type),
                        "val": pa.array(values, SCHEMA.val_type),
                        "time": pa.array([upper], pa.int64()),
                    }
                )
                orders.upsert_at(table, upper=upper + two)
                now = {key: name for key, name in now.items() if key != one}
                now |= {} if what == "delete" else {one: f"{one} at {upper}"}
                paper += [now] * two
            elif what == "listen" and upper:
                with other.open_leased_reader(shard_id, purpose="listen") as reader:
                    since = reader.since.time
                    for event in reader.listen(since) if since is not None and since < upper else ():
                        if isinstance(event, Progress) and event.frontier >= A(upper):
                            break
            elif what == "let go":
                with other.open_leased_reader(shard_id, purpose="let go") as reader:
                    reader.downgrade_since(EMPTY if one == 40 else A(one))
            elif what == "hold":
                client.open_critical_since(shard_id, CriticalReaderId.new(), opaque=b"").expire()
            elif what == "retain":
                other.set_retention(shard_id, one)
            elif one:
                force_compaction(machine, full=True)
            else:
                perform_due(machine)
                force_gc(machine)
            after = machine.refresh()
            check(before, after)
            before = after
        since = before.trace.since.time
        for at in range(since if since is not None else len(paper), len(paper)):
            expected = sorted((key, name, 1) for key, name in paper[at].items())
            assert sorted(contents(client, shard_id, at)) == sorted(contents(other, shard_id, at)) == expected
