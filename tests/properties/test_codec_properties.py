"""decode(encode(x)) == x, and damaged bytes are never mistaken for others."""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import CorruptData, Incompatible
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import SEQNO_MAX, SeqNo, VersionedData
from persist_engine.codec.batch import decode_batch, decode_transmittable, encode_batch, encode_transmittable
from persist_engine.codec.deletions import Cause, Deletions, decode_deletions, encode_deletions
from persist_engine.codec.part import decode_part, encode_part, key_lower, part_stats
from persist_engine.codec.registry import (
    Identity,
    decode_identity,
    decode_name,
    decode_shard_owner,
    encode_identity,
    encode_name,
    encode_shard_owner,
    name_key,
)
from persist_engine.codec.staging_note import JOB_BYTES, StagingNote, decode_staging_note, encode_staging_note
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import ShardId, StoreId
from persist_engine.model.ownership import Owner
from persist_engine.model.spine.trace import Trace
from persist_engine.rows import updates as laws
from persist_engine.rows.order import KEY_LOWER_BYTES_MAX, key_bytes
from persist_engine.rows.part_stats import bound, stats_path
from persist_engine.rows.schema import Schema
from persist_kit import strategies
from persist_kit.depth import draws

DESC = Description(Antichain(0), Antichain(None), Antichain(0))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
quick = settings(max_examples=draws(12), deadline=None, suppress_health_check=SLOW)


def same_bits(left: pa.Table, right: pa.Table) -> bool:
    """Equal with NaN equal to NaN and -0.0 apart from 0.0."""
    return left.schema == right.schema and repr(left.to_pylist()) == repr(right.to_pylist())


@pytest.mark.slow
@quick
@given(strategies.batches(), strategies.ids(ShardId))
def test_batches_round_trip(batch: Any, shard_id: ShardId) -> None:
    """Spec 2.2 to 2.5."""
    assert decode_batch(encode_batch(batch)) == batch
    assert decode_transmittable(encode_transmittable(shard_id, APPLIER_VERSION, batch)) == (
        shard_id,
        APPLIER_VERSION,
        batch,
    )


@pytest.mark.slow
@quick
@given(strategies.state_diffs())
def test_state_diffs_round_trip(diff: Any) -> None:
    assert decode_state_diff(encode_state_diff(diff), key="k") == diff


@pytest.mark.slow
@quick
@given(strategies.states())
def test_rollups_of_a_trace_without_structure_round_trip(state: Any) -> None:
    flat = replace(state.trace.flatten(), hollow_batches={}, spine_batches={}, merges={})
    rollup = Rollup(replace(state, trace=Trace.unflatten(flat)))
    assert rollup.state.trace.structured is (not flat.legacy_batches)
    data = encode_rollup(rollup)
    for lazily in (False, True):
        again = decode_rollup(data, key="k", lazily=lazily)
        assert again == rollup
        assert encode_rollup(again) == data


@pytest.mark.slow
@quick
@given(strategies.states(), st.lists(st.binary(max_size=8), max_size=3), st.binary(min_size=16, max_size=16))
def test_rollups_round_trip_to_equal_bytes(state: Any, payloads: list[bytes], tag: bytes) -> None:
    """Spec 2.7, 29.6."""
    first = state.seqno - len(payloads) + 1
    diffs = tuple(VersionedData(SeqNo(first + at), data) for at, data in enumerate(payloads)) if first >= 0 else ()
    chained = Rollup(replace(state, tag=tag), (), tag * len(payloads))
    for rollup in (Rollup(state, diffs), chained):
        data = encode_rollup(rollup)
        decoded = decode_rollup(data, key="k")
        assert decoded == rollup
        assert encode_rollup(decoded) == data


owners = st.builds(Owner, *[st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)] * 3)


@quick
@given(owners, strategies.ids(ShardId), strategies.ids(StoreId), st.booleans())
def test_owners_and_identities_round_trip(owner: Owner, shard_id: ShardId, store_id: StoreId, absent: bool) -> None:
    key = name_key(owner)
    assert Owner.parse(str(owner)) == owner
    assert key.isascii()
    assert key.count("/") == 3
    assert decode_identity(encode_identity(Identity(store_id, absent)), key="k") == Identity(store_id, absent)
    shard, held = (None, None) if absent else (shard_id, owner)
    assert decode_name(encode_name(owner, shard), key=key) == (owner, shard)
    assert decode_shard_owner(encode_shard_owner(shard_id, held), key="k", shard_id=shard_id) == held


