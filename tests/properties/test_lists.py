"""Lists and maps: their order and equality beside Python's, whatever is sliced off, and tables with them beside a multiset of rows."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from persist_engine import SeededEnv, connect
from persist_engine.base.errors import SchemaMismatch
from persist_engine.codec.part import decode_part, encode_part
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.nested.entries import sorted_entries
from persist_engine.rows.nested.layout import list_of, map_of
from persist_engine.rows.nested.ordered import ordered
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate, normalise
from persist_engine.rows.words import RowCodec
from persist_kit import strategies
from persist_kit.depth import draws

SLOW = [HealthCheck.too_slow]
DOUBLES = st.sampled_from([None, -1.5, -0.0, 0.0, 2.0, math.nan, math.inf])
TEXTS = st.sampled_from([None, "", "\0", "\0a", "a", "ab", "é"])
WHOLE = st.sampled_from([None, -(2**31), -1, 0, 1, 2**31 - 1])
ELEMENT = pa.struct([("x", pa.float64()), ("t", pa.string()), ("l", list_of(pa.int32()))])
KIND = list_of(ELEMENT)
ROWS = st.lists(
    st.none()
    | st.lists(st.none() | st.fixed_dictionaries({"x": DOUBLES, "t": TEXTS, "l": st.none() | st.lists(WHOLE, max_size=2)}),
               max_size=3),
    max_size=8,
)  # fmt: skip


def rank(value):
    """A value as Python compares it in row order: null last, NaN after all numbers, shorter lists before what they begin."""
    if value is None:
        return (2,)
    if isinstance(value, dict):
        return (0, tuple(rank(value[name]) for name in ("x", "t", "l")))
    if isinstance(value, list):
        return (0, tuple(map(rank, value)))
    if isinstance(value, float):
        return (1,) if math.isnan(value) else (0, value + 0.0)
    return (0, value.encode() if isinstance(value, str) else value)


@settings(max_examples=draws(50), deadline=None, suppress_health_check=SLOW)
@given(ROWS, st.integers(0, 3))
def test_lists_as_bytes_compare_as_their_elements_do(values, start):
    """Spec 26.2, also of slices, whose offsets do not begin at 0."""
    found = ordered(pa.chunked_array([pa.array(values, KIND).slice(start)])).to_pylist()
    values = values[start:]
    assert [each is None for each in found] == [each is None for each in values]
    pairs = [(raw, rank(value)) for raw, value in zip(found, values, strict=True) if value is not None]
    for raw, mine in pairs:
        for other, theirs in pairs:
            assert (raw < other, raw == other) == (mine < theirs, mine == theirs)


@settings(max_examples=draws(40), deadline=None, suppress_health_check=SLOW)
@given(ROWS, st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 3))
def test_rows_with_lists_survive_their_words(values, hidden, start):
    """What lies under a null row, or under a null struct, has no effect."""
    lists = pa.array(values, KIND)
    mask = pa.array(hidden[: len(values)], pa.bool_())
    inner = pa.StructArray.from_arrays([lists, pa.array([1] * len(values), pa.int64())], ["l", "n"], mask=mask)
    rows = pa.StructArray.from_arrays([inner, lists], ["s", "l"]).slice(start)
    codec = RowCodec(rows.type)
    back = codec.decode(codec.encode(rows))
    canonical = lambda each: functools.reduce(lambda text, pair: text.replace(*pair), [("-0.0", "0.0")], repr(each))  # noqa: E731
    assert canonical(back.to_pylist()) == canonical(rows.to_pylist())


@settings(max_examples=draws(15), deadline=None, suppress_health_check=SLOW)
@given(st.data())
def test_consolidation_adds_up_rows_with_equal_lists(data):
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    expected: Counter[str] = Counter()
    for row in table.to_pylist():
        expected[repr((row["key"], row["val"], row["time"])).replace("-0.0", "0.0")] += row["diff"]
    found = consolidate(table)
    rows = {repr((row["key"], row["val"], row["time"])): row["diff"] for row in found.to_pylist()}
    assert rows == {row: diff for row, diff in expected.items() if diff}
    assert repr(consolidate(found).to_pylist()) == repr(found.to_pylist())
    turned = table.take(pa.array(range(table.num_rows)[::-1], pa.int64()))
    assert repr(consolidate(turned).to_pylist()) == repr(found.to_pylist())


maps = st.none() | st.dictionaries(st.sampled_from(["", "a", "b", "é"]), DOUBLES, max_size=3)
lists = st.none() | st.lists(TEXTS, max_size=2)
frames = st.lists(st.tuples(st.sampled_from([1, 2, 3]), lists, maps), max_size=5)


def canonical(row):
    key, one, other = row
    entries = None if other is None else tuple(sorted((name, rank(value)) for name, value in other.items()))
    return key, None if one is None else tuple(one), entries


@settings(max_examples=draws(12), deadline=None, suppress_health_check=SLOW)
@given(st.lists(st.tuples(st.sampled_from(["append", "upsert", "overwrite", "delete"]), frames), max_size=6))
def test_a_table_with_lists_is_a_multiset_of_rows(sequence):
    """Maps are equal in any order of their entries; a repeated upsert or overwrite writes nothing."""
    env = SeededEnv(start_ms=1_800_000_000_000)
    with connect("mem:", env=env, maintain=False) as db:
        table = db.create("t", key="id BIGINT", value="tags ARRAY<STRING>, n MAP<STRING, DOUBLE>")
        model: Counter[object] = Counter()
        for step, argument in sequence:
            if step == "delete":
                table.delete("id = 1 OR tags IS NULL")
                model = Counter({row: count for row, count in model.items() if row[0] != 1 and row[1] is not None})
            else:
                rows = list({row[0]: row for row in argument}.values()) if step == "upsert" else argument
                given = [{"id": row[0], "tags": row[1], "n": row[2]} for row in rows]
                getattr(table, step)(given)
                kept = {"append": model, "overwrite": Counter()}.get(step)
                if kept is None:
                    kept = Counter({row: n for row, n in model.items() if row[0] not in {each[0] for each in rows}})
                model = kept + Counter(map(canonical, rows))
                if step != "append":
                    turned = [
                        row | {"n": None if row["n"] is None else dict(reversed(row["n"].items()))} for row in given
                    ]
                    assert getattr(table, step)(turned).time is None
            found = Counter(canonical((row["id"], row["tags"], row["n"])) for row in table.to_pylist())
            assert found == model
            env.advance_ms(10)
        table.optimize()
        assert Counter(canonical((row["id"], row["tags"], row["n"])) for row in table.to_pylist()) == model
        assert not table.verify().is_corrupt


def test_a_map_has_each_key_once_and_in_order():
    kind = map_of(pa.float64(), pa.int32())
    with pytest.raises(ValueError, match="more than once"):
        sorted_entries(pa.array([[(0.0, 1), (-0.0, 2)]], kind))
    array = pa.array([[(2.0, 1), (math.nan, 3), (-1.0, 2)], None, []], kind)
    assert repr(sorted_entries(array).to_pylist()) == repr([[(-1.0, 2), (2.0, 1), (math.nan, 3)], None, []])
    assert sorted_entries(sorted_entries(array)) is not array


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "tags": "x"}], "tags is a str; expected a list or a tuple"),
        ([{"id": 1, "tags": [1]}], "tags.* does not fit STRING"),
        ([{"id": 1, "n": {None: 1.0}}], "n: a map has a key that is null"),
        (pa.table({"id": [1], "tags": [[1]], "n": pa.nulls(1)}), "tags is ARRAY<BIGINT>, the table's is ARRAY<STRING>"),
        (pa.table({"id": [1], "tags": [["a"]],
                   "n": pa.array([[("a", 1.0), ("a", 2.0)]], pa.map_(pa.string(), pa.float64()))}), "the key 'a' more than once"),
    ],
)  # fmt: skip
def test_what_a_column_of_lists_cannot_hold_is_refused_by_name(rows, message):
    with connect("mem:", maintain=False) as db:
        table = db.create("t", key="id BIGINT", value="tags ARRAY<STRING>, n MAP<STRING, DOUBLE>")
        with pytest.raises(SchemaMismatch, match=message):
            table.append(rows)
        assert table.last_time is None


def test_other_layouts_of_lists_become_the_table_s():
    with connect("mem:", maintain=False) as db:
        table = db.create("t", key="id BIGINT", value="l ARRAY<INT>, m MAP<STRING, INT>")
        entries = pa.array([[{"value": 1, "key": "b"}, {"value": None, "key": "a"}], None])
        table.append(
            pa.table({"id": [1, 2], "l": pa.array([[1, None], None], pa.large_list(pa.int64())), "m": entries})
        )
        table.append(pa.table({"id": [3], "l": pa.array([[7, 8]], pa.list_(pa.int16(), 2)), "m": pa.nulls(1)}))
        assert table.to_pylist() == [
            {"id": 1, "l": [1, None], "m": {"a": None, "b": 1}},
            {"id": 2, "l": None, "m": None},
            {"id": 3, "l": [7, 8], "m": None},
        ]
        with pytest.raises(SchemaMismatch, match="l is ARRAY<BIGINT>, the table's is ARRAY<INT>: .*2147483648"):
            table.append(pa.table({"id": [4], "l": [[2**31]], "m": pa.nulls(1)}))


def test_updates_of_handles_have_the_entries_of_maps_in_order():
    """Also within structs and lists, and when the types are already those of the shard."""
    schema = Schema.from_ddl("id INT", "m MAP<STRING, INT>, s STRUCT<l: ARRAY<MAP<INT, INT>>>")
    val = pa.array([{"m": [("b", 1), ("a", 2)], "s": {"l": [[(2, 0), (1, 0)], None]}}], schema.val_type)
    given = pa.table({"key": pa.array([{"id": 1}], schema.key_type), "val": val, "time": [0], "diff": [1]})
    (found,) = normalise(given, schema)
    assert found["val"].to_pylist() == [{"m": [("a", 2), ("b", 1)], "s": {"l": [[(1, 0), (2, 0)], None]}}]
    twice = pa.array([{"m": [("a", 1), ("a", 2)], "s": None}], schema.val_type)
    with pytest.raises(SchemaMismatch, match=r"val\.m: a map has the key 'a' more than once"):
        list(normalise(given.set_column(1, "val", twice), schema))


def test_what_lies_under_a_null_list_is_left_out():
    """Parquet refuses it."""
    schema = Schema.from_ddl("id INT", "l ARRAY<INT>")
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 3], pa.int32()), pa.array([1, 2, 3], pa.int32()), mask=pa.array([True, False])
    )
    val = pa.StructArray.from_arrays([hidden.cast(schema.val.field(0).type)], fields=list(schema.val))
    key = pa.array([{"id": 1}, {"id": 2}], schema.key_type)
    (found,) = normalise(pa.table({"key": key, "val": val, "time": [0, 0], "diff": [1, 1]}), schema)
    data = encode_part(found, desc=Description(Antichain(0), Antichain(1), Antichain(0)), schema=schema)
    assert decode_part(data, key="k", schema=schema).table["val"].to_pylist() == [{"l": None}, {"l": [3]}]
