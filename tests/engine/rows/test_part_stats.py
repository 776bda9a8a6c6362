"""Statistics: bounds that readers skip by; unknown rather than wrong."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from persist_engine.base.errors import CorruptData
from persist_engine.model.batch import ColumnStats
from persist_engine.rows.part_stats import bound, part_stats, stats_name, stats_path
from persist_engine.rows.schema import Schema
from persist_kit.strategies import updates_table


def stats_of(ddl: str, *values: Any, bytes_max: int = 10_000) -> ColumnStats:
    schema = Schema.from_ddl(f"x {ddl}")
    table = updates_table(schema, [({"x": value}, {}, 1, 1) for value in values])
    return dict(part_stats(table, schema, bytes_max).columns)["key.x"]


@pytest.mark.parametrize(
    ("ddl", "values", "lower", "upper"),
    [
        ("BIGINT", [5, None, -(2**63)], "-9223372036854775808", "5"),
        ("BOOLEAN", [True, False], "false", "true"),
        ("DOUBLE", [1.5, -0.0, float("-inf")], '"-inf"', "1.5"),
        ("STRING", ["b", "é", ""], '""', '"\\u00e9"'),
        ("BINARY", [b"\x00", b"\xff\x01"], '"00"', '"ff01"'),
        ("DECIMAL(9,2)", [Decimal("-1.50"), Decimal("2.25")], '"-1.50"', '"2.25"'),
        ("DATE", [date(1969, 12, 31), date(1970, 1, 2)], "-1", "1"),
        ("TIMESTAMP", [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)], "1000000", "1000000"),
        ("STRUCT<a: INT>", [{"a": 1}, None], None, None),
        ("INT", [None, None], None, None),
    ],
)
def test_bounds_are_json_of_the_ends(ddl: str, values: list[Any], lower: str | None, upper: str | None) -> None:
    assert stats_of(ddl, *values) == ColumnStats(values.count(None), lower, upper)


def test_fields_within_structs_have_statistics_of_their_own() -> None:
    """A field is null where a struct around it is; no other field can have its name, whatever dots names hold."""
    schema = Schema.from_ddl("x STRUCT<a: INT, b: STRUCT<c: STRING>>, `x.a` INT")
    rows = [
        {"x": {"a": 7, "b": {"c": "u"}}},
        {"x": {"a": 5, "b": None}},
        {"x": {"a": None, "b": {"c": "w"}}},
        {"x": None},
    ]
    table = updates_table(schema, [({**row, "x.a": 9}, {}, 1, 1) for row in rows])
    stats = part_stats(table, schema, 10_000)
    assert stats.columns == (
        ("key.x", ColumnStats(1, None, None)),
        ("key.x.a", ColumnStats(0, "9", "9")),
        ('["key","x","a"]', ColumnStats(2, "5", "7")),
        ('["key","x","b"]', ColumnStats(2, None, None)),
        ('["key","x","b","c"]', ColumnStats(2, '"u"', '"w"')),
    )
    paths = [stats_path(name) for name, _ in stats.columns]
    assert paths == [("key", "x"), ("key", "x.a"), ("key", "x", "a"), ("key", "x", "b"), ("key", "x", "b", "c")]
    assert [stats_name(path) for path in paths] == [name for name, _ in stats.columns]


@pytest.mark.parametrize("name", ["[", "[]", '["key","x"]', '["key","x",1]', "{", "[" * 100_000])
def test_a_name_of_no_field_is_corrupt(name: str) -> None:
    if name.startswith("["):
        with pytest.raises(CorruptData, match="names no field"):
            stats_path(name)
    else:
        assert stats_path(name) == (name,)


def test_what_lies_within_structs_is_trimmed_before_other_values() -> None:
    schema = Schema.from_ddl("id INT", "small INT, wide STRUCT<text: STRING>")
    table = updates_table(schema, [({"id": 1}, {"small": 2, "wide": {"text": "w"}}, 7, 1)])
    whole, tight = (part_stats(table, schema, bytes_max).columns for bytes_max in (1000, 60))
    assert whole[3:] == (('["val","wide","text"]', ColumnStats(0, '"w"', '"w"')),)
    assert tight == whole[:3]


def test_nan_is_beyond_every_number_so_the_upper_bound_is_unknown() -> None:
    assert stats_of("DOUBLE", 1.0, float("nan")) == ColumnStats(0, "1.0", None)
    assert stats_of("DOUBLE", float("nan")) == ColumnStats(0, None, None)


def test_long_texts_are_cut_outwards() -> None:
    cut = stats_of("STRING", "a" * 100)
    assert cut == ColumnStats(0, '"' + "a" * 64 + '"', '"' + "a" * 63 + 'b"')
    assert stats_of("STRING", "\U0010ffff" * 100).upper is None
    before_surrogates = stats_of("STRING", "a" * 63 + "\ud7ff" * 2)
    assert before_surrogates.upper == '"' + "a" * 63 + '\\ue000"'
    assert stats_of("BINARY", b"\x01" + b"\xff" * 99).upper == '"02"'
    assert stats_of("BINARY", b"\xff" * 99).upper is None


def test_values_are_trimmed_before_keys_and_time_never() -> None:
    schema = Schema.from_ddl("id INT", "wide STRING, small INT")
    table = updates_table(schema, [({"id": 1}, {"wide": "w" * 60, "small": 2}, 7, 1)])
    roomy = dict(part_stats(table, schema, 1000).columns)
    assert all(stats.lower is not None for stats in roomy.values())
    tight = dict(part_stats(table, schema, 60).columns)
    assert tight["val.wide"] == ColumnStats(0, None, None)
    assert tight["key.id"] == ColumnStats(0, "1", "1")
    none = part_stats(table, schema, 0)
    assert none.columns == ()
    assert (none.time_min, none.time_max) == (7, 7)


def test_a_text_that_is_no_bound_is_corrupt() -> None:
    int_type, decimal_type = Schema.from_ddl("a INT, d DECIMAL(5,2)").key.types
    for text, kind in (("nonsense", int_type), ('"x"', int_type), ('"1.2.3"', decimal_type), ("[]", decimal_type)):
        with pytest.raises(CorruptData, match="no bound"):
            bound(text, kind)
