"""Hypothesis strategies for the values of the core and for rows: everything that a codec must encode, including edge cases."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import SEQNO_MAX, SeqNo
from persist_engine.model.batch import (
    ColumnStats,
    Footing,
    HollowBatch,
    HollowPart,
    HollowRollup,
    HollowRun,
    InlinePart,
    PartStats,
    RunKind,
    RunMeta,
    RunOrder,
    RunPart,
)
from persist_engine.model.diff.state_diff import Delete, Insert, StateDiff, Update
from persist_engine.model.frontier import DATA_TIME_MAX, TIME_MAX, Antichain, Description
from persist_engine.model.ids import (
    CriticalReaderId,
    IdempotencyToken,
    LeasedReaderId,
    PartId,
    RollupId,
    RunId,
    ShardId,
    WriterId,
)
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.flat import FlatTrace, SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import (
    Claim,
    CriticalReader,
    DebugInfo,
    LeasedReader,
    SchemaPair,
    ShardState,
    SourceProgress,
    Writer,
)
from persist_engine.rows.columns import empty_struct
from persist_engine.rows.nested.entries import sorted_entries
from persist_engine.rows.nested.layout import list_of, map_of
from persist_engine.rows.schema import CODECS, Schema

_INT64 = st.integers(-(2**63), 2**63 - 1)
_U64 = st.integers(0, 2**64 - 1)
_COUNT = st.integers(0, 2**40)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_BYTES = st.binary(max_size=16)


def ids(kind: Any) -> st.SearchStrategy[Any]:
    """Ids of one kind, such as `ids(ShardId)`."""
    return st.binary(min_size=16, max_size=16).map(kind.from_bytes)


def seqnos() -> st.SearchStrategy[SeqNo]:
    """Any seqno."""
    return st.integers(0, SEQNO_MAX).map(SeqNo)


def frontiers() -> st.SearchStrategy[Antichain]:
    """Any frontier: small times, the extremes, and the closed frontier."""
    times = st.one_of(st.integers(0, 20), st.sampled_from([DATA_TIME_MAX, DATA_TIME_MAX + 1, TIME_MAX]), _U64)
    return st.one_of(st.just(Antichain(None)), times.map(Antichain))


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    """Any description."""
    first, second = draw(frontiers()), draw(frontiers())
    lower, upper = (first, second) if first <= second else (second, first)
    if lower.is_empty():
        lower = Antichain(draw(st.integers(0, 20)))
    return Description(lower, upper, draw(frontiers()))


def part_stats() -> st.SearchStrategy[PartStats]:
    """Any statistics. The texts are not real bounds."""
    column = st.builds(ColumnStats, _COUNT, st.none() | _TEXT, st.none() | _TEXT)
    columns = st.lists(st.tuples(_TEXT, column), max_size=3).map(tuple)
    return st.builds(PartStats, columns, st.none() | _INT64, st.none() | _INT64, st.none() | _INT64)


def parts() -> st.SearchStrategy[HollowPart | InlinePart]:
    """Hollow and inline parts. Their blobs and contents do not exist."""
    schema_id, rewrite, diffs_sum = st.none() | _COUNT, st.none() | frontiers(), st.none() | _INT64
    hollow = st.builds(
        HollowPart,
        key=ids(PartId).map(lambda part_id: f"n0000100/{part_id}"),
        size_bytes=_COUNT,
        rows=_COUNT,
        diffs_sum=diffs_sum,
        checksum=_TEXT,
        key_lower=_BYTES,
        stats=st.none() | part_stats(),
        ts_rewrite=rewrite,
        schema_id=schema_id,
        format=_TEXT,
        sum_wraps=st.booleans(),
        footer=st.none()
        | st.builds(
            Footing,
            size_bytes=_COUNT,
            checksum=_TEXT,
            filters_bytes=_COUNT,
            filtered=st.lists(_TEXT, max_size=2).map(tuple),
        ),
    )
    inline = st.builds(
        InlinePart,
        data=_BYTES,
        rows=_COUNT,
        diffs_sum=diffs_sum,
        ts_rewrite=rewrite,
        schema_id=schema_id,
        format=_TEXT,
        sum_wraps=st.booleans(),
    )
    return st.one_of(hollow, inline)


def run_parts() -> st.SearchStrategy[RunPart]:
    """Parts and hollow runs. Their blobs do not exist."""
    hollow_run = st.builds(
        HollowRun,
        key=ids(PartId).map(lambda part_id: f"n0000100/{part_id}"),
        size_bytes=_COUNT,
        checksum=_TEXT,
        rows=_COUNT,
        diffs_sum=st.none() | _INT64,
        parts_bytes=_COUNT,
        part_bytes_max=_COUNT,
        part_count=_COUNT,
        blob_count=_COUNT,
        oldest_key=ids(PartId).map(lambda part_id: f"n0000100/{part_id}"),
        schema_id=st.none() | _COUNT,
        key_lower=_BYTES,
        ts_rewrite=st.none() | frontiers(),
        sum_wraps=st.booleans(),
    )
    return st.one_of(parts(), hollow_run)


@st.composite
def batches(draw: st.DrawFn, desc: st.SearchStrategy[Description] | None = None) -> HollowBatch:
    """Batches of up to four parts or hollow runs, in any runs, with any description unless one is given."""
    some = tuple(draw(st.lists(run_parts(), max_size=4)))
    splits = tuple(sorted(draw(st.sets(st.integers(1, max(len(some) - 1, 1)), max_size=3)))) if len(some) > 1 else ()
    meta = st.builds(
        RunMeta,
        st.sampled_from(RunOrder),
        st.none() | ids(RunId),
        st.none() | _COUNT,
        st.none() | _COUNT,
        st.booleans(),
        kind=st.sampled_from(RunKind),
    )
    metas = tuple(draw(meta) for _ in range(len(splits) + 1)) if some else ()
    return HollowBatch(draw(descriptions() if desc is None else desc), draw(st.integers(0, 1000)), some, splits, metas)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces made by a few pushes, some exertion and perhaps an advanced since."""
    trace = Trace()
    for _ in range(draw(st.integers(0, 6))):
        if trace.upper.time is None:
            break
        closes = draw(st.integers(0, 9)) == 0
        upper = Antichain(None if closes else trace.upper.time + draw(st.integers(1, 5)))
        desc = Description(trace.upper, upper, Antichain(0))
        trace = trace.push_without_requests(draw(batches(st.just(desc))))
    if draw(st.booleans()):
        trace, _, _ = trace.exert(draw(st.integers(1, 64)))
    if draw(st.booleans()):
        trace = trace.downgrade_since(draw(frontiers()))
    return trace


