"""Aggregates that Spark asks of a scan, as JSON, from what the engine knows of all rows. Pure.

An aggregate arrives as a list: `["count"]`, and with a column `["count", COLUMN]` (of values that are not null), `["min", COLUMN]` and
`["max", COLUMN]`. A value leaves as `Aggregates.java` reads it: a number or a truth as it is, a date in days, an instant in microseconds, a
decimal and a float as text, and no value as null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from persist_engine.rows.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa
    from persist_engine import Aggregates

Asked = Sequence[Sequence[str]]


def sided(column: str, schema: Schema) -> str:
    """The name of a column with its side. A shard read as a table has no field name in both."""
    return f"{'key' if column in schema.key.names else 'val'}.{column}"


def fields(asked: Asked, schema: Schema) -> list[str]:
    """The fields of the columns that the aggregates name."""
    return list(dict.fromkeys(sided(column, schema) for _, *columns in asked for column in columns))


def values(found: Aggregates, asked: Asked, schema: Schema) -> list[Any] | None:
    """The value of each aggregate. None when one of them is not known."""
    answers = []
    for what, *columns in asked:
        if not columns:
            answers.append(found.rows)
            continue
        field = found.fields[sided(columns[0], schema)]
        if what == "count":
            if field.nulls is None:
                return None
            answers.append(found.rows - field.nulls)
            continue
        value = {"min": field.least, "max": field.greatest}[what]
        if value is None:
            return None
        answers.append(_as_json(value))
    return answers


def _as_json(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    if hasattr(value, "value"):  # a date or an instant
        return value.value
    plain = value.as_py()
    return plain if isinstance(plain, bool | int) else str(plain)
