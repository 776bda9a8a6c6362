"""Metrics of one shard: gauges that are computed from its newest state at each scrape, and counts of the changes of a
commit. No I/O. A commit pays for one pass over its own diff.
"""

from __future__ import annotations

import math
from collections import Counter

from persist_engine.base.metrics import Metrics, ShardGauges
from persist_engine.model.batch import HollowBatch
from persist_engine.model.diff.field_diff import Delete, Insert
from persist_engine.model.diff.state_diff import StateDiff
from persist_engine.model.frontier import Antichain
from persist_engine.model.queries import latest_rollup, seqno_since
from persist_engine.model.spine.spine import SpineBatch
from persist_engine.model.state import ShardState

#: Commands that remove holders on purpose. Holders removed by any other command have lapsed.
_EXPIRING = ("ExpireWriter", "ExpireLeasedReader", "BecomeTombstone")


def shard_gauges(state: ShardState) -> ShardGauges:
    """The gauges of `state`, named as in the catalogue. Walks all batches once, so it is for scrapes and not for commits."""
    rollup_seqno, rollup = latest_rollup(state)
    sizes = state.trace.sizes
    batches = list(state.trace.batches())
    stages = Counter({"compact": 0, "compacting": 0, "noncompact": 0})
    stages.update(map(_stage, state.trace.spine_batches()))
    plain = {
        "state_seqno": int(state.seqno),
        "state_since": _time(state.trace.since),
        "state_upper": _time(state.trace.upper),
        "state_seqnos_held": state.seqno - seqno_since(state),
        "state_seqnos_since_rollup": state.seqno - rollup_seqno,
        "state_latest_rollup_bytes": rollup.size_bytes or 0,
        "state_rollups": len(state.rollups),
        "state_rollups_bytes": sum(each.size_bytes or 0 for each in state.rollups.values()),
        "state_batches": len(batches),
        "state_parts": sizes.parts,
        "state_rewrite_parts": sum(part.ts_rewrite is not None for batch in batches for part in batch.parts),
        "state_inline_parts": sum(part.inline_bytes > 0 for batch in batches for part in batch.parts),
        "state_inline_bytes": sizes.inline_bytes,
        "state_updates": sizes.rows,
        "state_batches_bytes": sizes.blob_bytes,
        "state_largest_batch_bytes": max((batch.size_bytes for batch in batches), default=0),
        "state_writers": len(state.writers),
        "state_leased_readers": len(state.leased_readers),
        "state_critical_readers": len(state.critical_readers),
    }
    gauges = {(name, ""): float(value) for name, value in plain.items()}
    return gauges | {("state_spine_batches", stage): float(count) for stage, count in stages.items()}


def count_commit(metrics: Metrics, command: str, diff: StateDiff) -> None:
    """Counts the writers and readers that the commit of `diff` added and removed. `command` is the name of
    the command.
    """
    cause = "expired" if command in _EXPIRING else "lapsed"
    for writer in diff.writers:
        if isinstance(writer, Insert):
            metrics.count("writer_added")
        elif isinstance(writer, Delete):
            metrics.count("writer_removed", cause=cause)
    for reader in diff.leased_readers:
        if isinstance(reader, Insert):
            metrics.count("reader_added")
        elif isinstance(reader, Delete):
            metrics.count("reader_removed", cause=cause)


def _stage(batch: SpineBatch) -> str:
    if batch.is_compact:
        return "compact"
    return "noncompact" if batch.active_compaction_start_ms is None else "compacting"


def _time(frontier: Antichain) -> float:
    return math.inf if frontier.time is None else frontier.time


def count_inline(metrics: Metrics, batch: HollowBatch) -> None:
    """Counts the inline parts of `batch`, which was just appended, so they are in state now."""
    inline_bytes = batch.inline_bytes
    if inline_bytes:
        metrics.count("inline_committed_parts", sum(part.inline_bytes > 0 for part in batch.parts))
        metrics.count("inline_committed_bytes", inline_bytes)
