"""A log is replaced only by a call that names its very last entry, on every consensus adapter."""

from __future__ import annotations

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo, VersionedData
from persist_engine.storage.consensus import Consensus


def entry(seqno: int, data: bytes = b"x") -> VersionedData:
    return VersionedData(SeqNo(seqno), data)


@pytest.fixture(params=["mem", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def opened(request, consensus_at, fresh_name, tmp_path):
    match request.param:
        case "mem":
            url = f"mem:{fresh_name}"
        case "sqlite":
            url = f"sqlite://{tmp_path}/consensus.db"
        case _:
            url = f"{request.getfixturevalue('redis').url}?prefix={fresh_name}*:"
    with consensus_at(url) as open_store:
        yield open_store


def written(consensus: Consensus) -> list[VersionedData]:
    log = [entry(1, b"a"), entry(2, b"b"), entry(3, b"c")]
    for before, new in zip([None, *log], log, strict=False):
        assert consensus.compare_and_set("s1", before and before.tip, new) is CasResult.COMMITTED
    return log


def test_the_new_entry_is_the_only_one_and_is_appended_to(opened):
    """Spec 3.5."""
    one = opened()
    log = written(one)
    new = entry(1003, b"new")
    assert one.replace("s1", log[-1].tip, new) is CasResult.COMMITTED
    for consensus in (one, opened()):
        assert (consensus.head("s1"), consensus.scan("s1", SeqNo(0), SCAN_ALL)) == (new, [new])
    after = entry(1004)
    assert one.compare_and_set("s1", log[-1].tip, entry(4)) is CasResult.EXPECTATION_MISMATCH
    assert one.compare_and_set("s1", new.tip, after) is CasResult.COMMITTED
    assert one.truncate("s1", after.seqno, after.tip) == 1
    assert opened().scan("s1", SeqNo(0), SCAN_ALL) == [after]


def test_another_end_of_the_log_and_no_log_are_left_alone(opened):
    consensus = opened()
    log = written(consensus)
    for tip in (log[1].tip, entry(3, b"of another history").tip):
        assert consensus.replace("s1", tip, entry(9)) is CasResult.EXPECTATION_MISMATCH
    assert consensus.replace("s2", log[-1].tip, entry(9)) is CasResult.EXPECTATION_MISMATCH
    assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == log
    assert consensus.head("s2") is None


def test_a_log_never_goes_back(opened):
    consensus = opened()
    log = written(consensus)
    for seqno in (1, 3):
        with pytest.raises(InvalidUsage, match="not past"):
            consensus.replace("s1", log[-1].tip, entry(seqno))


@pytest.mark.redis
def test_a_process_that_knows_the_replaced_log_of_a_redis_is_refused(redis, consensus_at, fresh_name):
    with consensus_at(f"{redis.url}?prefix={fresh_name}*:") as open_store:
        stale, one = open_store(), open_store()
        log = written(stale)
        assert one.replace("s1", log[-1].tip, entry(4, b"new")) is CasResult.COMMITTED
        assert stale.compare_and_set("s1", log[-1].tip, entry(4, b"old")) is CasResult.EXPECTATION_MISMATCH