@quick
@given(
    st.builds(
        StagingNote,
        shard_id=st.binary(min_size=16, max_size=16).map(ShardId.from_bytes),
        sink_id=st.text(),
        run=st.binary(),
        job=st.binary(min_size=JOB_BYTES, max_size=JOB_BYTES),
        batch=st.binary(),
        rows=st.integers(0, 2**64 - 1),
        errors=st.integers(0, 2**64 - 1),
        least_time=st.none() | st.integers(0, 2**64 - 1),
        low=st.integers(0, 2**63 - 1),
        high=st.integers(0, 2**63 - 1),
        least=st.tuples(st.text(), st.text()),
        greatest=st.tuples(st.text(), st.text()),
    )
)
def test_staging_notes_round_trip(note: StagingNote) -> None:
    data = encode_staging_note(note)
    assert decode_staging_note(data, key="k", shard_id=note.shard_id) == note
    assert encode_staging_note(decode_staging_note(data, key="k", shard_id=note.shard_id)) == data


@quick
@given(
    st.builds(
        Deletions,
        shard_id=st.binary(min_size=16, max_size=16).map(ShardId.from_bytes),
        cause=st.sampled_from(Cause),
        seqno=st.integers(0, SEQNO_MAX).map(SeqNo),
        hostname=st.text(),
        begun_ms=st.integers(0, 2**64 - 1),
        gone_ms=st.none() | st.integers(0, 2**64 - 1),
        keys=st.lists(st.text()).map(tuple),
    )
)
def test_records_of_deletions_round_trip(record: Deletions) -> None:
    data = encode_deletions(record)
    assert decode_deletions(data, key="k", shard_id=record.shard_id) == record
    assert encode_deletions(decode_deletions(data, key="k", shard_id=record.shard_id)) == data


@quick
@given(strategies.schemas())
def test_schemas_round_trip_as_ddl_and_as_registered(schema: Schema) -> None:
    assert Schema.from_ddl(schema.key_ddl, schema.val_ddl) == schema
    assert Schema.from_pair(schema.to_pair()) == schema
    assert schema.difference(schema) is None


@pytest.mark.slow
@quick
@given(st.data())
def test_parts_round_trip_bit_for_bit(data: st.DataObject) -> None:
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    desc = data.draw(strategies.descriptions())
    part = decode_part(encode_part(table, desc=desc, schema=schema), key="k", schema=schema)
    assert same_bits(part.table, table)
    assert part.desc == desc


@pytest.mark.slow
@quick
@given(st.data())
def test_any_damage_to_durable_bytes_is_refused(data: st.DataObject) -> None:
    schema = Schema.from_ddl("id BIGINT", "name STRING")
    kind = data.draw(st.sampled_from(["batch", "diff", "rollup", "part", "owner"]))
    if kind == "batch":
        whole = encode_batch(data.draw(strategies.batches()))
        decode: Any = lambda raw: decode_batch(raw, key="the-key")  # noqa: E731
    elif kind == "owner":
        shard_id = data.draw(strategies.ids(ShardId))
        whole = encode_shard_owner(shard_id, data.draw(owners))
        decode = lambda raw: decode_shard_owner(raw, key="the-key", shard_id=shard_id)  # noqa: E731
    elif kind == "diff":
        whole = encode_state_diff(data.draw(strategies.state_diffs()))
        decode = lambda raw: decode_state_diff(raw, key="the-key")  # noqa: E731
    elif kind == "rollup":
        whole = encode_rollup(Rollup(data.draw(strategies.states())))
        decode = lambda raw: decode_rollup(raw, key="the-key")  # noqa: E731
    else:
        whole = encode_part(data.draw(strategies.updates(schema)), desc=DESC, schema=schema)
        decode = lambda raw: decode_part(raw, key="the-key", schema=schema)  # noqa: E731
    damaged = data.draw(damages(whole))
    with pytest.raises((CorruptData, Incompatible), match="the-key"):
        decode(damaged)


