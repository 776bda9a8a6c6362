"""Laws of filters: statistics never deny what a part holds, rows pass exactly as three-valued logic says, and parts may be
skipped before consolidation.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.batch import HollowPart
from persist_engine.rows import updates
from persist_engine.rows.comparable import comparable_bound, scalar_of
from persist_engine.rows.filter import Filter
from persist_engine.rows.part_stats import part_stats, stats_name
from persist_engine.rows.predicate import And, Compare, In, IsNull, Like, Not, Or, Predicate, from_json, to_json
from persist_engine.rows.schema import Schema
from persist_kit.depth import draws
from persist_kit.strategies import schemas, updates_table
from persist_kit.strategies import updates as updates_of

OPS = ["=", "!=", "<", "<=", ">", ">="]


def leaves(schema: Schema) -> list[tuple[tuple[str, ...], pa.DataType]]:
    """Every field, at any depth."""
    found: list[tuple[tuple[str, ...], pa.DataType]] = []

    def walk(path: tuple[str, ...], fields: Any) -> None:
        for field in fields:
            found.append(((*path, field.name), field.type))
            if pa.types.is_struct(field.type):
                walk((*path, field.name), field.type)

    walk(("key",), schema.key)
    walk(("val",), schema.val)
    return found


def value_at(row: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = row
    for name in path:
        value = None if value is None else value[name]
    return value


def near(value: Any) -> list[Any]:
    """`value` and some beside it."""
    match value:
        case bool():
            return [value]
        case int():
            return [value, value - 1, value + 1, value + 0.5, Decimal(value) - Decimal("0.25"), 10**40, -(10**40)]
        case float():
            beside = [] if math.isnan(value) else [math.nextafter(value, math.inf), math.nextafter(value, -math.inf)]
            return [value, math.nan, math.inf, *beside]
        case Decimal():
            return [value, value + Decimal("0.001"), value - 1, int(value), Decimal("1e50"), float("inf")]
        case str():
            return [value, value + "\x00", value[:-1], "\U0010ffff" * 70]
        case bytes():
            return [value, value + b"\x00", value[:-1], b"\xff" * 70]
    return [value]


def columns_of(schema: Schema) -> list[tuple[str, tuple[str, ...], pa.DataType]]:
    """Fields that a text names without doubt."""
    named: dict[str, list[Any]] = {}
    for path, data_type in leaves(schema):
        named.setdefault(".".join(path), []).append((path, data_type))
    return [(text, *some[0]) for text, some in named.items() if len(some) == 1]


@st.composite
def predicates(draw: st.DrawFn, schema: Schema, rows: list[dict[str, Any]], depth: int = 2) -> Predicate:
    """Predicates whose values are those of the rows, or lie beside them."""
    if depth and draw(st.booleans()):
        terms = tuple(draw(predicates(schema, rows, depth - 1)) for _ in range(draw(st.integers(1, 3))))
        return draw(st.sampled_from([And(terms), Or(terms), Not(terms[0])]))
    text, path, data_type = draw(st.sampled_from(columns_of(schema)))
    values = [value for row in rows if (value := value_at(row, path)) is not None]
    if pa.types.is_nested(data_type) or not values or draw(st.integers(0, 4)) == 0:
        return IsNull(text)
    if pa.types.is_string(data_type) and draw(st.booleans()):
        return Like(text, pattern_near(draw, draw(st.sampled_from(values))))
    pool = [literal for value in values for literal in near(value)]
    if draw(st.booleans()):
        return In(text, tuple(draw(st.lists(st.sampled_from(pool), max_size=4))))
    return Compare(text, draw(st.sampled_from(OPS)), draw(st.sampled_from(pool)))


def pattern_near(draw: st.DrawFn, text: str) -> str:
    """A pattern of LIKE that `text` has, or nearly has."""
    kinds = draw(st.lists(st.sampled_from("=_%x"), min_size=len(text), max_size=len(text) + 1))
    pieces = [
        {"=": f"\\{one}" if one in "%_\\" else one, "x": "x"}.get(kind, kind)
        for one, kind in zip([*text, "%"], kinds, strict=False)
    ]
    return "".join(pieces) + draw(st.sampled_from(["", "%"]))


def is_like(text: str, pattern: str) -> bool:
    """By the dynamic programme of SQL's definition."""
    tokens = re.findall(r"\\.|.", pattern, re.DOTALL)
    reached = {0}
    for token in tokens:
        if token == "%":
            reached = {at for start in reached for at in range(start, len(text) + 1)}
        else:
            reached = {at + 1 for at in reached if at < len(text) and token in ("_", text[at], "\\" + text[at])}
    return len(text) in reached


