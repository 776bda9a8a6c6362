"""Converts rollups, the whole state of a shard, to bytes and back (spec 2.1, 2.6, 2.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from persist_engine.base.errors import check
from persist_engine.base.version import check_readable
from persist_engine.base.versioned import SeqNo, Tip, VersionedData
from persist_engine.codec import records
from persist_engine.codec.envelope import Kind, decoding, opened, sealed
from persist_engine.codec.state_diff import predecessor_of
from persist_engine.codec.stored_spine import trace_from_pb, trace_to_pb
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, ShardId, WriterId
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import CodecNames, ShardState
from persist_engine.pb import state_pb2 as pb

K = TypeVar("K")
V = TypeVar("V")


#: The bytes of a tag that a lineage holds. Two entries of one seqno agree in this many with a probability of 1 in 2**64.
_SHORT_BYTES = 8
#: The entries in a lineage, which take 32 KiB. A process that slept for longer cannot find out whether its log was rolled back.
LINEAGE_MAX = 4096


@dataclass(frozen=True, slots=True)
class Rollup:
    """A full copy of state at `state.seqno`.

    `diffs` holds the encoded diffs after the previous rollup, through the diff of this state, so that audits see which blobs
    were added and removed. A shard's first rollup has none. `lineage` holds short tags of the entries before these diffs,
    oldest first. Invariant: the seqnos of the diffs are consecutive and end at the state's; each diff names the entry before
    it; the last diff is the state's entry.
    """

    state: ShardState
    diffs: tuple[VersionedData, ...] = ()
    lineage: bytes = b""

    def knows(self, tip: Tip) -> bool | None:
        """Whether `tip` is an entry of the log up to the state. None when it is older than the lineage."""
        back = self.state.seqno - tip.seqno
        if back == 0:
            return tip.tag == self.state.tag
        if 0 < back < len(self.diffs):
            return tip == self.diffs[-1 - back].tip
        end = len(self.lineage) - _SHORT_BYTES * (back - max(1, len(self.diffs)))
        if not _SHORT_BYTES <= end <= len(self.lineage):
            return None
        return self.lineage[end - _SHORT_BYTES : end] == tip.tag[:_SHORT_BYTES]

    def lineage_of_next(self) -> bytes:
        """The lineage of the next rollup: this rollup's, then the tags of its diffs, then the tag of its state."""
        tags = [diff.tip.tag for diff in self.diffs[:-1]] + [self.state.tag]
        lineage = self.lineage + b"".join(tag[:_SHORT_BYTES] for tag in tags)
        return lineage[-LINEAGE_MAX * _SHORT_BYTES :]


def encode_rollup(rollup: Rollup) -> bytes:
    """The bytes of the rollup. Equal rollups give equal bytes. Raises InvariantViolated when the diffs do not lead to the
    state.
    """
    _check_diffs(rollup)
    message = pb.Rollup(
        state=state_to_pb(rollup.state),
        diffs=[pb.VersionedData(seqno=diff.seqno, data=diff.data) for diff in rollup.diffs],
        lineage=rollup.lineage,
    )
    return sealed(Kind.ROLLUP, message)


def decode_rollup(data: bytes, *, key: str, lazily: bool = False) -> Rollup:
    """Inverse of `encode_rollup`. Raises CorruptData or Incompatible (also for newer code) with `key`.

    With `lazily`, hollow batches are decoded on first use, which may then raise CorruptData, and only the last diff is
    compared with the state's tag. The checksum of all bytes is verified in both cases.
    """
    message = opened(Kind.ROLLUP, data, pb.Rollup(), key)
    check_readable(message.state.applier_version, key)
    with decoding("the rollup", key):
        records.need(message, "state")
        diffs = tuple(VersionedData(SeqNo(diff.seqno), diff.data) for diff in message.diffs)
        state = state_from_pb(message.state, key=key)
        if not lazily:
            state.trace.validate(deep=True)
        rollup = Rollup(state, diffs, message.lineage)
        _check_diffs(rollup, lazily=lazily)
        return rollup


def _check_diffs(rollup: Rollup, *, lazily: bool = False) -> None:
    state = rollup.state
    check(len(rollup.lineage) % _SHORT_BYTES == 0, f"a lineage of {len(rollup.lineage)} bytes")
    last = state.seqno - len(rollup.diffs)
    for diff in rollup.diffs:
        last += 1
        check(diff.seqno == last, f"diff {diff.seqno} in a rollup of {state.seqno} where v{last} belongs")
    following = state.tag
    for diff in reversed(rollup.diffs if following else ()):
        check(diff.tip.tag == following, f"diff {diff.seqno} is not the entry that what comes after it follows")
        if lazily:
            return
        following = predecessor_of(diff, key=f"{state.shard_id} {diff.seqno}")


