"""The hash of rows in Arrow is the one that Spark computes for the same rows."""

import random
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from persist_engine import Schema
from persist_spark.columns import flat_columns
from persist_spark.envelopes.mirror import hashed
from persist_spark.envelopes.row_hash import can_hash, row_hashes
from pyspark.sql import SparkSession

KEY = "flag BOOLEAN, tiny TINYINT, small SMALLINT, four INT, eight BIGINT, day DATE, name STRING NOT NULL"
VALUE = (
    "real FLOAT, wide DOUBLE, price DECIMAL(10,2), large DECIMAL(18,0), instant TIMESTAMP, local TIMESTAMP_NTZ, bytes BINARY, "
    "place STRUCT<city: STRING, at: STRUCT<x: DOUBLE, y: DOUBLE>, day: DATE>"
)
SCHEMA = Schema.from_ddl(KEY, VALUE)
LENGTHS = [*range(40), 63, 64, 65, 95, 96, 127, 128, 1000, 5003]


def drawn(rng: random.Random, kind: pa.DataType) -> Any:
    """A value of the type, often a special one."""
    if rng.random() < 0.15:
        return None
    if pa.types.is_struct(kind):
        return {field.name: drawn(rng, field.type) for field in kind}
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_integer(kind):
        most = 1 << (kind.bit_width - 1)
        return rng.choice([0, 1, -1, most - 1, -most, rng.randrange(-most, most)])
    if pa.types.is_float32(kind):
        return (
            struct.unpack("<f", rng.randbytes(4))[0]
            if rng.random() < 0.6
            else rng.choice([0.0, -0.0, float("nan"), float("-inf")])
        )
    if pa.types.is_float64(kind):
        return (
            struct.unpack("<d", rng.randbytes(8))[0]
            if rng.random() < 0.6
            else rng.choice([0.0, -0.0, float("nan"), float("inf")])
        )
    if pa.types.is_decimal(kind):
        digits = 10**kind.precision
        return Decimal(rng.choice([0, 1, -1, digits - 1, 1 - digits, rng.randrange(-digits, digits)])).scaleb(
            -kind.scale
        )
    if pa.types.is_date(kind):
        return date(1970, 1, 1) + timedelta(days=rng.randrange(-700_000, 2_000_000))
    if pa.types.is_timestamp(kind):
        epoch = datetime(1970, 1, 1, tzinfo=UTC if kind.tz else None)
        return epoch + timedelta(microseconds=rng.randrange(-(1 << 55), 1 << 55))
    length = rng.choice(LENGTHS)
    if pa.types.is_string(kind):
        return "".join(rng.choice("aé漢😀z") for _ in range(length))[:length]
    return rng.randbytes(length)


def rows_of(seed: int, count: int) -> pa.Table:
    """Rows of SCHEMA as flat columns."""
    rng = random.Random(seed)
    sides = [
        pa.array([{f.name: drawn(rng, f.type) for f in kind} for _ in range(count)], kind)
        for kind in (SCHEMA.key_type, SCHEMA.val_type)
    ]
    return pa.table(flat_columns(*sides))


@pytest.mark.spark
@pytest.mark.parametrize(("seed", "count"), [(1, 1), (2, 7), (3, 400)])
def test_the_hashes_are_those_of_spark(local_spark: SparkSession, seed, count):
    rows = rows_of(seed, count)
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