@st.composite
def damages(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a few bits flipped, cut short, or longer; never itself."""
    how = draw(st.sampled_from(["flip", "cut", "extend", "zero"]))
    at = draw(st.integers(0, len(whole) - 1))
    if how == "cut":
        return whole[:at]
    if how == "extend":
        return whole + draw(st.binary(min_size=1, max_size=9))
    raw = bytearray(whole)
    if how == "zero" and any(raw[at:]):
        raw[at:] = bytes(len(raw) - at)
    else:
        raw[at] ^= draw(st.integers(1, 255))
    return bytes(raw)


def contents(table: pa.Table) -> Counter[str]:
    """The updates as a multiset, by a dictionary and not by columns: the oracle. One zero, one NaN."""
    total: Counter[str] = Counter()
    for row in table.to_pylist():
        name = repr((plain(row["key"]), plain(row["val"]), row["time"]))
        total[name] += row["diff"]
    return Counter({name: diff for name, diff in total.items() if diff})


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return value + 0.0 if isinstance(value, float) else value


@pytest.mark.slow
@quick
@given(st.data())
def test_consolidation_keeps_contents_and_is_a_normal_form(data: st.DataObject) -> None:
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    out = laws.consolidate(table)
    assert contents(out) == contents(table)
    assert laws.is_consolidated(out)
    assert out.num_rows == len(contents(table))
    shuffled = table.take(pa.array(data.draw(st.permutations(range(table.num_rows))), pa.int64()))
    assert same_bits(laws.consolidate(shuffled), out)
    assert same_bits(laws.consolidate(out), out)
    assert laws.diffs_sum(out) == laws.diffs_sum(table)
    assert contents(laws.sort(table)) == contents(table)


@pytest.mark.slow
@quick
@given(st.data())
def test_key_bytes_order_as_sorted_rows_and_bound_from_below(data: st.DataObject) -> None:
    """Spec 10.2, 29.14."""
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    ordered = laws.sort(table)
    keys = [key_bytes(ordered, row) for row in range(ordered.num_rows)]
    assert keys == sorted(keys)
    lower = key_lower(table)
    assert lower == (keys[0][:KEY_LOWER_BYTES_MAX] if keys else b"")


@pytest.mark.slow
@quick
@given(st.data())
def test_statistics_bound_every_row(data: st.DataObject) -> None:
    """Spec 15.9."""
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    stats = part_stats(table, schema, data.draw(st.sampled_from([0, 100, 10_000])))
    for name, column in stats.columns:
        side, *below = stats_path(name)
        values = pc.struct_field(table.column(side).combine_chunks(), below)
        assert column.null_count == values.null_count
        for text, wrong in ((column.lower, "less"), (column.upper, "greater")):
            if text is not None:
                beyond = pa.compute.call_function(wrong, [values, bound(text, values.type)])
                assert not pa.compute.any(beyond).as_py()
    times = table.column("time").to_pylist()
    assert (stats.time_min, stats.time_max) == ((min(times), max(times)) if times else (None, None))
    assert stats.diff_min == min(table.column("diff").to_pylist(), default=None)


@quick
@given(st.data())
def test_time_laws_row_by_row(data: st.DataObject) -> None:
    schema = Schema.from_ddl("id INT")
    table = data.draw(strategies.updates(schema))
    lower, upper = data.draw(strategies.frontiers()), data.draw(strategies.frontiers())
    kept = [
        row["time"] for row in table.to_pylist() if lower.less_equal(row["time"]) and not upper.less_equal(row["time"])
    ]
    assert laws.time_filter(table, lower, upper).column("time").to_pylist() == kept
    advanced = laws.advance_times(table, lower).column("time").to_pylist()
    if lower.time is None:
        assert advanced == []
    else:
        assert advanced == [min(max(row["time"], lower.time), 2**63 - 1) for row in table.to_pylist()]


@pytest.mark.slow
@settings(quick, max_examples=draws(8))
@given(st.data())
def test_whole_envelopes_around_damaged_payloads_never_crash_the_decoder(data: st.DataObject) -> None:
    """Such bytes cannot come from a disk (the checksum fits), only from a bug or a forger: a clear refusal, or a value."""
    kind = data.draw(st.sampled_from(["batch", "diff", "rollup"]))
    if kind == "batch":
        whole = encode_batch(data.draw(strategies.batches()))
        decode: Any = lambda raw: decode_batch(raw, key="the-key")  # noqa: E731
    elif kind == "diff":
        whole = encode_state_diff(data.draw(strategies.state_diffs()))
        decode = lambda raw: decode_state_diff(raw, key="the-key")  # noqa: E731
    else:
        whole = encode_rollup(Rollup(data.draw(strategies.states())))
        decode = lambda raw: decode_rollup(raw, key="the-key")  # noqa: E731
    front, payload = whole[:6], whole[10:]
    for _ in range(20):
        damaged = data.draw(damages(payload)) if payload else b"\x08"
        crc = zlib.crc32(damaged, zlib.crc32(front)).to_bytes(4, "little")
        with contextlib.suppress(CorruptData, Incompatible):
            decode(front + crc + damaged)
