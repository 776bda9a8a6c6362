"""Predicates as text: the conditions of SQL's WHERE in Spark's dialect, parsed by sqlglot.

    key.carrier IN ('AA', 'UA') AND val.delay >= 30 AND NOT (val.tail LIKE 'N1%' OR val.at < TIMESTAMP '2013-01-02 00:00:00')

Columns are `key.<field>` and `val.<field>`. The side may be omitted when only one side has the field. Names that are not plain identifiers
need backticks. A quote within text is doubled, as in SQL ('O''Brien'), or follows a backslash. NaN and the infinities are written as
CAST('NaN' AS DOUBLE). This module owns the subset of SQL that a predicate can express. It refuses everything else and names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import TYPE_CHECKING, Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, In, IsNull, Like, Not, Op, Or, Predicate, from_tuples
from persist_engine.rows.schema import Schema

if TYPE_CHECKING:
    from sqlglot.dialects.dialect import Dialect
    from sqlglot.expressions import Expr

#: A predicate as readers accept it: a Predicate, its text, or the tuples of rows.predicate.from_tuples.
Where = Predicate | str | Sequence[Any]
#: The limit on the characters of a filter. Longer filters come from programs, which can build trees instead of text.
TEXT_MAX = 100_000
_ALLOWED = (
    "a filter compares a column with a value by =, !=, <, <=, >, >=, IN, BETWEEN, LIKE, IS NULL or IS NOT NULL, joined by AND, OR and NOT; "
    "functions, arithmetic, RLIKE and ILIKE are not allowed"
)

#: The names of the numbers that are not finite, as Spark reads them.
_NOT_FINITE = frozenset({"nan", *(sign + name for sign in ("", "+", "-") for name in ("inf", "infinity"))})
_FLIPPED: dict[Op, Op] = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def predicate_of(where: Where) -> Predicate:
    """The predicate that `where` stands for. Raises InvalidUsage, which names what has none of the accepted forms."""
    if isinstance(where, str):
        return parse_predicate(where)
    if isinstance(where, Compare | In | Like | IsNull | And | Or | Not):
        return where
    return from_tuples(where)


def filter_of(where: Where, schema: Schema) -> Filter:
    """The filter for rows of `schema` from a user's condition. Raises InvalidUsage, which names what does not fit the schema, and a column
    with two meanings. For a condition made by code, with the side of each column, use `Filter(predicate_of(where), schema)`.
    """
    predicate = predicate_of(where)
    _refuse_two_meanings(predicate, schema)
    return Filter(predicate, schema)


def _refuse_two_meanings(predicate: Predicate, schema: Schema) -> None:
    """Raises InvalidUsage for a column that may name one field with its side and another without: see Schema.has_two_meanings. Such a
    condition could choose, and delete, other rows than the user means.
    """
    match predicate:
        case And(terms) | Or(terms):
            for term in terms:
                _refuse_two_meanings(term, schema)
        case Not(term):
            _refuse_two_meanings(term, schema)
        case Compare(column) | In(column) | Like(column) | IsNull(column):
            if isinstance(column, str) and schema.has_two_meanings(column):
                side, _, rest = column.partition(".")
                raise InvalidUsage(
                    f"column {column} may be the field {rest} of the {'key' if side == 'key' else 'value'}, or a column that is named "
                    f"{column} itself or lies within {side}: write {rest} for the first, and key.{column} or val.{column} for the other",
                    column=column,
                )


def parse_predicate(text: str) -> Predicate:
    """The predicate of a condition. Raises InvalidUsage, with the position where the text is not SQL, or the piece that no filter
    expresses.
    """
    # The import is here, because loading the parser takes longer than most commands.
    import sqlglot
    from sqlglot.errors import ParseError, SqlglotError

    if len(text) > TEXT_MAX:
        raise InvalidUsage(f"a filter's text has {len(text)} characters, more than {TEXT_MAX}")
    if not text.strip():
        raise InvalidUsage("the filter is empty")
    try:
        return _Reader().predicate(sqlglot.parse_one(text, dialect=_dialect(), into=sqlglot.exp.Condition))
    except ParseError as error:
        found = error.errors[0] if error.errors else {}
        problem = str(found.get("description") or "not a condition").rstrip(". ").lower()
        problem = "it is not complete" if "<class" in problem else problem
        at = f" at character {found['col']}" if found.get("col") else ""
        raise InvalidUsage(f"filter {_shown(text)}: {problem}{at}") from error
    except SqlglotError as error:
        raise InvalidUsage(f"filter {_shown(text)}: {str(error).splitlines()[0]}") from error
    except RecursionError:
        raise InvalidUsage("the filter is nested too deeply: write it with fewer levels") from None


@cache
def _dialect() -> type[Dialect]:
    """Spark's dialect, except that a doubled quote is a quote. The parser reads it as two adjacent texts, as Spark did before version 4."""
    from sqlglot.dialects.spark import Spark

    class Conditions(Spark):
        class Tokenizer(Spark.Tokenizer):
            STRING_ESCAPES = ["\\", "'", '"']  # noqa: RUF012 - declared as the parser declares it

    return Conditions


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _escaped(char: str, *, is_escaped: bool, escape: str) -> str:
    """Converts a character of a pattern with the escape character `escape` for a pattern with the backslash."""
    if not is_escaped:
        return "\\\\" if char == "\\" else char
    return char if char == escape and char not in "%_\\" else f"\\{char}"


