"""Conditions on rows in the forms that callers have: SQL, tuples, predicates of the engine, and expressions of pyarrow.

The first three become a predicate, which also decides which parts are read. An expression of pyarrow is evaluated by pyarrow, on every row
that is read: its meaning is pyarrow's own, and it skips no parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.predicate import And, Compare, In, IsNull, Like, Not, Or, Predicate
from persist_engine.rows.predicate_text import filter_of
from persist_engine.table.columns import Columns

Where: TypeAlias = str | Predicate | Sequence[Any] | pc.Expression
"""A condition: SQL such as `price > 10 AND name IN ('a', 'b')`; tuples such as `[("price", ">", 10)]`, all of which must hold, or a list of
such lists, at least one of which must hold; an expression such as `pyarrow.compute.field("price") > 10`; a predicate of the engine."""

_ALLOWED = "SQL text, a list of (column, operator, value), or an expression of pyarrow.compute"


@dataclass(frozen=True)
class Condition:
    """The condition that a row must fulfil: a predicate, an expression, or none."""

    predicate: Predicate | None = None
    expression: pc.Expression | None = None

    @classmethod
    def of(cls, where: Where | None, columns: Columns) -> Condition:
        """The condition that `where` stands for. Raises InvalidUsage for a column that the table lacks, for a value that does not compare
        with its column, and for anything that is not a condition.
        """
        if where is None:
            return cls()
        if isinstance(where, pc.Expression):
            return cls(expression=_checked(where, columns))
        if not isinstance(where, str | list | tuple | Compare | In | Like | IsNull | And | Or | Not):
            raise InvalidUsage(f"where is a {type(where).__module__}.{type(where).__name__}; it must be {_ALLOWED}")
        return cls(predicate=filter_of(where, columns.schema).predicate)

    def applied(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch of columns side by side that fulfil the expression."""
        return rows if self.expression is None else rows.filter(self.expression)

    def mask(self, rows: pa.Table) -> pa.Array:
        """Whether each row of columns side by side fulfils the expression; without nulls."""
        # The name of the added column is empty, because no column of a table has an empty name.
        numbered = rows.append_column("", pa.array(np.arange(rows.num_rows)))
        mask = np.zeros(rows.num_rows, np.bool_)
        mask[numbered.filter(self.expression).column("").to_numpy()] = True
        return pa.array(mask)

    @property
    def is_empty(self) -> bool:
        """Whether every row fulfils it."""
        return self.predicate is None and self.expression is None

    @property
    def shown(self) -> str:
        """The condition as text, for people."""
        return str(self.expression if self.predicate is None else self.predicate)


def _checked(expression: pc.Expression, columns: Columns) -> pc.Expression:
    try:
        columns.arrow.empty_table().filter(expression)
    except (pa.ArrowException, KeyError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise InvalidUsage(
            f"the expression {expression} does not fit the table: {text}; the columns are {', '.join(columns.names)}"
        ) from error
    return expression