def _spine_ids() -> st.SearchStrategy[SpineId]:
    return st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda pair: SpineId(pair[0], pair[0] + pair[1]))


def _thin_batches() -> st.SearchStrategy[ThinSpineBatch]:
    parts = st.lists(st.tuples(_spine_ids(), descriptions()), max_size=3)
    return st.builds(
        lambda level, desc, named: ThinSpineBatch(level, desc, tuple(i for i, _ in named), tuple(d for _, d in named)),
        st.integers(0, 40),
        descriptions(),
        parts,
    )


def _thin_merges() -> st.SearchStrategy[ThinMerge]:
    return st.builds(ThinMerge, frontiers(), _COUNT, st.none() | _COUNT)


def flat_traces() -> st.SearchStrategy[FlatTrace]:
    """Flat traces of any collections, which need not be consistent."""
    return st.builds(
        FlatTrace,
        frontiers(),
        st.lists(batches(), max_size=3).map(tuple),
        st.dictionaries(_spine_ids(), batches(), max_size=3),
        st.dictionaries(_spine_ids(), _thin_batches(), max_size=3),
        st.dictionaries(_spine_ids(), _thin_merges(), max_size=3),
    )


_DEBUG = st.builds(DebugInfo, _TEXT, _TEXT)
_CLAIM = st.builds(Claim, seqnos(), _COUNT)
_ROLLUP = st.builds(
    HollowRollup,
    st.tuples(seqnos(), ids(RollupId)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.none() | _COUNT,
)
_LEASED = st.builds(LeasedReader, seqnos(), frontiers(), _COUNT, _COUNT, _DEBUG)
_CRITICAL = st.builds(CriticalReader, frontiers(), _BYTES, _DEBUG)
_WRITER = st.builds(Writer, _COUNT, _COUNT, _DEBUG, ids(IdempotencyToken), frontiers())
_SCHEMA_PAIR = st.builds(SchemaPair, _BYTES, _BYTES)
_PROGRESS = st.builds(SourceProgress, _BYTES, frontiers())
_BIRTH = st.binary(min_size=16, max_size=16)


def _maps(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[SharedMap[Any, Any]]:
    return st.dictionaries(keys, values, max_size=3).map(SharedMap)


def states() -> st.SearchStrategy[ShardState]:
    """States with a valid trace. Their other records need not agree with it."""
    return st.builds(
        ShardState,
        applier_version=st.just(APPLIER_VERSION),
        shard_id=ids(ShardId),
        codecs=st.just(CODECS),
        seqno=seqnos(),
        walltime_ms=_COUNT,
        hostname=_TEXT,
        last_gc_req=seqnos(),
        active_rollup=st.none() | _CLAIM,
        active_gc=st.none() | _CLAIM,
        rollups=_maps(seqnos(), _ROLLUP),
        leased_readers=_maps(ids(LeasedReaderId), _LEASED),
        critical_readers=_maps(ids(CriticalReaderId), _CRITICAL),
        writers=_maps(ids(WriterId), _WRITER),
        schemas=_maps(_COUNT, _SCHEMA_PAIR),
        progress=_maps(_TEXT, _PROGRESS),
        trace=traces(),
        staging_floor_ms=st.none() | _COUNT,
        retain_ms=st.none() | _COUNT,
        birth=_BIRTH,
    )


def _changes(keys: st.SearchStrategy[Any], values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    change = st.one_of(
        st.builds(Insert, keys, values), st.builds(Update, keys, values, values), st.builds(Delete, keys, values)
    )
    return st.lists(change, max_size=2).map(tuple)


def state_diffs() -> st.SearchStrategy[StateDiff]:
    """Diffs with any changes in any field. They need not apply to any state."""
    unit = st.none()
    return st.builds(
        StateDiff,
        applier_version=st.just(APPLIER_VERSION),
        seqno_from=seqnos(),
        seqno_to=seqnos(),
        walltime_ms=_COUNT,
        latest_rollup_key=_TEXT,
        hostname=_changes(unit, _TEXT),
        last_gc_req=_changes(unit, seqnos()),
        active_rollup=_changes(unit, _CLAIM),
        active_gc=_changes(unit, _CLAIM),
        rollups=_changes(seqnos(), _ROLLUP),
        leased_readers=_changes(ids(LeasedReaderId), _LEASED),
        critical_readers=_changes(ids(CriticalReaderId), _CRITICAL),
        writers=_changes(ids(WriterId), _WRITER),
        schemas=_changes(_COUNT, _SCHEMA_PAIR),
        progress=_changes(_TEXT, _PROGRESS),
        since=_changes(unit, frontiers()),
        legacy_batches=_changes(batches(), unit),
        hollow_batches=_changes(_spine_ids(), batches()),
        spine_batches=_changes(_spine_ids(), _thin_batches()),
        merges=_changes(_spine_ids(), _thin_merges()),
        staging_floor_ms=_changes(unit, _COUNT),
        retain_ms=_changes(unit, _COUNT),
        birth=_BIRTH,
        predecessor=st.just(b"") | _BIRTH,
        shard_id=ids(ShardId),
    )


_LEAVES: tuple[tuple[pa.DataType, st.SearchStrategy[Any]], ...] = (
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.one_of(st.integers(-3, 3), _INT64)),
    (pa.float32(), st.one_of(st.sampled_from([0.0, -0.0, float("nan")]), st.floats(width=32))),
    (pa.float64(), st.one_of(st.sampled_from([0.0, -0.0, float("nan"), float("-inf")]), st.floats())),
    (
        pa.decimal128(9, 2),
        st.integers(-(10**9) + 1, 10**9 - 1).map(lambda unscaled: decimal.Decimal(unscaled).scaleb(-2)),
    ),
    (pa.string(), st.one_of(st.sampled_from(["", "a", "a\x00", "ab", "\U0010ffff"]), _TEXT)),
    (pa.binary(), st.one_of(st.sampled_from([b"", b"\x00", b"\xff"]), _BYTES)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(datetime.UTC))),
)


def _types(depth: int, *, lists: bool = False) -> st.SearchStrategy[pa.DataType]:
    leaves = st.sampled_from([data_type for data_type, _ in _LEAVES])
    if depth == 0:
        return leaves
    structs = _fields(1, depth - 1, lists=lists).map(pa.struct)
    if not lists:
        return st.one_of(leaves, leaves, structs)
    inner = _types(depth - 1, lists=True).map(_nullable)
    return st.one_of(leaves, leaves, structs, inner.map(list_of), st.builds(map_of, leaves, inner))


def _nullable(kind: pa.DataType) -> pa.DataType:
    """The type without NOT NULL, because fields within a list or a map do not have it."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _nullable(field.type)) for field in kind])
    return kind


def _fields(least: int, depth: int, *, lists: bool = False) -> st.SearchStrategy[list[pa.Field]]:
    names = st.one_of(st.sampled_from(["a", "b", "time", "NOT", "a`b", "x.y", "é"]), _TEXT.filter(bool))
    field = st.builds(
        lambda name, kind, null: pa.field(name, kind, nullable=null), names, _types(depth, lists=lists), st.booleans()
    )
    return st.lists(field, min_size=least, max_size=3, unique_by=lambda each: each.name)


def schemas() -> st.SearchStrategy[Schema]:
    """Any schema of allowed types, with structs, lists and maps up to two levels deep and unusual names."""
    sides = _fields(1, 2), _fields(0, 2, lists=True)
    return st.builds(lambda key, val: Schema(pa.schema(key), pa.schema(val)), *sides)


def successors(schema: Schema) -> st.SearchStrategy[Schema]:
    """Any schema that `schema` may evolve to: nullable fields inserted anywhere, numbers of the value widened."""
    keys, vals = _successors(schema.key_type, may_widen=False), _successors(schema.val_type, may_widen=True)
    return st.builds(lambda key, val: Schema(pa.schema(list(key)), pa.schema(list(val))), keys, vals)


_WIDER = {pa.int8(): pa.int16(), pa.int16(): pa.int32(), pa.int32(): pa.int64(), pa.float32(): pa.float64()}


@st.composite
def _successors(draw: st.DrawFn, old: pa.DataType, *, may_widen: bool, may_add: bool = True) -> pa.DataType:
    fields = []
    for field in old:
        kind = field.type
        if pa.types.is_struct(kind):
            kind = draw(_successors(kind, may_widen=may_widen))
        if pa.types.is_list(kind):
            element = draw(_successors(pa.struct([kind.field(0)]), may_widen=may_widen, may_add=False)).field(0).type
            kind = list_of(_nullable(element))  # a new field within a struct of the list may have NOT NULL fields
        while may_widen and kind in _WIDER and draw(st.booleans()):
            kind = _WIDER[kind]
        fields.append(field.with_type(kind))
    for number in range(draw(st.integers(0, 2)) if may_add else 0):
        new = pa.field(f"new {number} beside {len(old)}", draw(_types(1, lists=may_widen)))
        fields.insert(draw(st.integers(0, len(fields))), new)
    return pa.struct(fields)


def _values(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(data_type):
        return _dicts(data_type)
    if pa.types.is_map(data_type):
        # A map has only one of several keys that the engine treats as equal.
        keys = _values(data_type.key_type)
        entries = st.lists(st.tuples(keys, st.none() | _values(data_type.item_type)), max_size=3, unique_by=_same_key)
        return entries.map(lambda some: _in_order(some, data_type))
    if pa.types.is_list(data_type):
        return st.lists(st.none() | _values(data_type.value_type), max_size=3)
    return next(values for leaf, values in _LEAVES if leaf == data_type)


def _same_key(entry: tuple[Any, Any]) -> Any:
    key, _ = entry
    return repr(key + 0.0) if isinstance(key, float) else key


def _in_order(entries: list[tuple[Any, Any]], kind: pa.DataType) -> list[tuple[Any, Any]]:
    """The entries in the order in which a shard holds them."""
    found: list[tuple[Any, Any]] = sorted_entries(pa.array([entries], kind))[0].as_py()
    return found


def _dicts(data_type: pa.DataType) -> st.SearchStrategy[dict[str, Any]]:
    sides = {
        field.name: st.none() | _values(field.type) if field.nullable else _values(field.type) for field in data_type
    }
    return st.fixed_dictionaries(sides)


def updates(
    schema: Schema, *, rows_max: int = 12, diffs: st.SearchStrategy[int] | None = None
) -> st.SearchStrategy[Any]:
    """Tables of `schema.updates_schema`, with few distinct rows, so that some repeat, and times from 0 to 3 or very large."""
    distinct = st.tuples(
        _dicts(schema.key_type), _dicts(schema.val_type), st.one_of(st.integers(0, 3), st.integers(0, DATA_TIME_MAX))
    )
    diff = diffs or st.integers(-2, 2)

    def build(pool: list[tuple[Any, Any, int]]) -> st.SearchStrategy[Any]:
        rows = st.lists(st.tuples(st.sampled_from(pool), diff), max_size=rows_max)
        return rows.map(lambda some: updates_table(schema, [(*row, each) for row, each in some]))

    return st.lists(distinct, min_size=1, max_size=6).flatmap(build)


def updates_table(schema: Schema, rows: list[tuple[Any, Any, int, int]]) -> pa.Table:
    """A table of (key dict, val dict, time, diff) rows."""
    make: Callable[[int, pa.DataType], pa.Array] = lambda at, kind: pa.array([row[at] for row in rows], kind)  # noqa: E731
    val = make(1, schema.val_type) if len(schema.val) else empty_struct(len(rows))
    return pa.table(
        [make(0, schema.key_type), val, make(2, pa.int64()), make(3, pa.int64())], schema=schema.updates_schema
    )
