"""Keys as bytes that sort in row order. `key_lower` of a part bounds all its keys from below without opening the part.

Fields follow one another as `columns.flatten_columns` lays them out. Each is 0x01 and the value, or 0x02 for null
(nulls last). Integers, dates, times and decimals are offset binary, big-endian. Floats use the IEEE total order with
one zero and NaN last. Strings and bytes end with 00 00; a zero byte within is written as 00 FF. A prefix of these bytes
is a lower bound of every key that begins with it, and b"" is a lower bound of every key.
"""

from __future__ import annotations

import decimal
import math
import struct
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import flatten_columns
from persist_engine.rows.sorting import order_indices

#: Bounds in state are truncated to this many bytes (spec 10.2).
KEY_LOWER_BYTES_MAX = 100

_VALUE, _NULL = b"\x01", b"\x02"


def key_lower(table: pa.Table) -> bytes:
    """A lower bound of the keys of all rows: the bytes of the least key, truncated. b"" for a table without rows. Rows
    may be in any order.
    """
    if table.num_rows == 0:
        return b""
    columns = flatten_columns(table, ("key",))
    least = int(_least(columns, table.num_rows))
    return _encoded(columns, least)[:KEY_LOWER_BYTES_MAX]


def key_bytes(table: pa.Table, row: int) -> bytes:
    """The whole key of one row as bytes, which compare as the keys of rows do."""
    return _encoded(flatten_columns(table.slice(row, 1), ("key",)), 0)


def _least(columns: list[pa.ChunkedArray], rows: int) -> int:
    if len(columns) == 1 and not pa.types.is_floating(columns[0].type) and columns[0].null_count == 0:
        return int(pc.index(columns[0], pc.min(columns[0])).as_py())
    return int(order_indices(columns, rows)[0])


def _encoded(columns: list[pa.ChunkedArray], row: int) -> bytes:
    return b"".join(_encoded_scalar(column[row]) for column in columns)


def _encoded_scalar(scalar: pa.Scalar) -> bytes:
    if not scalar.is_valid:
        return _NULL
    data_type = scalar.type
    if pa.types.is_boolean(data_type):
        return _VALUE + (b"\x01" if scalar.as_py() else b"\x00")
    if pa.types.is_floating(data_type):
        return _VALUE + _ordered_float(float(scalar.as_py()))
    if pa.types.is_string(data_type):
        return _VALUE + _ordered_bytes(scalar.as_py().encode())
    if pa.types.is_binary(data_type):
        return _VALUE + _ordered_bytes(scalar.as_py())
    if pa.types.is_decimal(data_type):
        return _VALUE + _ordered_int(_unscaled(scalar.as_py(), data_type.scale), 16)
    if pa.types.is_date32(data_type):
        return _VALUE + _ordered_int(scalar.value, 4)
    if pa.types.is_timestamp(data_type):
        return _VALUE + _ordered_int(scalar.value, 8)
    return _VALUE + _ordered_int(scalar.as_py(), data_type.bit_width // 8)


def _unscaled(value: decimal.Decimal, scale: int) -> int:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int), "Arrow decimals are finite"
    whole = int("".join(map(str, digits))) * int(10 ** (scale + exponent))
    return -whole if sign else whole


def _ordered_int(value: int, width: int) -> bytes:
    offset: int = 2 ** (8 * width - 1)
    return (value + offset).to_bytes(width, "big")


def _ordered_float(value: float) -> bytes:
    if math.isnan(value):
        return b"\xff" * 8
    bits = int.from_bytes(struct.pack(">d", value), "big")
    return (bits ^ ((1 << 64) - 1 if bits >> 63 else 1 << 63)).to_bytes(8, "big")


def _ordered_bytes(raw: Any) -> bytes:
    return bytes(raw).replace(b"\x00", b"\x00\xff") + b"\x00\x00"