TEXTS_OF_WILDCARDS = st.text(st.sampled_from("%_\\ab\n.$ é\x00"), max_size=6)


@given(st.lists(TEXTS_OF_WILDCARDS, min_size=1, max_size=4), st.data())
def test_texts_of_wildcards_backslashes_and_line_ends_have_exactly_the_forms_of_sql(
    texts: list[str], data: st.DataObject
) -> None:
    schema = Schema.from_ddl("id BIGINT", "name STRING")
    rows = [{"key": {"id": 1}, "val": {"name": text}, "time": 0, "diff": 1} for text in texts]
    table = pa.Table.from_pylist(rows, schema.updates_schema)
    for text in texts:
        escaped = re.sub(r"([%_\\])", r"\\\1", text)
        near = pattern_near(data.draw, text)
        for pattern in (near, f"{escaped}%", f"%{escaped}", f"%{escaped}%", f"%{near}%"):
            passed = Filter(Like("name", pattern), schema).apply(table)
            want = [one for one in texts if is_like(one, pattern)]
            assert [row["val"]["name"] for row in passed.to_pylist()] == want, pattern


def order(value: Any) -> Any:
    """As rows are ordered: NaN past all numbers, one zero."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value


def compared(value: Any, op: str, literal: Any) -> bool:
    """Two values by mathematics: exact, whatever their types."""
    if isinstance(value, float):
        literal = float(literal)
    elif isinstance(value, int | Decimal) and not isinstance(value, bool):
        value = Decimal(value)
        literal = Decimal(repr(literal)) if isinstance(literal, float) else Decimal(literal)
    one, other = order(value), order(literal)
    return {"=": one == other, "!=": one != other, "<": one < other, "<=": one <= other, ">": one > other}.get(
        op, one >= other
    )


def truth(predicate: Predicate, row: dict[str, Any], paths: dict[str, tuple[str, ...]]) -> bool | None:
    """SQL's answer, by the book."""
    match predicate:
        case Compare(column, op, literal):
            value = value_at(row, paths[column])
            return None if value is None else compared(value, op, literal)
        case In(column, values):
            value = value_at(row, paths[column])
            return None if value is None else any(compared(value, "=", literal) for literal in values)
        case Like(column, pattern):
            value = value_at(row, paths[column])
            return None if value is None else is_like(value, pattern)
        case IsNull(column):
            return value_at(row, paths[column]) is None
        case Not(term):
            inner = truth(term, row, paths)
            return None if inner is None else not inner
        case And(terms):
            some = [truth(term, row, paths) for term in terms]
            return False if False in some else None if None in some else True
        case Or(terms):
            some = [truth(term, row, paths) for term in terms]
            return True if True in some else None if None in some else False


@st.composite
def filtered(draw: st.DrawFn) -> tuple[Schema, pa.Table, Filter]:
    schema = draw(schemas().filter(lambda each: bool(columns_of(each))))
    table = draw(updates_of(schema))
    predicate = draw(predicates(schema, table.to_pylist()))
    return schema, table, Filter(predicate, schema)


def part_of(table: pa.Table, schema: Schema, bytes_max: int) -> HollowPart:
    stats = part_stats(table, schema, bytes_max)
    return HollowPart("n0000100/p", 100, table.num_rows, None, "crc32:0", stats=stats)


@pytest.mark.slow
@given(filtered(), st.sampled_from([0, 40, 100_000]))
@settings(max_examples=draws(25), deadline=None)
def test_rows_pass_as_logic_says_and_statistics_never_deny_them(
    case: tuple[Schema, pa.Table, Filter], bytes_max: int
) -> None:
    """Spec 15.12."""
    schema, table, filter_ = case
    paths = {text: path for text, path, _ in columns_of(schema)}
    rows = [_python(table, at) for at in range(table.num_rows)]
    expected = [truth(filter_.predicate, row, paths) is True for row in rows]
    assert filter_.mask(table).to_pylist() == expected
    assert filter_.apply(table).num_rows == sum(expected)
    if table.num_rows:
        part = part_of(table, schema, bytes_max)
        assert filter_.may_pass(part) or not any(expected)
        assert not filter_.must_pass(part) or all(expected)
        assert filter_.outside(table, part) == []


