"""Converts state diffs to bytes and back, in columns (spec 8.3): fields, types, slice lengths and one buffer of slices.

A reader of one field walks three small arrays and touches only the slices it needs. Each slice is a protobuf message of
its own; a unit key or value takes zero bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf.message import Message

from persist_engine.base.errors import check
from persist_engine.base.version import check_readable
from persist_engine.base.versioned import SeqNo, VersionedData, tag_of
from persist_engine.codec import records
from persist_engine.codec.batch import antichain_from_pb, antichain_to_pb, batch_from_pb, batch_to_pb
from persist_engine.codec.envelope import Kind, decoding, opened, sealed
from persist_engine.model.diff.state_diff import Delete, FieldDiff, Insert, StateDiff, Update
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, ShardId, WriterId
from persist_engine.pb import batch_pb2, diff_pb2, state_pb2

#: The limit on encoded bytes kept for each kind of value. A spine batch takes about 30 bytes for each batch in it.
_KEPT_BYTES_MAX = 1 << 20
#: The limits on decoded values kept for each kind: their number, and the encoded bytes of each.
_DECODED_MAX, _DECODED_BYTES_MAX = 64, 4 << 10

#: The number of slices of a change, by its type: the key, and then `to`, `from` and `to`, or `from`.
_SLICES = {diff_pb2.DIFF_TYPE_INSERT: 2, diff_pb2.DIFF_TYPE_UPDATE: 3, diff_pb2.DIFF_TYPE_DELETE: 2}


class Kept:
    """Encodes immutable values of one kind and keeps the encodings by identity, since the next diff often holds the same
    objects again. Thread-safe. Keeps encodings of at most `bytes_max` bytes.
    """

    def __init__(self, encode: Callable[[Any], bytes], *, bytes_max: int) -> None:
        self._encode = encode
        self._bytes_max = bytes_max
        self._kept: dict[int, tuple[Any, bytes]] = {}
        self._bytes = 0

    def __call__(self, value: Any) -> bytes:
        """The value's bytes."""
        found = self._kept.get(id(value))
        if found is not None and found[0] is value:
            return found[1]
        data = self._encode(value)
        if self._bytes + len(data) > self._bytes_max:
            self._kept, self._bytes = {}, 0
        self._kept[id(value)] = (value, data)
        self._bytes += len(data)
        return data


