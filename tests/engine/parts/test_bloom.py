"""Bloom filters: a read with them finds what a read without them finds, of every type, also after the type has changed."""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Settings, connect
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import BatchSettings
from persist_engine.codec import bloom, row_groups
from persist_engine.codec.bloom import PartFilters, filters_bytes
from persist_engine.codec.part import encode_part
from persist_engine.model.batch import HollowPart
from persist_engine.model.frontier import Antichain, Description
from persist_engine.parts import source
from persist_engine.rows.comparable import floor_of
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, In, Not, Or
from persist_engine.rows.schema import Schema
from persist_kit.counted import CountedMetrics

DESC = Description(Antichain.of(0), Antichain.of(1), Antichain.of(0))
FLOATS = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, 0.1, 2.0**-1074]) | st.floats()
NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "TINYINT": st.integers(-(2**7), 2**7 - 1),
    "SMALLINT": st.integers(-(2**15), 2**15 - 1),
    "INT": st.integers(-(2**31), 2**31 - 1),
    "BIGINT": st.integers(-(2**63), 2**63 - 1),
    "FLOAT": st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan]),
    "DOUBLE": FLOATS | st.just(NAN),
    "DECIMAL(9,2)": st.decimals(min_value=-9999999, max_value=9999999, places=2),
    "DECIMAL(18,4)": st.decimals(min_value=-(10**13), max_value=10**13, places=4),
    "DECIMAL(38,10)": st.decimals(min_value=-(10**27), max_value=10**27, places=10),
    "STRING": st.text(max_size=80),
    "BINARY": st.binary(max_size=80),
    "DATE": st.dates(),
    "TIMESTAMP": st.datetimes(timezones=st.just(dt.UTC)),
    "TIMESTAMP_NTZ": st.datetimes(),
}


def filters_of(values: list[Any], kind: str) -> PartFilters:
    """The filter of a part of one row group."""
    schema = Schema.from_ddl("id BIGINT", f"v {kind}")
    val = pa.StructArray.from_arrays([pa.array(values, schema.val.field(0).type)], fields=list(schema.val))
    ones = pa.array(np.ones(len(values), np.int64))
    keys = pa.StructArray.from_arrays([pa.array(range(len(values)), pa.int64())], ["id"])
    table = pa.table({"key": keys, "val": val, "time": pa.array(np.zeros(len(values), np.int64)), "diff": ones})
    data = encode_part(table, desc=DESC, schema=schema, filtered=["val.v"])
    footing = row_groups.footing_of(data, ["val.v"])
    start = len(data) - footing.size_bytes - footing.filters_bytes
    metadata = pq.read_metadata(pa.BufferReader(data))
    found = PartFilters.read(data[start : len(data) - footing.size_bytes], start=start, metadata=metadata)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_value_that_is_there_is_lacking(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[kind] | st.none(), min_size=1, max_size=20))
    filters, data_type = filters_of(values, kind), Schema.from_ddl("id BIGINT", f"v {kind}").val.field(0).type
    for value in values:
        if value is None:
            continue
        literal = np.float32(value).item() if kind == "FLOAT" else value
        assert not filters.lacks(0, ("val", "v"), floor_of(literal, data_type, "v").value)


@pytest.mark.parametrize("kind", VALUES)
def test_most_values_that_are_not_there_are_lacking(kind: str) -> None:
    def value(number: int) -> Any:
        if "INT" in kind:
            return number - 120
        if kind in ("STRING", "BINARY"):
            return f"v{number}" if kind == "STRING" else f"v{number}".encode()
        if kind == "DATE":
            return dt.date(2020, 1, 1) + dt.timedelta(days=number)
        if "TIME" in kind:
            return dt.datetime(2020, 1, 1, 7, tzinfo=dt.UTC if kind == "TIMESTAMP" else None) + dt.timedelta(
                days=number
            )
        return Decimal(number) / 4 if "DECIMAL" in kind else number / 4

    filters = filters_of([value(number) for number in range(0, 240, 2)], kind)
    data_type = Schema.from_ddl("id BIGINT", f"v {kind}").val.field(0).type
    lacking = [filters.lacks(0, ("val", "v"), floor_of(value(each), data_type, "v").value) for each in range(240)]
    assert not any(lacking[::2])
    assert sum(lacking[1::2]) > 110
    assert not filters.lacks(0, ("val", "v", "w"), value(1))
    assert not filters.lacks(0, ("val", "other"), value(1))