@pytest.mark.parametrize(
    ("values", "pattern", "may", "must"),
    [
        (["ab", "ac"], "a%", True, True),
        (["ab", "b"], "a%", True, False),
        (["ab", None], "a%", True, False),
        (["abx", "aby"], "ab_", True, False),
        (["b", "c"], "a%", False, False),
        (["a", "aa"], "ab%", False, False),
        (["aa", "b"], "ab%", True, False),
        (["ac", "b"], "ab%", False, False),
        (["ab", "ab"], "ab", True, True),
        (["a%", "a%b"], r"a\%%", True, True),
        (["x", "y"], "%x", True, False),
        (["x", "y"], "%", True, True),
        ([None, None], "%", False, False),
    ],
)
def test_statistics_of_texts_decide_what_has_a_form(
    values: list[str | None], pattern: str, may: bool, must: bool
) -> None:
    schema = Schema.from_ddl("id BIGINT", "name STRING")
    rows = [{"key": {"id": 1}, "val": {"name": name}, "time": 0, "diff": 1} for name in values]
    part = part_of(pa.Table.from_pylist(rows, schema.updates_schema), schema, 1000)
    filter_ = Filter(Like("name", pattern), schema)
    assert (filter_.may_pass(part), filter_.must_pass(part)) == (may, must)


def _python(table: pa.Table, at: int) -> dict[str, Any]:
    return {side: _plain(table.column(side)[at]) for side in ("key", "val")}


def _plain(scalar: pa.Scalar) -> Any:
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(scalar.type):
        return {field.name: _plain(scalar[at]) for at, field in enumerate(scalar.type)}
    return scalar.as_py()


@pytest.mark.slow
@given(filtered(), st.lists(st.integers(0, 12), max_size=3))
@settings(max_examples=draws(15), deadline=None)
def test_skipping_parts_before_consolidation_is_filtering_after_it(
    case: tuple[Schema, pa.Table, Filter], cuts: list[int]
) -> None:
    """Equal (key, val) pass together, so parts and rows may be dropped before diffs are added."""
    schema, table, filter_ = case
    bounds = [0, *sorted(min(cut, table.num_rows) for cut in cuts), table.num_rows]
    pieces = [table.slice(low, high - low) for low, high in zip(bounds, bounds[1:], strict=False) if high > low]
    parts = [(piece, part_of(updates.consolidate(piece), schema, 100_000)) for piece in pieces]
    kept = [filter_.apply(updates.consolidate(piece)) for piece, part in parts if filter_.may_pass(part)]
    before = updates.consolidate(pa.concat_tables([table.slice(0, 0), *kept]))
    after = filter_.apply(updates.consolidate(table))
    assert str(before.to_pylist()) == str(after.to_pylist())


@pytest.mark.slow
@given(filtered())
@settings(max_examples=draws(20), deadline=None)
def test_a_predicate_survives_the_way_to_another_process(case: tuple[Schema, pa.Table, Filter]) -> None:
    schema, table, filter_ = case
    again = Filter(from_json(to_json(filter_.predicate)), schema)
    assert again.mask(table) == filter_.mask(table)
    assert again.columns == filter_.columns


