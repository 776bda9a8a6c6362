"""Computes the aggregates that Spark requests from a scan, as JSON, from facts that the engine knows about all rows. Pure.

An aggregate arrives as a list: `["count"]`, or with a column `["count", COLUMN]` (counts values that are not null), `["min", COLUMN]` and
`["max", COLUMN]`. A value is returned in the form that `Aggregates.java` reads: a number or a boolean unchanged, a date in days, an instant
in microseconds, a decimal and a float as text, and no value as null.
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
    """The name of a column with its side. A shard that is read as a table has no field name on both sides."""
    return f"{'key' if column in schema.key.names else 'val'}.{column}"


def fields(asked: Asked, schema: Schema) -> list[str]:
    """The fields of the columns that the aggregates name."""
    return list(dict.fromkeys(sided(column, schema) for _, *columns in asked for column in columns))


def values(found: Aggregates, asked: Asked, schema: Schema) -> list[Any] | None:
    """The value of each aggregate. None when one of them is unknown."""
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
