"""Readers, one section per kind: what their commands change, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import (
    Fenced,
    InvalidUsage,
)
from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands as c
from persist_engine.model.frontier import EMPTY, MINIMUM
from persist_kit.states import (
    DEBUG,
    Stepper,
    append,
    batch,
    committed,
    critical_id,
    downgrade,
    frontier,
    leased_id,
    refused,
    register,
    writer_id,
)

# --- leased readers


def test_a_reader_holds_since_and_this_very_version() -> None:
    """Spec 1.8, 9.7."""
    shard = Stepper(now_ms=5)
    assert register(shard) == c.Registered(MINIMUM, SeqNo(2))
    reader = shard.state.leased_readers[leased_id(1)]
    assert (reader.seqno, reader.since, reader.last_heartbeat_ms) == (2, MINIMUM, 5)


def test_a_reader_may_start_at_the_critical_readers_since() -> None:
    shard = Stepper()
    register(shard, 1)
    committed(shard, c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"a", debug=DEBUG))
    move = c.CompareAndDowngradeSince(
        reader_id=critical_id(1), expected_opaque=b"a", new_opaque=b"b", new_since=frontier(7)
    )
    committed(shard, move)
    assert shard.state.trace.since == MINIMUM
    answer = register(shard, 2, since_from_critical=True)
    assert isinstance(answer, c.Registered)
    assert answer.since == frontier(7)
    answer = register(shard, 3)
    assert isinstance(answer, c.Registered)
    assert answer.since == MINIMUM, "the shard's own, where the reader asked for none"


def test_since_is_the_meet_of_all_readers_and_never_steps_back() -> None:
    """Spec 9.9."""
    shard = Stepper()
    register(shard, 1)
    register(shard, 2)
    assert committed(shard, downgrade(1, 7)) == c.SinceDowngraded(frontier(7))
    assert shard.state.trace.since == MINIMUM
    committed(shard, downgrade(2, 5))
    assert shard.state.trace.since == frontier(5)
    assert committed(shard, downgrade(1, 3)) == c.SinceDowngraded(frontier(7)), "a reader's since never steps back"
    committed(shard, c.ExpireLeasedReader(leased_id(2)))
    assert shard.state.trace.since == frontier(5), "expiry leaves since alone (bug 22)"
    committed(shard, replace(downgrade(1, 7), is_heartbeat=True))
    assert shard.state.trace.since == frontier(5), "and so does another's heartbeat after it"
    committed(shard, downgrade(1, 7))
    assert shard.state.trace.since == frontier(7), (
        "but a downgrade moves it to what all readers have given up (spec 9.8)"
    )
    committed(shard, replace(downgrade(1, 8), is_heartbeat=True))
    assert shard.state.trace.since == frontier(8), "a since that moved moves the shard's, in a heartbeat too"


def test_downgrading_moves_the_hold_and_renews_the_lease() -> None:
    shard = Stepper()
    register(shard)
    shard.now_ms = 9
    committed(shard, downgrade(1, 1))
    reader = shard.state.leased_readers[leased_id(1)]
    assert (reader.seqno, reader.last_heartbeat_ms) == (3, 9)
    committed(shard, downgrade(1, 1, outstanding=3))
    assert shard.state.leased_readers[leased_id(1)].seqno == 3
    with pytest.raises(InvalidUsage, match="cannot hold v2 again"):
        shard.do(downgrade(1, 1, outstanding=2))
    committed(shard, downgrade(1, 1, outstanding=99))
    assert shard.state.leased_readers[leased_id(1)].seqno == shard.state.seqno


def test_a_reader_that_is_gone_gets_an_empty_since() -> None:
    """Bug 23: a machine that slept must not crash."""
    assert refused(Stepper(), downgrade(1, 5)) == c.SinceDowngraded(EMPTY)


def test_heartbeat_says_whether_the_reader_is_there() -> None:
    """Spec 9.11."""
    shard = Stepper()
    register(shard)
    shard.now_ms = 100
    assert committed(shard, c.HeartbeatLeasedReader(leased_id(1))) == c.HeartbeatSeen(existed=True)
    assert shard.state.leased_readers[leased_id(1)].last_heartbeat_ms == 100
    shard.now_ms = 50
    committed(shard, c.HeartbeatLeasedReader(leased_id(1)))
    assert shard.state.leased_readers[leased_id(1)].last_heartbeat_ms == 100
    assert committed(shard, c.HeartbeatLeasedReader(leased_id(2))) == c.HeartbeatSeen(existed=False)


def test_expiry_says_whether_there_was_something() -> None:
    """Spec 9.12."""
    shard = Stepper()
    register(shard)
    committed(shard, append(batch(0, 1, 1), token_number=1))
    committed(shard, c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"a", debug=DEBUG))
    gone = c.ExpireLeasedReader(leased_id(1)), c.ExpireWriter(writer_id(1)), c.ExpireCriticalReader(critical_id(1))
    for cmd in gone:
        assert committed(shard, cmd) == c.Expired(existed=True)
        assert committed(shard, cmd) == c.Expired(existed=False)
    assert not shard.state.leased_readers
    assert not shard.state.writers
    assert not shard.state.critical_readers


# --- critical readers


def test_registering_a_critical_reader_again_keeps_since_and_opaque() -> None:
    shard = Stepper()
    first = c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"a", debug=DEBUG)
    assert committed(shard, first) == c.CriticalRegistered(MINIMUM, b"a")
    assert committed(shard, replace(first, opaque=b"b")) == c.CriticalRegistered(MINIMUM, b"a")


def test_the_opaque_fences() -> None:
    """Spec 9.10."""
    shard = Stepper()
    committed(shard, c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"a", debug=DEBUG))

    def move(expected: bytes, new: bytes, since: int) -> c.CompareAndDowngradeSince:
        return c.CompareAndDowngradeSince(
            reader_id=critical_id(1), expected_opaque=expected, new_opaque=new, new_since=frontier(since)
        )

    assert committed(shard, move(b"a", b"b", 5)) == c.CriticalDowngraded(frontier(5))
    assert shard.state.trace.since == frontier(5)
    assert committed(shard, move(b"a", b"c", 9)) == c.OpaqueMismatch(b"b", frontier(5))
    assert shard.state.trace.since == frontier(5)
    assert committed(shard, move(b"b", b"c", 3)) == c.CriticalDowngraded(frontier(5))
    assert shard.state.critical_readers[critical_id(1)].opaque == b"c", (
        "the process whose move was committed owns the reader"
    )


def test_moving_an_unknown_critical_reader_is_fenced() -> None:
    cmd = c.CompareAndDowngradeSince(
        reader_id=critical_id(1), expected_opaque=b"", new_opaque=b"", new_since=frontier(1)
    )
    with pytest.raises(Fenced, match="not registered"):
        Stepper().do(cmd)