@pytest.mark.slow
@given(st.data())
@settings(max_examples=draws(30), deadline=None)
def test_bounds_in_statistics_hold_every_value_in_comparable_form_and_as_scalars(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    table = data.draw(updates_of(schema))
    if not table.num_rows:
        return
    known = dict(part_stats(table, schema, 100_000).columns)
    assert len(known) == len(leaves(schema))
    for path, data_type in leaves(schema):
        stats = known[stats_name(path)]
        rows = [_python(table, at) for at in range(table.num_rows)]
        assert stats.null_count == [value_at(row, path) for row in rows].count(None)
        if stats.lower is None:
            continue
        lower = comparable_bound(stats.lower, data_type)
        assert scalar_of(lower, data_type).is_valid
        if len(columns_of(schema)) == len(leaves(schema)):
            below = Filter(Compare(".".join(path), "<", _literal(lower, data_type)), schema)
            assert below.apply(table).num_rows == 0


def _literal(value: Any, data_type: pa.DataType) -> Any:
    if pa.types.is_floating(data_type):
        return value[1]
    scalar = scalar_of(value, data_type)
    return scalar.as_py()


def test_a_column_that_every_filter_names_keeps_its_bounds_when_others_are_trimmed() -> None:
    schema = Schema.from_ddl("id STRING", "updated_at BIGINT, ts INT, last_seen INT, text STRING, `time` INT, rate INT")
    row = {"updated_at": 1, "ts": 2, "last_seen": 3, "text": "x" * 60, "time": 4, "rate": 5}
    table = updates_table(schema, [({"id": "y" * 60}, row, 1, 1)])
    known = dict(part_stats(table, schema, 100).columns)
    kept = {name for name, stats in known.items() if stats.lower is not None}
    assert {"val.updated_at", "val.ts", "val.last_seen", "val.time"} <= kept
    assert "val.text" not in kept


def test_even_those_columns_are_trimmed_past_their_own_limit() -> None:
    schema = Schema.from_ddl("id INT", ", ".join(f"c{at}_at STRING" for at in range(500)))
    table = updates_table(schema, [({"id": 1}, {f"c{at}_at": "é" * 60 for at in range(500)}, 1, 1)])
    stats = part_stats(table, schema, 1024)
    assert sum(len(each.lower or "") + len(each.upper or "") for _, each in stats.columns) < 20_000


@pytest.mark.parametrize("bad", [None, [1], object(), {"a": 1}])
def test_a_value_of_no_type_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidUsage, match="key.id"):
        Filter(Compare("id", "=", bad), Schema.from_ddl("id INT"))


def test_statistics_of_code_that_knew_no_nested_fields_still_count_the_nulls_of_the_struct_around_them() -> None:
    schema = Schema.from_ddl("id INT", "p STRUCT<x: INT>")
    for values, nulls in (([{"x": 1}, {"x": None}], False), ([None, None], True)):
        table = updates_table(schema, [({"id": 1}, {"p": value}, 1, 1) for value in values])
        part = part_of(table, schema, 1000)
        assert part.stats is not None
        tops = tuple(column for column in part.stats.columns if not column[0].startswith("["))
        old = replace(part, stats=replace(part.stats, columns=tops))
        assert not Filter(Compare("p.x", ">", 1), schema).may_pass(part)
        assert Filter(Compare("p.x", ">", 1), schema).may_pass(old) is not nulls
        is_null = Filter(IsNull("p.x"), schema)
        assert is_null.may_pass(old)
        assert is_null.must_pass(old) is is_null.must_pass(part) is nulls
        assert is_null.outside(table, old) == is_null.outside(table, part) == []


@pytest.mark.parametrize("values", [[5, 7], [6], [5, None], [None]])
def test_at_the_bounds_statistics_say_exactly_what_whole_numbers_are(values: list[int | None]) -> None:
    """Where a part's rows are its bounds, what statistics allow is what there is: neither more nor less."""
    schema = Schema.from_ddl("id INT")
    table = updates_table(schema, [({"id": value}, {}, 1, 1) for value in values])
    part = part_of(table, schema, 1000)
    for literal in (4, 5, 5.5, 6, 7, 8):
        for op in OPS:
            filter_ = Filter(Compare("id", op, literal), schema)  # type: ignore[arg-type]  # one of its words
            passes = filter_.mask(table).to_pylist()
            if op not in ("=", "!=") or len(set(values)) == 1:
                assert filter_.may_pass(part) == any(passes), (op, literal)
            assert filter_.may_pass(part) or not any(passes), (op, literal)
            assert not filter_.must_pass(part) or all(passes), (op, literal)


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
@pytest.mark.parametrize("wanted", [(-0.0, 1.0), (0.0, 1.0), (-0.0,), (-0.0, math.nan)])
def test_zeros_of_either_sign_are_one_value_of_a_list(kind: str, wanted: tuple[float, ...]) -> None:
    schema = Schema.from_ddl(f"id {kind}")
    table = updates_table(schema, [({"id": value}, {}, 1, 1) for value in (-0.0, 0.0, 2.0)])
    assert Filter(In("key.id", wanted), schema).mask(table).to_pylist() == [True, True, False]
