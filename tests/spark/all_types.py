"""Random rows of all types that `row_hash` knows."""

import random
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
from persist_engine import Schema
from persist_spark.columns import flat_columns

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


def rows_of_all_types(seed: int, count: int) -> pa.Table:
    """Rows of SCHEMA as flat columns."""
    rng = random.Random(seed)
    sides = [
        pa.array([{f.name: drawn(rng, f.type) for f in kind} for _ in range(count)], kind)
        for kind in (SCHEMA.key_type, SCHEMA.val_type)
    ]
    return pa.table(flat_columns(*sides))