def test_what_is_damaged_or_unknown_says_nothing() -> None:
    filters = filters_of(["a", "b"], "STRING")
    assert filters.lacks(0, ("val", "v"), "c")
    data = bytearray(filters.data)
    data[-1] ^= 1
    assert PartFilters.read(bytes(data), start=filters.start, metadata=filters.metadata) is None
    data = bytearray(filters.data)
    data[2] ^= 1  # another size in the header
    unread = PartFilters(bytes(data), filters.start, filters.metadata, filters._columns)
    assert not unread.lacks(0, ("val", "v"), "c")
    cut = PartFilters(filters.data[:10], filters.start, filters.metadata, filters._columns)
    assert not cut.lacks(0, ("val", "v"), "c")
    assert bloom.decode_filtered(bloom.encode_filtered(("val.é", "key.a"))) == ("val.é", "key.a")


# -- tables ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of some rows, and pieces of every part."""
    monkeypatch.setattr(row_groups, "ROW_GROUP_ROWS_MIN", 8)
    monkeypatch.setattr(source, "CUT_BYTES_MIN", 0)


SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0))
VALUE = "i INT, s STRING, d DOUBLE, m DECIMAL(12,3), at TIMESTAMP, raw BINARY, n SMALLINT"
FILTERED = ["part", "i", "s", "d", "m", "at", "raw", "n"]


def row(number: int, rng: np.random.Generator) -> dict[str, Any]:
    small = int(rng.integers(0, 300))
    values = {
        "i": small,
        "s": f"s{small}",
        "d": [0.0, -0.0, math.nan, small / 4][int(rng.integers(0, 4))],
        "m": Decimal(small) / 8,
        "at": dt.datetime(2020, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=small),
        "raw": f"r{small}".encode(),
        "n": small - 100,
    }
    nulls = {name: None for name in values if rng.integers(0, 9) == 0}
    return {"id": number, "part": f"p{number % 50}", **values, **nulls}


def questions(rows: list[dict[str, Any]], rng: np.random.Generator) -> Iterator[Any]:
    """Conditions on values that are there, and that are not."""
    picked = [rows[int(at)] for at in rng.integers(0, len(rows), 2)]
    for one in picked:
        for name in rng.permutation(FILTERED)[:2]:
            value = one[name]
            if value is None:
                continue
            yield Compare(name, "=", value)
            other = f"{value}x" if isinstance(value, str) else value + b"x" if isinstance(value, bytes) else None
            yield In(name, tuple(each for each in (value, other) if each is not None))
            yield Not(Compare(name, "=", value))
            yield Or((Compare(name, "=", value), Compare("id", "<", 3)))
    a, b = picked[:2]
    yield And((Compare("part", "=", a["part"]), Compare("id", "=", a["id"])))
    yield And((Compare("part", "=", a["part"]), Compare("id", "=", b["id"])))
    yield Compare("d", "=", 0)
    yield Compare("d", "=", -0.0)
    yield Compare("i", "=", 2**40)
    yield Compare("i", "=", 7.5)
    yield Compare("n", "=", 40_000)
    yield In("s", ())


