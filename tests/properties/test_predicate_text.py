"""Conditions as text: every text can be said in quotes, in SQL's way and in Spark's, and nothing else than a predicate or
InvalidUsage comes of any text.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, In, IsNull, Like, Not, Or, Predicate
from persist_engine.rows.predicate_text import parse_predicate
from persist_engine.rows.schema import Schema
from persist_kit.depth import draws

quick = settings(max_examples=draws(200), deadline=None)
texts = st.text(st.sampled_from("'\"\\`ab \n%_ñ;-") | st.characters(exclude_categories=["Cs"]), max_size=12)


def doubled(text: str, quote: str) -> str:
    return quote + text.replace("\\", "\\\\").replace(quote, quote * 2) + quote


def escaped(text: str, quote: str) -> str:
    return quote + text.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote


def said(predicate: Predicate) -> str:
    """The predicate as a person would write it."""
    match predicate:
        case Compare(column, op, value):
            return f"{column} {op} {doubled(value, chr(39))}"
        case In(column, values):
            return f"{column} IN ({', '.join(doubled(value, chr(39)) for value in values)})"
        case IsNull(column):
            return f"{column} IS NULL"
        case Not(term):
            return f"NOT ({said(term)})"
        case And(terms):
            return " AND ".join(f"({said(term)})" for term in terms)
        case Or(terms):
            return " OR ".join(f"({said(term)})" for term in terms)


columns = st.sampled_from(["name", "key.name", "val.tag", "key.`odd name`"])
leaves = (
    st.builds(Compare, columns, st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), texts)
    | st.builds(In, columns, st.lists(texts, min_size=1, max_size=3).map(tuple))
    | st.builds(IsNull, columns)
)
predicates = st.recursive(leaves, lambda terms: st.builds(Not, terms) | st.builds(lambda a, b: And((a, b)), terms, terms) | st.builds(lambda a, b: Or((a, b)), terms, terms), max_leaves=6)  # fmt: skip


def plainly(predicate: Predicate) -> Predicate:
    """Without backticks, and with terms within terms of the same kind as one."""
    match predicate:
        case Compare(column, op, value):
            return Compare(column.replace("`", ""), op, value)
        case In(column, values):
            return In(column.replace("`", ""), values)
        case IsNull(column):
            return IsNull(column.replace("`", ""))
        case Not(term):
            return Not(plainly(term))
        case And(terms):
            return And(tuple(map(plainly, terms)))
        case Or(terms):
            return Or(tuple(map(plainly, terms)))


@pytest.mark.parametrize("text", ["name = 'O''Brien'", r"name = 'O\'Brien'", 'name = "O\'Brien"'])
def test_a_name_with_a_quote_in_it(text):
    assert parse_predicate(text) == Compare("name", "=", "O'Brien")


@pytest.mark.slow
@quick
@given(texts, st.sampled_from("'\""), st.sampled_from([doubled, escaped]))
@example("O'Brien", "'", doubled)
@example("''", "'", doubled)
@example("\\", "'", doubled)
def test_every_text_can_be_said_with_doubled_quotes_and_with_backslashes(text, quote, write):
    assert parse_predicate(f"name = {write(text, quote)}") == Compare("name", "=", text)
    assert parse_predicate(f"name IN ({write(text, quote)}, 'x')") == In("name", (text, "x"))


@pytest.mark.slow
@quick
@given(predicates)
def test_a_predicate_survives_being_written_down(predicate):
    assert parse_predicate(said(predicate)) == plainly(predicate)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("name LIKE 'a%'", "a%"),
        (r"name LIKE 'a\_b%'", r"a\_b%"),
        ("name LIKE 'O''B_%'", "O'B_%"),
        ("name LIKE '100#%' ESCAPE '#'", r"100\%"),
        ("name LIKE '100%%_' ESCAPE '%'", r"100\%_"),
        (r"name LIKE 'a##b#_\\c%' ESCAPE '#'", r"a\#b\_\\c%"),
    ],
)
def test_a_like(text, pattern):
    if "##" in text:  # an escape before itself is that character, for which a pattern needs no escape
        pattern = pattern.replace(r"\#", "#")
    assert parse_predicate(text) == Like("name", pattern)
    assert (
        parse_predicate(f"NOT {text}")
        == parse_predicate(text.replace("LIKE", "NOT LIKE"))
        == Not(Like("name", pattern))
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("CAST('NaN' AS DOUBLE)", "nan"),
        ("double('nan')", "nan"),
        ("CAST(' -Infinity ' AS FLOAT)", "-inf"),
        ("float('+inf')", "inf"),
    ],
)
def test_a_number_that_has_a_name(text, value):
    found = parse_predicate(f"x < {text}")
    assert isinstance(found, Compare)
    assert (found.op, type(found.value), str(found.value)) == ("<", float, value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name LIKE tag", "its pattern is no text"),
        ("name LIKE 'a' ESCAPE 'xy'", "not one character"),
        ("name LIKE ANY ('a', 'b')", "its pattern is no text"),
    ],
)
def test_a_like_that_no_filter_expresses_is_named(text, problem):
    with pytest.raises(InvalidUsage, match=problem):
        parse_predicate(text)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("upper(name) = 'A'", "'UPPER(name)' where a column is expected"),
        ("f(id) = 1", "'F(id)' where a column is expected"),
        ("id + 1 = 2", "'id + 1' where a column is expected"),
        ("x = CAST('1e' AS DOUBLE)", "\"CAST('1e' AS DOUBLE)\" where a value is expected"),
        ("id = 1 + 1", "'1 + 1' where a value is expected"),
        ("name = concat('a', 'b')", "\"CONCAT('a', 'b')\" where a value is expected"),
        ("name RLIKE 'a'", "\"name RLIKE 'a'\""),
        ("name ILIKE 'a'", "\"name ILIKE 'a'\""),
        ("id <=> 1", "'id IS NOT DISTINCT FROM 1'"),
        ("id IN (SELECT 1)", "'id IN (SELECT 1)'"),
    ],
)
def test_what_no_filter_expresses_is_named_with_what_is_allowed(text, piece):
    with pytest.raises(InvalidUsage) as raised:
        parse_predicate(text)
    assert str(raised.value) == (
        f"a filter cannot express {piece}; a filter compares a column with a value by =, !=, <, <=, >, >=, IN, BETWEEN, LIKE, IS NULL "
        "or IS NOT NULL, joined by AND, OR and NOT; functions, arithmetic, RLIKE and ILIKE are not allowed"
    )


@pytest.mark.parametrize(
    ("pattern", "problem"), [("a\\", "backslash"), ("a\\b%", "backslash"), ("%\\", "backslash"), ("a#", None)]
)
def test_a_backslash_before_nothing_special_is_refused(pattern, problem):
    schema = Schema.from_ddl("name STRING, id BIGINT", "")
    if problem is None:
        Filter(Like("name", pattern), schema)
        return
    with pytest.raises(InvalidUsage, match=problem):
        Filter(Like("name", pattern), schema)
    with pytest.raises(InvalidUsage, match=r"key\.id: LIKE compares texts, and the column is BIGINT"):
        Filter(Like("id", "1%"), schema)


@pytest.mark.parametrize("text", ["name = 'a' 'b'", "name = 'O'Brien'", "name = 'O''Brien", "name = ''''' OR 1=1"])
def test_texts_that_do_not_close_or_stand_beside_each_other_are_refused(text):
    with pytest.raises(InvalidUsage):
        parse_predicate(text)


@pytest.mark.slow
@settings(max_examples=draws(500), deadline=None)
@given(st.lists(st.sampled_from(["name", "key.", "`", "'", '"', "''", "\\", "=", "<", " ", "(", ")", "IN", "NOT ", "NULL", " IS ", " AND ", " OR ", "BETWEEN", "1", ".", ",", "DATE", "X'", "--", "/*", "*/", ";", "\n", "r'", "{", "}", "@", "$", "?", ":", "[", "]", "ñ", "\0"]), max_size=14).map("".join) | st.text(max_size=30))  # fmt: skip
def test_any_text_is_a_predicate_or_refused(text):
    with suppress(InvalidUsage):
        assert parse_predicate(text) is not None