def state_to_pb(state: ShardState) -> pb.ShardState:
    claim = records.claim_to_pb
    return pb.ShardState(
        applier_version=state.applier_version,
        shard_id=state.shard_id.to_bytes(),
        codecs=pb.CodecNames(
            key=state.codecs.key, val=state.codecs.val, time=state.codecs.time, diff=state.codecs.diff
        ),
        seqno=state.seqno,
        walltime_ms=state.walltime_ms,
        hostname=state.hostname,
        last_gc_req=state.last_gc_req,
        active_rollup=None if state.active_rollup is None else claim(state.active_rollup),
        active_gc=None if state.active_gc is None else claim(state.active_gc),
        rollups=[
            pb.RollupEntry(seqno=seqno, rollup=records.rollup_to_pb(rollup)) for seqno, rollup in state.rollups.items()
        ],
        leased_readers=[
            pb.LeasedReaderEntry(id=key.to_bytes(), reader=records.leased_reader_to_pb(reader))
            for key, reader in state.leased_readers.items()
        ],
        critical_readers=[
            pb.CriticalReaderEntry(id=key.to_bytes(), reader=records.critical_reader_to_pb(reader))
            for key, reader in state.critical_readers.items()
        ],
        writers=[
            pb.WriterEntry(id=key.to_bytes(), writer=records.writer_to_pb(writer))
            for key, writer in state.writers.items()
        ],
        schemas=[pb.SchemaEntry(id=key, schema=records.schema_to_pb(schema)) for key, schema in state.schemas.items()],
        progress=[
            pb.ProgressEntry(sink_id=key, progress=records.progress_to_pb(progress))
            for key, progress in state.progress.items()
        ],
        trace=trace_to_pb(state.trace),
        staging_floor_ms=state.staging_floor_ms,
        retain_ms=state.retain_ms,
        birth=state.birth,
        tag=state.tag,
    )


def state_from_pb(message: pb.ShardState, *, key: str = "state") -> ShardState:
    records.need(message, "codecs", "trace")
    codecs = message.codecs
    return ShardState(
        applier_version=message.applier_version,
        shard_id=ShardId.from_bytes(message.shard_id),
        codecs=CodecNames(codecs.key, codecs.val, codecs.time, codecs.diff),
        seqno=SeqNo(message.seqno),
        walltime_ms=message.walltime_ms,
        hostname=message.hostname,
        last_gc_req=SeqNo(message.last_gc_req),
        active_rollup=records.claim_from_pb(message.active_rollup) if message.HasField("active_rollup") else None,
        active_gc=records.claim_from_pb(message.active_gc) if message.HasField("active_gc") else None,
        rollups=_shared(message.rollups, lambda each: SeqNo(each.seqno), "rollup", records.rollup_from_pb),
        leased_readers=_shared(
            message.leased_readers, lambda e: LeasedReaderId.from_bytes(e.id), "reader", records.leased_reader_from_pb
        ),
        critical_readers=_shared(
            message.critical_readers,
            lambda e: CriticalReaderId.from_bytes(e.id),
            "reader",
            records.critical_reader_from_pb,
        ),
        writers=_shared(message.writers, lambda e: WriterId.from_bytes(e.id), "writer", records.writer_from_pb),
        schemas=_shared(message.schemas, lambda each: int(each.id), "schema", records.schema_from_pb),
        progress=_shared(message.progress, lambda each: str(each.sink_id), "progress", records.progress_from_pb),
        trace=trace_from_pb(message.trace, key=key),
        staging_floor_ms=message.staging_floor_ms if message.HasField("staging_floor_ms") else None,
        retain_ms=message.retain_ms if message.HasField("retain_ms") else None,
        birth=records.birth_from_pb(message.birth),
        tag=records.tag_from_pb(message.tag),
    )


def _shared(
    entries: Iterable[Any], key_of: Callable[[Any], K], field: str, value_of: Callable[[Any], V]
) -> SharedMap[K, V]:
    return SharedMap(_entries(entries, key_of, field, value_of))


def _entries(
    entries: Iterable[Any], key_of: Callable[[Any], K], field: str, value_of: Callable[[Any], V]
) -> dict[K, V]:
    """Entries as a mapping. Raises InvariantViolated for a key that occurs twice, and for an entry without its value."""
    out: dict[K, V] = {}
    for entry in entries:
        records.need(entry, field)
        key = key_of(entry)
        check(key not in out, f"{key} comes twice")
        out[key] = value_of(getattr(entry, field))
    return out
