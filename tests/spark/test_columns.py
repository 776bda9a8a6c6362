"""Flat columns and structs, chunks that never split a hash, and rows repeated by their diff."""

from itertools import pairwise

import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.rows.schema import Schema
from persist_spark.catalog.change_rows import change_rows, feed_row_type
from persist_spark.columns import (
    RECORD_ROWS,
    flat_columns,
    hash_chunks,
    negated_flat,
    records_of,
    rows_of,
    struct_column,
)
from persist_spark.row_shape import arrow_schema, changes_row_type


def hashes(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"h": pa.array(values, pa.int64())})


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    "batches",
    [
        [],
        [hashes()],
        [hashes(1, 1, 2), hashes(2, 2, 3), hashes(3), hashes(), hashes(3, 4, 5, 5)],
        [hashes(1, 2, 3, 4), hashes(4, 4), hashes(4, 4), hashes(4, 5)],
        [hashes(7, 7), hashes(7, 7), hashes(7)],
    ],
    ids=["nothing", "empty", "mixed", "long", "one"],
)
def test_chunks_concatenate_to_the_stream_and_never_split_a_hash(batches, chunk_rows):
    chunks = [
        chunk.column("h").to_pylist()
        for chunk in hash_chunks(iter(batches), chunk_rows=chunk_rows, chunk_bytes=1 << 20)
    ]
    assert [h for chunk in chunks for h in chunk] == [h for batch in batches for h in batch.column("h").to_pylist()]
    assert all(chunks)
    assert all(before[-1] != after[0] for before, after in pairwise(chunks))


def test_chunks_are_bounded_by_rows():
    """A chunk exceeds `chunk_rows` by at most the record that reached it and the rest of one hash."""
    batches = [hashes(*range(start, start + 10)) for start in range(0, 1000, 10)]
    assert max(chunk.num_rows for chunk in hash_chunks(iter(batches), chunk_rows=30, chunk_bytes=1 << 20)) <= 41


def wide(*values: int, chars: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"h": pa.array(values, pa.int64()), "v0": pa.array(["x" * chars] * len(values))})


def test_chunks_are_bounded_by_bytes_where_rows_are_wide():
    """A chunk exceeds `chunk_bytes` by at most the record that reached it and the rest of one hash. It stays below its 1,000 rows."""
    batches = [wide(*range(start, start + 10), chars=1000) for start in range(0, 1000, 10)]
    chunks = list(hash_chunks(iter(batches), chunk_rows=1000, chunk_bytes=30_000))
    assert max(chunk.nbytes for chunk in chunks) <= 30_000 + 2 * batches[0].nbytes
    assert min(chunk.nbytes for chunk in chunks[:-1]) >= 30_000
    assert [h for chunk in chunks for h in chunk.column("h").to_pylist()] == list(range(1000))
    narrow = [wide(*range(start, start + 10), chars=1) for start in range(0, 1000, 10)]
    assert [chunk.num_rows for chunk in hash_chunks(iter(narrow), chunk_rows=1000, chunk_bytes=30_000)] == [1000]


def test_bytes_of_one_chunk_do_not_count_for_the_next():
    batches = [wide(start, chars=10_000) for start in range(20)]
    chunks = list(hash_chunks(iter(batches), chunk_rows=1000, chunk_bytes=25_000))
    assert [chunk.num_rows for chunk in chunks] == [3] * 6 + [2]


def test_structs_and_flat_columns_are_inverse():
    schema = Schema.from_ddl("a BIGINT, p STRUCT<x: DOUBLE, y: STRING>", "n STRING")
    key = pa.array([{"a": 1, "p": {"x": 0.5, "y": "s"}}, {"a": 2, "p": None}], schema.key_type)
    val = pa.array([{"n": None}, {"n": "b"}], schema.val_type)
    flat = pa.table(flat_columns(key, val))
    assert flat.column_names == ["k0", "k1", "v0"]
    assert struct_column(flat, "k", schema.key_type) == key
    assert struct_column(flat, "v", schema.val_type) == val


def test_a_value_without_fields_has_a_struct_for_every_row():
    val = struct_column(pa.table({"k0": [1, 2, 3]}), "v", pa.struct([]))
    assert (len(val), val.null_count, val.type.num_fields) == (3, 0, 0)


def test_instants_get_the_time_zone_of_the_schema():
    schema = Schema.from_ddl("t TIMESTAMP")
    flat = pa.table({"k0": pa.array([0], pa.timestamp("us", tz="Europe/Paris"))})
    assert struct_column(flat, "k", schema.key_type).field(0).type == pa.timestamp("us", tz="UTC")


