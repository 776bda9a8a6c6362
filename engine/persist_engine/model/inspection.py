"""A report on a state in numbers, for people, the operator and metrics.

Owns the report and its JSON form. Must not know where it is shown. Costs O(levels), plus readers, writers and rollups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from persist_engine.model.leases import expires_after_ms
from persist_engine.model.maintenance import collectable_versions
from persist_engine.model.queries import is_tombstone, latest_rollup, retained_since, rollup_at_or_below, seqno_since
from persist_engine.model.rebirth import is_recovered_from
from persist_engine.model.spine.owed import waits_after_merge_ms, waits_from_ms
from persist_engine.model.state import CLOCK, COMMIT_INFO, FILTERED, CodecNames, ShardState

#: The greatest number that a report can hold.
_COUNT_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderInfo:
    """A reader that holds since (None: closed) and, if leased, a version. Critical readers hold no version and never lapse."""

    id: str
    kind: Literal["leased", "critical"]
    since: int | None
    seqno: int | None
    purpose: str
    hostname: str
    last_heartbeat_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterInfo:
    """A registered writer. `upper` is the upper of its last append (None: closed)."""

    id: str
    purpose: str
    hostname: str
    last_heartbeat_ms: int
    upper: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One shard at one version. Frontiers are times, None when closed; seqnos are plain numbers.

    `batches` counts hollow batches, `spine_batches` the logical batches that they form. `gc_seqnos` versions can be truncated now.
    `retain_ms` is the retention (None: none); it holds since at `retained_since`. The client fills in `key_schema` and `val_schema` as DDL.

    Compaction debt: `compaction_requests` counts the spine batches that are not compact. They hold `uncompacted_batches` hollow batches and
    `compaction_bytes` bytes; the smallest holds `smallest_request_bytes` (None: there is none). `net_updates` is the sum of all diffs, or 0
    if it is negative. `merged_updates` counts the updates of the largest spine batch that is compact.

    Deletion debt (model.spine.owed): `waits_from_ms` is when the oldest waiting retraction in the newest version began to wait.
    `waits_after_merge_ms` is the same after a merge of everything. `uncollected_from_ms` is the same for content that only older versions
    name. Each is None when no retraction waits.
    """

    shard_id: str
    seqno: int
    seqno_since: int
    applier_version: str
    walltime_ms: int
    since: int | None
    upper: int | None
    retain_ms: int | None = None
    retained_since: int | None = None
    key_schema: str
    val_schema: str
    codecs: CodecNames
    batches: int
    spine_batches: int
    uncompacted_batches: int
    runs: int
    parts: int
    updates: int
    live_bytes: int
    inline_bytes: int
    rollups: int
    latest_rollup_seqno: int
    latest_rollup_bytes: int | None
    live_diffs: int
    earliest_seqno: int
    gc_seqnos: int
    compaction_requests: int
    compaction_bytes: int
    smallest_request_bytes: int | None = None
    net_updates: int = 0
    merged_updates: int = 0
    waits_from_ms: int | None = None
    waits_after_merge_ms: int | None = None
    uncollected_from_ms: int | None = None
    readers: tuple[ReaderInfo, ...]
    writers: tuple[WriterInfo, ...]
    progress: Mapping[str, int | None]
    is_tombstone: bool
    birth: str = ""
    """Birth of the log, in hex."""
    tag: str = ""
    """Tag of the log's newest entry, in hex."""
    known_tag: str | None = None
    """Tag of the entry at the requested seqno; None if that entry is not live or no seqno was requested."""

    @property
    def amplification_percent(self) -> int | None:
        """The number of updates, in percent of the number that a merge of everything leaves at best: one for each row that is not
        retracted. None when such a merge may leave no updates.
        """
        if not self.updates:
            return 100
        return 100 * self.updates // self.net_updates if self.net_updates else None

    @property
    def data_bytes(self) -> int:
        """The bytes of the live parts, including those inside the state."""
        return self.live_bytes + self.inline_bytes

    @property
    def owed_from_ms(self) -> int | None:
        """The time at which the oldest retracted update that may still be in the stores was retracted, or an earlier time. None when no
        retracted update is left.
        """
        return min((at for at in (self.waits_from_ms, self.uncollected_from_ms) if at is not None), default=None)

    def is_recovered_from(self, birth: str) -> bool:
        """Whether a recovery began this log anew in place of the log born as `birth` (hex)."""
        return is_recovered_from(_bytes(self.birth), _bytes(birth))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; the keys are the field names."""
        out = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        out["codecs"] = dataclasses.asdict(self.codecs)
        out["readers"] = [dataclasses.asdict(reader) for reader in self.readers]
        out["writers"] = [dataclasses.asdict(writer) for writer in self.writers]
        out["progress"] = dict(self.progress)
        return out


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def inspection_of(
    state: ShardState, *, live_diffs: int, earliest_seqno: int, now_ms: int, uncollected_from_ms: int | None = None
) -> Inspection:
    """Return the report on `state`. `live_diffs`, `earliest_seqno` and `uncollected_from_ms` come from the log. Readers and writers
    whose lease ended before `now_ms` are left out: the next command removes them.
    """
    trace = state.trace
    sizes = trace.sizes
    rollup_seqno, rollup = latest_rollup(state)
    retained = retained_since(state)
    due = [batch for batch in trace.spine_batches() if not batch.is_compact]
    sizes_bytes = [batch.sizes.blob_bytes + batch.sizes.inline_bytes for batch in due]
    return Inspection(
        shard_id=str(state.shard_id),
        seqno=int(state.seqno),
        seqno_since=int(seqno_since(state)),
        applier_version=state.applier_version,
        walltime_ms=state.walltime_ms,
        since=trace.since.time,
        upper=trace.upper.time,
        retain_ms=state.retain_ms,
        retained_since=None if retained is None else retained.time,
        key_schema="",
        val_schema="",
        codecs=state.codecs,
        batches=trace.batch_count,
        spine_batches=sum(1 for _ in trace.spine_batches()),
        uncompacted_batches=sum(len(batch.parts) for batch in due),
        runs=sizes.runs,
        parts=sizes.parts,
        updates=sizes.rows,
        live_bytes=sizes.blob_bytes,
        inline_bytes=sizes.inline_bytes,
        rollups=len(state.rollups),
        latest_rollup_seqno=int(rollup_seqno),
        latest_rollup_bytes=rollup.size_bytes,
        live_diffs=live_diffs,
        earliest_seqno=earliest_seqno,
        gc_seqnos=collectable_versions(rollup_at_or_below(state, seqno_since(state)), earliest=earliest_seqno),
        compaction_requests=len(due),
        compaction_bytes=sum(sizes_bytes),
        smallest_request_bytes=min(sizes_bytes, default=None),
        net_updates=min(max(0, sum(batch.net_updates for batch in trace.spine_batches())), _COUNT_MAX),
        merged_updates=max((batch.rows for batch in trace.spine_batches() if batch.is_compact), default=0),
        waits_from_ms=waits_from_ms(trace),
        waits_after_merge_ms=waits_after_merge_ms(trace, now_ms=now_ms),
        uncollected_from_ms=uncollected_from_ms,
        readers=_readers(state, now_ms),
        writers=_writers(state, now_ms),
        progress={
            sink_id: progress.upper.time
            for sink_id, progress in state.progress.items()
            if sink_id not in {CLOCK, COMMIT_INFO, FILTERED}
        },
        is_tombstone=is_tombstone(state),
        birth=state.birth.hex(),
        tag=state.tag.hex(),
    )


def _readers(state: ShardState, now_ms: int) -> tuple[ReaderInfo, ...]:
    leased = [
        ReaderInfo(
            id=str(reader_id),
            kind="leased",
            since=reader.since.time,
            seqno=int(reader.seqno),
            purpose=reader.debug.purpose,
            hostname=reader.debug.hostname,
            last_heartbeat_ms=reader.last_heartbeat_ms,
        )
        for reader_id, reader in state.leased_readers.items()
        if now_ms <= expires_after_ms(reader)
    ]
    critical = [
        ReaderInfo(
            id=str(reader_id),
            kind="critical",
            since=reader.since.time,
            seqno=None,
            purpose=reader.debug.purpose,
            hostname=reader.debug.hostname,
            last_heartbeat_ms=None,
        )
        for reader_id, reader in state.critical_readers.items()
    ]
    return (*leased, *critical)


def _writers(state: ShardState, now_ms: int) -> tuple[WriterInfo, ...]:
    return tuple(
        WriterInfo(
            id=str(writer_id),
            purpose=writer.debug.purpose,
            hostname=writer.debug.hostname,
            last_heartbeat_ms=writer.last_heartbeat_ms,
            upper=writer.most_recent_write_upper.time,
        )
        for writer_id, writer in state.writers.items()
        if now_ms <= expires_after_ms(writer)
    )