@dataclass(frozen=True, slots=True)
class _Slice:
    """The encoding of a key or value as a slice, and its inverse."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _message(make: type[Message], to_pb: Callable[[Any], Message], from_pb: Callable[[Any], Any]) -> _Slice:
    def decode(raw: bytes) -> Any:
        message = make()
        message.ParseFromString(raw)
        return from_pb(message)

    # A later diff names a value again when it changes or deletes it. Values are immutable, so both can share one object.
    known = lru_cache(maxsize=_DECODED_MAX)(decode)
    # The encoding is deterministic, since no message has a map.
    return _Slice(
        lambda value: to_pb(value).SerializeToString(),
        lambda raw: known(raw) if len(raw) <= _DECODED_BYTES_MAX else decode(raw),
    )


def _decode_unit(raw: bytes) -> None:
    check(not raw, f"{len(raw)} bytes where a unit stands")


def _id(kind: Any) -> _Slice:
    slices = _message(
        diff_pb2.Id, lambda value: diff_pb2.Id(value=value.to_bytes()), lambda message: kind.from_bytes(message.value)
    )
    return _Slice(lru_cache(maxsize=1024)(slices.encode), slices.decode)  # every diff of a writer has its id


def _u64(kind: Callable[[int], Any]) -> _Slice:
    return _message(diff_pb2.U64, lambda value: diff_pb2.U64(value=value), lambda message: kind(message.value))


def _kept(plain: _Slice) -> _Slice:
    return _Slice(Kept(plain.encode, bytes_max=_KEPT_BYTES_MAX), plain.decode)


_UNIT = _Slice(lambda _: b"", _decode_unit)
_TEXT = _message(diff_pb2.Text, lambda value: diff_pb2.Text(value=value), lambda message: str(message.value))
_SEQNO = _u64(SeqNo)
_CLAIM = _message(state_pb2.Claim, records.claim_to_pb, records.claim_from_pb)
_SPINE_ID = _message(state_pb2.SpineId, records.spine_id_to_pb, records.spine_id_from_pb)
_BATCH = _message(batch_pb2.HollowBatch, batch_to_pb, batch_from_pb)

#: Every collection of StateDiff, in the order of writing: its name, its number, and the slices of its keys and values.
_FIELDS: tuple[tuple[str, diff_pb2.StateField, _Slice, _Slice], ...] = (
    ("hostname", diff_pb2.STATE_FIELD_HOSTNAME, _UNIT, _TEXT),
    ("last_gc_req", diff_pb2.STATE_FIELD_LAST_GC_REQ, _UNIT, _SEQNO),
    ("active_rollup", diff_pb2.STATE_FIELD_ACTIVE_ROLLUP, _UNIT, _CLAIM),
    ("active_gc", diff_pb2.STATE_FIELD_ACTIVE_GC, _UNIT, _CLAIM),
    (
        "rollups",
        diff_pb2.STATE_FIELD_ROLLUPS,
        _SEQNO,
        _message(state_pb2.HollowRollup, records.rollup_to_pb, records.rollup_from_pb),
    ),
    (
        "leased_readers",
        diff_pb2.STATE_FIELD_LEASED_READERS,
        _id(LeasedReaderId),
        _message(state_pb2.LeasedReader, records.leased_reader_to_pb, records.leased_reader_from_pb),
    ),
    (
        "critical_readers",
        diff_pb2.STATE_FIELD_CRITICAL_READERS,
        _id(CriticalReaderId),
        _message(state_pb2.CriticalReader, records.critical_reader_to_pb, records.critical_reader_from_pb),
    ),
    (
        "writers",
        diff_pb2.STATE_FIELD_WRITERS,
        _id(WriterId),
        _kept(_message(state_pb2.Writer, records.writer_to_pb, records.writer_from_pb)),
    ),
    (
        "schemas",
        diff_pb2.STATE_FIELD_SCHEMAS,
        _u64(int),
        _message(state_pb2.SchemaPair, records.schema_to_pb, records.schema_from_pb),
    ),
    (
        "progress",
        diff_pb2.STATE_FIELD_PROGRESS,
        _TEXT,
        _message(state_pb2.SourceProgress, records.progress_to_pb, records.progress_from_pb),
    ),
    ("since", diff_pb2.STATE_FIELD_SINCE, _UNIT, _message(batch_pb2.Antichain, antichain_to_pb, antichain_from_pb)),
    ("legacy_batches", diff_pb2.STATE_FIELD_LEGACY_BATCHES, _BATCH, _UNIT),
    ("hollow_batches", diff_pb2.STATE_FIELD_HOLLOW_BATCHES, _SPINE_ID, _BATCH),
    (
        "spine_batches",
        diff_pb2.STATE_FIELD_SPINE_BATCHES,
        _SPINE_ID,
        _kept(_message(state_pb2.ThinSpineBatch, records.spine_batch_to_pb, records.spine_batch_from_pb)),
    ),
    (
        "merges",
        diff_pb2.STATE_FIELD_MERGES,
        _SPINE_ID,
        _message(state_pb2.ThinMerge, records.merge_to_pb, records.merge_from_pb),
    ),
    ("staging_floor_ms", diff_pb2.STATE_FIELD_STAGING_FLOOR_MS, _UNIT, _u64(int)),
    ("retain_ms", diff_pb2.STATE_FIELD_RETAIN_MS, _UNIT, _u64(int)),
)
_BY_NUMBER = {number: (name, key, value) for name, number, key, value in _FIELDS}


def encode_state_diff(diff: StateDiff) -> bytes:
    """The bytes of the diff. Equal diffs give equal bytes."""
    fields: list[diff_pb2.StateField] = []
    types: list[diff_pb2.DiffType] = []
    slices: list[bytes] = []
    for name, number, key, value in _FIELDS:
        for change in getattr(diff, name):
            fields.append(number)
            slices.append(key.encode(change.key))
            if isinstance(change, Insert):
                types.append(diff_pb2.DIFF_TYPE_INSERT)
            elif isinstance(change, Update):
                types.append(diff_pb2.DIFF_TYPE_UPDATE)
                slices.append(value.encode(change.old))
            else:
                types.append(diff_pb2.DIFF_TYPE_DELETE)
            slices.append(value.encode(change.old if isinstance(change, Delete) else change.to))
    columns = diff_pb2.FieldDiffs(
        fields=fields, types=types, lens=[len(each) for each in slices], data=b"".join(slices)
    )
    message = diff_pb2.StateDiff(
        applier_version=diff.applier_version,
        seqno_from=diff.seqno_from,
        seqno_to=diff.seqno_to,
        latest_rollup_key=diff.latest_rollup_key,
        field_diffs=columns,
        walltime_ms=diff.walltime_ms,
        birth=diff.birth,
        predecessor=diff.predecessor,
        shard_id=diff.shard_id.to_bytes(),
    )
    return sealed(Kind.STATE_DIFF, message)


def decode_state_diff(data: bytes, *, key: str) -> StateDiff:
    """Inverse of `encode_state_diff`. Raises CorruptData (also for columns that do not fit together) or Incompatible with
    `key`.
    """
    message = opened(Kind.STATE_DIFF, data, diff_pb2.StateDiff(), key)
    check_readable(message.applier_version, key)
    with decoding("the state diff", key):
        records.need(message, "field_diffs")
        validate(message.field_diffs)
        return StateDiff(
            applier_version=message.applier_version,
            seqno_from=SeqNo(message.seqno_from),
            seqno_to=SeqNo(message.seqno_to),
            walltime_ms=message.walltime_ms,
            latest_rollup_key=message.latest_rollup_key,
            birth=records.birth_from_pb(message.birth),
            predecessor=records.tag_from_pb(message.predecessor),
            tag=tag_of(data),
            shard_id=ShardId.from_bytes(message.shard_id),
            **_collections(message.field_diffs),
        )


def predecessor_of(entry: VersionedData, *, key: str) -> bytes:
    """The tag of the entry before the encoded diff `entry`, as recorded in that diff. Raises the errors of
    `decode_state_diff`, but does not decode the changes.
    """
    message = opened(Kind.STATE_DIFF, entry.data, diff_pb2.StateDiff(), key)
    with decoding("the state diff", key):
        return records.tag_from_pb(message.predecessor)


def validate(columns: diff_pb2.FieldDiffs) -> None:
    """Raises InvariantViolated unless the columns fit together: as many types as fields, all of them known; as many slices as
    the types need; as many bytes as the slices have.
    """
    check(
        len(columns.fields) == len(columns.types),
        f"{len(columns.fields)} fields for {len(columns.types)} types of change",
    )
    for field in set(columns.fields):
        check(field in _BY_NUMBER, f"unknown field {field}")
    for kind in set(columns.types):
        check(kind in _SLICES, f"unknown type of change {kind}")
    slices = sum(_SLICES[kind] for kind in columns.types)
    check(slices == len(columns.lens), f"{len(columns.lens)} slices where {slices} belong")
    total = sum(columns.lens)
    check(total == len(columns.data), f"{len(columns.data)} bytes where slices add up to {total}")


def _collections(columns: diff_pb2.FieldDiffs) -> dict[str, tuple[FieldDiff[Any, Any], ...]]:
    out: dict[str, list[FieldDiff[Any, Any]]] = {}
    data, at = columns.data, 0
    lens = iter(columns.lens)
    for field, kind in zip(columns.fields, columns.types, strict=True):
        name, key, value = _BY_NUMBER[field]
        slices: list[bytes] = []
        for _ in range(_SLICES[kind]):
            end = at + next(lens)
            slices.append(data[at:end])
            at = end
        out.setdefault(name, []).append(_change(kind, key.decode(slices[0]), [value.decode(raw) for raw in slices[1:]]))
    return {name: tuple(changes) for name, changes in out.items()}


def _change(kind: int, key: Any, values: list[Any]) -> FieldDiff[Any, Any]:
    if kind == diff_pb2.DIFF_TYPE_INSERT:
        return Insert(key, values[0])
    if kind == diff_pb2.DIFF_TYPE_DELETE:
        return Delete(key, values[0])
    return Update(key, values[0], values[1])