def updates(keys, diffs) -> pa.RecordBatch:
    schema = Schema.from_ddl("k BIGINT", "v STRING")
    key = pa.array([{"k": k} for k in keys], schema.key_type)
    val = pa.array([{"v": str(k)} for k in keys], schema.val_type)
    return pa.RecordBatch.from_arrays(
        [key, val, pa.array([5] * len(keys)), pa.array(diffs, pa.int64())], schema=schema.updates_schema
    )


WANTED = pa.schema([("k", pa.int64()), ("v", pa.string())])


def test_negated_rows_have_the_opposite_diffs():
    assert negated_flat(updates([1, 2], [1, -3])).column("diff").to_pylist() == [-1, 3]


def test_rows_pass_once_in_bounded_records_when_every_diff_is_one():
    (rows,) = rows_of(updates([1, 2], [1, 1]), WANTED, shard="s1")
    assert rows.to_pydict() == {"k": [1, 2], "v": ["1", "2"]}
    many = list(records_of(rows_batch := pa.RecordBatch.from_pydict({"k": range(2 * RECORD_ROWS + 1)})))
    assert [record.num_rows for record in many] == [RECORD_ROWS, RECORD_ROWS, 1]
    assert pa.Table.from_batches(many).to_batches()[0].schema == rows_batch.schema


def test_rows_are_repeated_by_their_diff_in_bounded_records():
    records = list(rows_of(updates([1, 2, 3], [2, RECORD_ROWS, 1]), WANTED, shard="s1"))
    assert max(record.num_rows for record in records) == RECORD_ROWS
    assert len(records) == 2
    keys = pa.Table.from_batches(records).column("k").value_counts().to_pylist()
    assert {pair["values"]: pair["counts"] for pair in keys} == {1: 2, 2: RECORD_ROWS, 3: 1}


def test_a_negative_diff_is_an_error_that_names_the_row():
    with pytest.raises(InvariantViolated, match=r"shard s1 holds -2 copies of key.*7.*updates=true"):
        list(rows_of(updates([1, 7], [1, -2]), WANTED, shard="s1"))


def test_no_updates_give_no_records():
    assert list(rows_of(updates([], []), WANTED, shard="s1")) == []


def test_copies_whose_sum_exceeds_an_int64_are_still_repeated():
    first = next(rows_of(updates([1, 2, 3], [2**62, 2**62, 2**63 - 1]), WANTED, shard="s1"))
    assert first.column("k").to_pylist() == [1] * RECORD_ROWS


def test_regression_a_null_struct_with_not_null_fields_is_accepted():
    """Spark fills the fields of a null struct with nulls. A run with one such row could not be staged."""
    schema = Schema.from_ddl("id INT", "place STRUCT<x: INT NOT NULL, in: STRUCT<y: STRING NOT NULL>>")
    inner = pa.StructArray.from_arrays([pa.array([None, None, "a"])], ["y"], mask=pa.array([True, True, False]))
    columns = [pa.array([None, 1, 2], pa.int32()), inner]
    place = pa.StructArray.from_arrays(columns, ["x", "in"], mask=pa.array([True, False, False]))
    val = struct_column(pa.table({"v0": place.slice(1)}), "v", schema.val_type)
    assert (val.type, val.field(0).to_pylist()) == (schema.val_type, place.to_pylist()[1:])
    assert struct_column(pa.table({"v0": place}), "v", schema.val_type).field(0).to_pylist() == place.to_pylist()


def test_a_change_at_a_time_that_is_no_instant_of_spark_is_shown_without_one_or_refused():
    """Times in nanoseconds, or of a counter that is far on. Regression: also a query of other columns ended with an error of Arrow."""
    schema, time = Schema.from_ddl("id BIGINT", "n INT"), 1_700_000_000_000_000_000
    shown = changes_row_type(schema, shape="rows")
    changes = pa.record_batch(
        {
            "key": pa.array([{"id": 1}], schema.key_type),
            "val": pa.array([{"n": 2}], schema.val_type),
            "time": pa.array([time]),
            "change": pa.array(["insert"]),
        }
    )
    columns, whole = arrow_schema(shown), arrow_schema(feed_row_type(shown))
    (rows,) = change_rows(changes, columns, pa.schema([field for field in whole if field.name != "_commit_timestamp"]))
    assert rows.to_pylist() == [{"id": 1, "n": 2, "_change_type": "insert", "_commit_version": time}]
    with pytest.raises(InvalidUsage, match=f"a change at the time {time} has no _commit_timestamp"):
        list(change_rows(changes, columns, whole))