class _Reader:
    """Converts the parser's tree into a predicate. It is a class, so that the parser is imported only when an object is made."""

    def __init__(self) -> None:
        from sqlglot import exp

        self._exp = exp
        self._ops: dict[type[Expr], Op] = {
            exp.EQ: "=",
            exp.NEQ: "!=",
            exp.LT: "<",
            exp.LTE: "<=",
            exp.GT: ">",
            exp.GTE: ">=",
        }

    def predicate(self, node: Expr) -> Predicate:
        exp = self._exp
        match node:
            case exp.Paren():
                return self.predicate(node.this)
            case exp.And():
                return And(tuple(map(self.predicate, node.flatten())))
            case exp.Or():
                return Or(tuple(map(self.predicate, node.flatten())))
            case exp.Not():
                return Not(self.predicate(node.this))
            case exp.Is() if isinstance(node.expression, exp.Null):
                return IsNull(self._column(node.this))
            case exp.In() if node.expressions and not node.args.get("query"):
                return In(self._column(node.this), tuple(map(self._value, node.expressions)))
            case exp.Between() if not node.args.get("symmetric"):
                column, low, high = self._column(node.this), node.args["low"], node.args["high"]
                return And((Compare(column, ">=", self._value(low)), Compare(column, "<=", self._value(high))))
            case exp.Like():
                return self._like(node, escape="\\")
            case exp.Escape() if isinstance(node.this, exp.Like) and isinstance(node.expression, exp.Literal):
                return self._like(node.this, escape=node.expression.this)
            case exp.Column() | exp.Dot():
                return Compare(self._column(node), "=", value=True)
        op = self._ops.get(type(node))
        if op is None:
            raise self._refusal(node)
        if not self._is_column(node.expression):
            return Compare(self._column(node.this), op, self._value(node.expression))
        return Compare(self._column(node.expression), _FLIPPED[op], self._value(node.this))

    def _like(self, node: Expr, *, escape: str) -> Predicate:
        """Converts a LIKE, so that its pattern has the backslash as escape character."""
        pattern = node.expression
        if not isinstance(pattern, self._exp.Literal) or not pattern.is_string:
            raise self._refusal(node, "because its pattern is no text")
        if len(escape) != 1:
            raise self._refusal(node, f"with the escape {escape!r}, which is not one character")
        text = pattern.this
        if escape != "\\":
            pairs = re.findall(rf"({re.escape(escape)}?)(.|$)", text, re.DOTALL)
            text = "".join(_escaped(second, is_escaped=bool(first), escape=escape) for first, second in pairs)
        like = Like(self._column(node.this), text)
        return Not(like) if node.args.get("negate") else like

    def _is_column(self, node: Expr) -> bool:
        return isinstance(node, self._exp.Column | self._exp.Dot)

    def _column(self, node: Expr) -> str:
        exp = self._exp
        if isinstance(node, exp.Paren):
            return self._column(node.this)
        parts = list(node.parts) if isinstance(node, exp.Column | exp.Dot) else []
        if not parts or not all(isinstance(part, exp.Identifier) for part in parts):
            raise self._refusal(node, "where a column is expected")
        return ".".join(part.name for part in parts)

    def _value(self, node: Expr) -> Any:
        exp = self._exp
        match node:
            case exp.Paren():
                return self._value(node.this)
            case exp.Literal():
                return node.this if node.is_string else self._number(node, node.this)
            case exp.Neg() if isinstance(node.this, exp.Literal) and not node.this.is_string:
                return self._number(node, node.this.this).copy_negate()  # unary minus would round to 28 digits
            case exp.Boolean():
                return bool(node.this)
            case exp.HexString() if len(node.this) % 2 == 0:
                return bytes.fromhex(node.this)
            case exp.Null():
                return None
            case exp.Cast() if isinstance(node.this, exp.Literal) and node.this.is_string:
                if node.to.is_type("date"):
                    return self._date(node, node.this.this)
                if node.to.is_type("timestamp", "timestamptz", "timestampltz", "timestampntz"):
                    return node.this.this  # TIMESTAMP '...': the column's type already says how to read the text
                if node.to.is_type("float", "double") and node.this.this.strip().lower() in _NOT_FINITE:
                    return float(node.this.this)  # SQL has no other way to write it
        raise self._refusal(node, "where a value is expected")

    def _number(self, node: Expr, text: str) -> Decimal:
        try:
            return Decimal(text)
        except InvalidOperation:
            raise self._refusal(node, "where a number is expected") from None

    def _date(self, node: Expr, text: str) -> date:
        """A whole day, also for timestamp columns. The text of a timestamp would mean a time of day."""
        try:
            return date.fromisoformat(text)
        except ValueError:
            raise self._refusal(node, "where a date is expected") from None

    def _refusal(self, node: Expr, where: str = "") -> InvalidUsage:
        problem = f"a filter cannot express {_shown(node.sql(dialect='spark'))} {where}".rstrip()
        return InvalidUsage(f"{problem}; {_ALLOWED}")
