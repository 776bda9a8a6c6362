"""What is removable (spec 14)."""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.versioned import SeqNo
from persist_engine.model.maintenance import removable_rollups
from persist_engine.model.shared_map import SharedMap
from persist_kit.states import first_state, rollup


def test_all_but_the_newest_rollup_within_reach_are_removable() -> None:
    state = replace(first_state()[0], rollups=SharedMap({SeqNo(n): rollup(n) for n in (1, 4, 9)}), seqno=SeqNo(20))
    assert removable_rollups(state, SeqNo(0)) == ()
    assert removable_rollups(state, SeqNo(3)) == ()
    assert removable_rollups(state, SeqNo(4)) == ((SeqNo(1), rollup(1)),)
    assert [seqno for seqno, _ in removable_rollups(state, SeqNo(8))] == [1]
    assert [seqno for seqno, _ in removable_rollups(state, SeqNo(20))] == [1, 4]
