"""The hash of rows in Arrow is the one that Spark computes for the same rows."""

import pytest
from all_types import SCHEMA, rows_of_all_types
from persist_engine import Schema
from persist_spark.envelopes.mirror import hashed
from persist_spark.envelopes.row_hash import can_hash, row_hashes
from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize(("seed", "count"), [(1, 1), (2, 7), (3, 400)])
def test_the_hashes_are_those_of_spark(local_spark: SparkSession, seed, count):
    rows = rows_of_all_types(seed, count)
    frame = hashed(local_spark.createDataFrame(rows), SCHEMA)
    theirs = frame.select("h").toArrow().column("h").to_pylist()
    cut = count // 3
    for piece in (rows.slice(0, cut), rows.slice(cut)):  # slices have an offset into their buffers
        columns = [column.combine_chunks() if column.num_chunks != 1 else column.chunk(0) for column in piece.columns]
        ours = row_hashes(columns).tolist()
        assert ours == theirs[: len(ours)]
        theirs = theirs[len(ours) :]
    assert theirs == []


def test_the_types_without_such_a_hash():
    assert can_hash(SCHEMA)
    for other in ("ARRAY<INT>", "MAP<STRING, INT>", "DECIMAL(19,2)", "STRUCT<a: STRUCT<b: ARRAY<INT>>>"):
        assert not can_hash(Schema.from_ddl("k INT", f"v {other}")), other