def shown(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.slow
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("seed", range(2))
def test_reads_with_filters_find_what_reads_without_find(seed: int) -> None:
    """Appended, upserted and deleted rows, before and after a compaction; numbers that were widened; a column that came later."""
    rng = np.random.default_rng(seed)
    with connect("mem:", maintain=False, settings=SETTINGS) as db:
        tables = [
            db.create(name, key="id BIGINT, part STRING", value=VALUE, bloom=bloomed)
            for name, bloomed in (("with", FILTERED), ("without", []))
        ]
        rows: list[dict[str, Any]] = []
        times: list[int] = []

        def both(call: str, *given: Any) -> None:
            for table in tables:
                getattr(table, call)(*given)

        def agree() -> None:
            for question in questions(rows, rng):
                ours, theirs = (shown(table.scan(question).to_pylist()) for table in tables)
                assert ours == theirs, question
                assert tables[0].scan(question).count() == len(theirs)
                assert shown(tables[0].scan(question, ["id"]).to_pylist()) == shown(
                    tables[1].scan(question, ["id"]).to_pylist()
                )

        for turn in range(4):
            some = [row(turn * 100 + number, rng) for number in range(100)]
            rows += some
            both("append", some)
            times.append(tables[0].last_time)
        both("upsert", [row(number, rng) for number in range(0, 200, 7)])
        both("delete", "s = 's7' OR i = 9")
        agree()
        for table in tables:
            table.alter(widen={"i": "BIGINT", "n": "INT"}, add="late STRING")
        tables[0].alter(bloom=[*FILTERED, "late"])
        later = [{**row(1000 + number, rng), "late": f"l{number}", "i": 2**40, "n": 40_000} for number in range(60)]
        rows += later
        both("append", later)
        agree()
        for name in ("l7", "nowhere"):
            assert shown(tables[0].scan([("late", "=", name)]).to_pylist()) == shown(
                tables[1].scan([("late", "=", name)]).to_pylist()
            )
        for table in tables:
            table.alter(retain="none")
            table.optimize()
        agree()
        assert not tables[0].verify().findings


def test_a_lookup_fetches_the_filters_and_one_row_group() -> None:
    metrics, rng = CountedMetrics(), np.random.default_rng(1)
    with connect("mem:", maintain=False, settings=SETTINGS, metrics=metrics) as db:
        table = db.create("t", key="id BIGINT", value="email STRING, text STRING", bloom=["email"])
        assert table.describe().bloom == "email"
        for batch in range(3):
            ids = range(batch * 5000, batch * 5000 + 5000)
            texts = [rng.bytes(40).hex() for _ in ids]
            table.append({"id": ids, "email": [f"{number * 7919}@b.c" for number in ids], "text": texts})

        def fetched(where: str, rows: int) -> tuple[float, float]:
            before = metrics.total("fetched_bytes", path="snapshot"), metrics.total("shard_blob_gets")
            assert len(table.scan(where).to_pylist()) == rows
            after = metrics.total("fetched_bytes", path="snapshot"), metrics.total("shard_blob_gets")
            return after[0] - before[0], after[1] - before[1]

        whole, gets = fetched("text = '7'", 0)
        none, gets_of_none = fetched("email = '7@b.c'", 0)
        one, gets_of_one = fetched(f"email = '{6000 * 7919}@b.c'", 1)
        assert (gets, gets_of_none, gets_of_one) == (3, 2, 4), "bounds rule a part out for one of them"
        assert none < whole / 10
        assert none < one < whole / 2
        table.alter(bloom=[])
        table.append([{"id": -1, "email": "7@b.c", "text": ""}])
        assert table.describe().bloom == ""
        assert fetched("email = '7@b.c'", 1)[1] == 3


def test_columns_that_can_have_none_are_refused(tmp_path: Path) -> None:
    with connect("mem:", maintain=False) as db:
        value = "ok BOOLEAN, s STRUCT<x: INT>, l ARRAY<INT>, `a.b` STRING, name STRING"
        for name in ("ok", "s", "l", "a.b"):
            with pytest.raises(
                InvalidUsage, match=f"table t: no Bloom filter is possible for val.{name}: it takes a column"
            ):
                db.create("t", key="id BIGINT", value=value, bloom=["name", name])
        with pytest.raises(InvalidUsage, match="table t: bloom: there is no column nam; the columns are id, ok"):
            db.create("t", key="id BIGINT", value=value, bloom=["nam"])
        with pytest.raises(InvalidUsage, match="table t: bloom is a list of columns, not str 'name'"):
            db.create("t", key="id BIGINT", value=value, bloom="name")
        assert db.tables() == [], "nothing was created"
        made = db.create("t", key="id BIGINT", value=value, bloom=["id", "name"])
        assert made.describe().bloom == "id, name"
        seen = db.client.inspect(made.id)
        assert (dict(seen.progress), seen.writers) == ({}, ())
        version = made.describe().version
        made.alter(bloom=["id", "name"])
        assert made.describe().version == version, "nothing was committed"
        with pytest.raises(InvalidUsage, match="no column nam"):
            made.alter(bloom=["nam"])


def test_the_filters_are_parquets_own() -> None:
    """pyarrow says in the footer where they are; their size is what it was asked for."""
    filters = filters_of(list(range(1000)), "BIGINT")
    column = filters.metadata.row_group(0).column(filters._columns["val.v"])
    assert column.bloom_filter_offset == filters.start
    assert 1000 <= column.bloom_filter_length <= 3000
    assert filters_bytes(encode_part(**plain_part())) == 0


def plain_part() -> dict[str, Any]:
    schema = Schema.from_ddl("id BIGINT")
    table = schema.updates_schema.empty_table()
    return {"table": table, "desc": DESC, "schema": schema}


def test_a_filter_rules_out_only_what_a_condition_needs() -> None:
    schema = Schema.from_ddl("id BIGINT", "a STRING, b STRING")
    lacking = {("val", "a")}

    def may(predicate: Any) -> bool:
        part = HollowPart(key="k", size_bytes=1, rows=1, diffs_sum=1, checksum="crc32:00000000")
        return Filter(predicate, schema).may_pass(part, lambda path, _value: path in lacking)

    a, b = Compare("a", "=", "x"), Compare("b", "=", "x")
    assert [
        may(each) for each in (a, b, And((a, b)), Or((a, b)), Not(a), Compare("a", "<", "x"), In("a", ("x", "y")))
    ] == [
        *(False, True, False, True, True, True, False),
    ]


def test_a_verification_finds_filters_that_lack_what_is_there() -> None:
    schema = Schema.from_ddl("id BIGINT", "v STRING, d DOUBLE, at DATE")
    rows = [
        {"id": n, "v": f"v{n}", "d": [math.nan, -0.0, 1.5][n % 3], "at": dt.date(2020, 1, 1 + n % 9)} for n in range(90)
    ]
    keys = pa.array([{"id": one["id"]} for one in rows])
    val = pa.array([{name: one[name] for name in ("v", "d", "at")} for one in rows], schema.val_type)
    table = pa.table([keys, val, pa.array(range(90)), pa.array([1] * 90)], schema=schema.updates_schema)
    paths = ["key.id", "val.v", "val.d", "val.at"]
    data = bytearray(encode_part(table, desc=DESC, schema=schema, filtered=paths))
    footing = row_groups.footing_of(bytes(data), paths)
    assert list(bloom.wrong_filters(bytes(data), footing, key="k")) == []
    column = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(1)
    assert column.path_in_schema == "val.v"
    end = column.bloom_filter_offset + column.bloom_filter_length
    data[end - 64 : end] = bytes(64)
    assert list(bloom.wrong_filters(bytes(data), footing, key="k")) == ["the Bloom filters do not match their check"]
    bloom.fill_filters_check(data)
    found = list(bloom.wrong_filters(bytes(data), row_groups.footing_of(bytes(data), paths), key="k"))
    assert found
    assert set(found) == {"the Bloom filter of val.v in row group 0 lacks a value that is there"}
