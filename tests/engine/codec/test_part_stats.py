"""Statistics: bounds that readers skip by; unknown rather than wrong."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from persist_engine.base.errors import CorruptData
from persist_engine.codec.part_stats import bound, part_stats
from persist_engine.codec.schema import Schema
from persist_engine.model.batch import ColumnStats
from persist_engine.testing.strategies import updates_table


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
