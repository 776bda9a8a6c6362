"""Laws of updates at their edges; the properties are in tests/properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from persist_engine.base.errors import InvariantViolated
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.parts.pieces import consolidate_pieces
from persist_engine.rows import updates as laws
from persist_engine.rows.columns import canonical_floats, constant
from persist_engine.rows.schema import Schema
from persist_kit.strategies import updates_table

NAN = float("nan")
NUMBERS = Schema.from_ddl("x DOUBLE")
GREATEST = 2**63 - 1


def numbers(*rows: tuple[Any, int, int]) -> pa.Table:
    return updates_table(NUMBERS, [({"x": x}, {}, time, diff) for x, time, diff in rows])


def summed(*diffs: int) -> list[int]:
    return [
        int(each) for each in laws.consolidate(numbers(*((1.0, 0, diff) for diff in diffs))).column("diff").to_pylist()
    ]


def test_order_is_numbers_then_nan_then_null_then_time() -> None:
    rows = numbers((None, 0, 1), (NAN, 0, 1), (float("inf"), 1, 1), (1.0, 2, 1), (1.0, 1, 1), (-1.0, 5, 1))
    ordered = [(row["key"]["x"], row["time"]) for row in laws.sort(rows).to_pylist()]
    assert repr(ordered) == "[(-1.0, 5), (1.0, 1), (1.0, 2), (inf, 1), (nan, 0), (None, 0)]"


def test_a_collection_knows_one_zero_and_one_nan() -> None:
    """Spec 26.2."""
    out = laws.consolidate(numbers((-0.0, 0, 1), (0.0, 0, 1), (NAN, 0, 1), (-NAN, 0, -1), (-0.0, 1, 1)))
    assert (
        repr([(row["key"]["x"], row["time"], row["diff"]) for row in out.to_pylist()]) == "[(0.0, 0, 2), (0.0, 1, 1)]"
    )


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("stray", [-0.0, -NAN], ids=["zero", "nan"])
def test_one_stray_float_is_found_and_a_column_without_one_is_not_copied(stray: float, kind: pa.DataType) -> None:
    def column(*values: float) -> pa.ChunkedArray:
        return pa.chunked_array([[1.0], np.array(values, kind.to_pandas_dtype())], kind)

    out = canonical_floats(column(2.0, stray)).combine_chunks()
    bits = pa.int64() if kind == pa.float64() else pa.int32()
    assert out.view(bits) == pa.array([1.0, 2.0, abs(stray)], kind).view(bits)
    plain = column(2.0, 0.0)
    assert canonical_floats(plain) is plain


def test_sorting_keeps_the_sign_of_zero() -> None:
    assert repr(laws.sort(numbers((1.0, 0, 1), (-0.0, 0, 1))).to_pylist()[0]["key"]["x"]) == "-0.0"


def test_a_null_struct_is_not_a_struct_of_nulls() -> None:
    schema = Schema.from_ddl("s STRUCT<a: INT, b: INT>")
    rows = [({"s": None}, {}, 0, 1), ({"s": {"a": None, "b": None}}, {}, 0, 1), ({"s": {"a": None, "b": 1}}, {}, 0, 1)]
    out = laws.consolidate(updates_table(schema, rows)).to_pylist()
    assert [row["key"]["s"] for row in out] == [{"a": None, "b": 1}, {"a": None, "b": None}, None]


def test_sums_are_exact_up_to_the_ends_of_int64() -> None:
    assert summed(GREATEST, GREATEST, -GREATEST, -GREATEST) == []
    assert summed(GREATEST, GREATEST, -GREATEST) == [GREATEST]
    assert summed(-GREATEST - 1, 5, -5) == [-GREATEST - 1]
    assert summed(-1, -GREATEST) == [-GREATEST - 1]


@pytest.mark.parametrize("diffs", [(GREATEST, 1), (-GREATEST - 1, -1), (GREATEST, GREATEST, 2), (GREATEST, GREATEST)])
def test_a_sum_beyond_int64_is_an_error_never_a_wrap(diffs: tuple[int, ...]) -> None:
    with pytest.raises(InvariantViolated, match="int64"):
        summed(*diffs)


def test_diffs_of_all_rows_add_up_to_whatever_they_do() -> None:
    for rows in (2, 100_000):
        table = pa.concat_tables([numbers((1.0, 0, GREATEST), (2.0, 0, -GREATEST - 1))] * (rows // 2))
        assert laws.diffs_sum(table) == laws.wrapped_diffs_sum(table) == -rows // 2
        table = pa.concat_tables([numbers((1.0, 0, GREATEST), (2.0, 0, GREATEST))] * (rows // 2))
        assert laws.diffs_sum(table) == rows * GREATEST
        assert laws.wrapped_diffs_sum(table) == -rows
        table = pa.concat_tables([numbers((1.0, 0, -GREATEST - 1))] * rows)
        assert laws.diffs_sum(table) == rows * (-GREATEST - 1)


def test_large_diffs_of_different_rows_do_not_add_up() -> None:
    out = laws.consolidate(numbers((1.0, 0, GREATEST), (2.0, 0, GREATEST), (2.0, 0, -1)))
    assert out.column("diff").to_pylist() == [GREATEST, GREATEST - 1]


def test_what_is_consolidated_is_returned_as_it_is() -> None:
    table = updates_table(Schema.from_ddl("id INT"), [({"id": at}, {}, 0, 1) for at in (None, 1, 2)][1:])
    assert laws.consolidate(table) is table
    assert laws.sort(table) is table
    assert laws.time_filter(table, Antichain(0), Antichain(1)) is table
    assert laws.advance_times(table, Antichain(0)) is table


def test_chunks_and_slices_do_not_matter() -> None:
    schema = Schema.from_ddl("id INT, s STRUCT<a: STRING>", "v DOUBLE")
    rows = [
        ({"id": at % 7, "s": {"a": str(at % 3)} if at % 5 else None}, {"v": at % 2 - 0.0}, at % 4, 1)
        for at in range(200)
    ]
    whole = updates_table(schema, rows)
    pieces = pa.concat_tables([whole.slice(0, 3), whole.slice(3, 0), whole.slice(3, 77), whole.slice(80)])
    assert pieces.column("key").num_chunks > 1
    assert laws.consolidate(pieces).equals(laws.consolidate(whole))


@pytest.mark.parametrize(
    "ddl", ["id INT, s STRUCT<a: STRING, t: STRUCT<b: INT>>", "id INT, s STRUCT<a: STRING NOT NULL> NOT NULL"]
)
def test_what_is_picked_from_a_slice_of_structs_is_the_rows(ddl: str) -> None:
    schema = Schema.from_ddl(ddl, "")
    is_nullable = "NOT" not in ddl

    def value(at: int) -> dict[str, Any] | None:
        inner = {"t": {"b": at} if at % 3 else None} if is_nullable else {}
        return {"a": f"text {at}"} | inner if at % 5 or not is_nullable else None

    rows = [({"id": 1000 - at, "s": value(at)}, {}, 3, at + 1) for at in range(400)]
    piece = updates_table(schema, rows).combine_chunks().slice(100, 250)
    assert laws.sort(piece).to_pylist() == piece.to_pylist()[::-1]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()], ids=str)
@pytest.mark.parametrize("odd", [None, "null", "null with bytes", "shorter", "longer", "two as long together"])
@pytest.mark.parametrize("width", [0, 1, 9])
def test_texts_of_one_width_are_picked_as_any_texts_are(kind: pa.DataType, odd: str | None, width: int) -> None:
    """In any order, some several times, from a slice whose bytes begin anywhere."""
    rng = np.random.default_rng(width)
    letters = np.array([b"\xc3\xa9", b"\xce\xb1", b"\xd0\xb6"])
    texts: list[bytes | None] = [b"".join(rng.choice(letters, width)) for _ in range(6000)]
    match odd:
        case "null" | "null with bytes":
            texts[2000] = None
        case "shorter":
            texts[2000] = b""
        case "longer":
            texts[2000] = bytes(2 * width + 1)
        case "two as long together":
            texts[2000:2002] = [b"", bytes(2 * 2 * width)]
    column = pa.array([b"\xc3\xa9", *texts], pa.binary()).cast(kind)
    if odd == "null with bytes":
        there = [b"\xc3\xa9" * width if text is None else text for text in texts]
        below = pa.array([b"\xc3\xa9", *there], pa.binary()).buffers()[1:]
        column = pa.Array.from_buffers(kind, len(column), [column.buffers()[0], *below])
    column = column.slice(1)
    nested = pa.StructArray.from_arrays([column], names=["t"])
    picked = rng.integers(0, len(texts), 9000)
    out = laws.rows_at(pa.table({"key": nested, "t": column}), picked)
    out.validate(full=True)
    assert out.column("t").cast(pa.binary()).to_pylist() == [texts[at] for at in picked]
    assert out.column("key").combine_chunks().field("t").equals(out.column("t").combine_chunks())
    assert not laws.rows_at(out, picked[:0]).num_rows


def test_empty_tables_stay_empty() -> None:
    table = numbers()
    assert laws.consolidate(table).num_rows == laws.sort(table).num_rows == laws.diffs_sum(table) == 0
    assert laws.time_filter(table, Antichain(0), Antichain(None)).num_rows == 0
    assert laws.advance_times(table, Antichain(5)).num_rows == 0


def test_times_at_the_end_of_int64() -> None:
    table = numbers((1.0, DATA_TIME_MAX, 1), (1.0, 0, 1))
    assert laws.time_filter(table, Antichain(DATA_TIME_MAX), Antichain(DATA_TIME_MAX + 1)).num_rows == 1
    assert laws.time_filter(table, Antichain(0), Antichain(DATA_TIME_MAX)).num_rows == 1
    assert laws.time_filter(table, Antichain(DATA_TIME_MAX + 1), Antichain(None)).num_rows == 0
    assert laws.time_filter(table, Antichain(0), Antichain(0)).num_rows == 0
    assert laws.advance_times(table, Antichain(2**64 - 1)).column("time").to_pylist() == [DATA_TIME_MAX, DATA_TIME_MAX]


def test_columns_of_one_value_share_memory_unless_they_are_large() -> None:
    few, more, all_there_is = (constant(7, rows) for rows in (0, 1000, 1024))
    assert (few.to_pylist(), set(more.to_pylist()), len(all_there_is)) == ([], {7}, 1024)
    assert more.buffers()[1].address == all_there_is.buffers()[1].address
    large = [constant(7, (1 << 18) + 1) for _ in range(2)]
    assert len({each.buffers()[1].address for each in large}) == 2
    assert all(len(each) == (1 << 18) + 1 and each[-1].as_py() == 7 for each in large)


def test_runs_put_together_are_consolidated_as_any_rows_are() -> None:
    runs = [
        laws.consolidate(numbers(*((float(x % m), 3, d) for x in range(300)))) for m, d in ((7, 1), (5, -1), (9, 2))
    ]
    table = pa.concat_tables(runs * 20)
    assert consolidate_pieces(runs * 20).equals(laws.consolidate(table))
    assert table.num_rows > 128  # fewer are not sorted by words


@pytest.mark.parametrize("rows", [2, 300])
def test_wrapped_sums_wrap_as_int64_does_of_few_rows_and_of_many(rows: int) -> None:
    most = 2**63 - 1
    zeros = [(float(at), 0, 0) for at in range(rows - 2)]
    for diffs, total in [((most, 1), -(2**63)), ((-(2**63), -1), most), ((most, most), -2), ((-3, 5), 2)]:
        table = numbers(*zeros, *((0.5, at, diff) for at, diff in enumerate(diffs)))
        assert laws.wrapped_diffs_sum(table) == total
