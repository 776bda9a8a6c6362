"""Laws of schemas that grow: reading old data under the new schema is evolving what the old schema reads."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.codec.part import decode_part, encode_part, open_part
from persist_engine.model.frontier import EMPTY, MINIMUM, Description
from persist_engine.rows.evolution import adapted, incompatibilities
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate
from persist_kit.depth import draws
from persist_kit.strategies import schemas, successors, updates

DESC = Description(MINIMUM, EMPTY, MINIMUM)


@st.composite
def grown(draw: st.DrawFn) -> tuple[Schema, Schema, Schema, pa.Table]:
    old = draw(schemas())
    new = draw(successors(old))
    newest = draw(successors(new))
    return old, new, newest, draw(updates(old))


@pytest.mark.slow
@settings(max_examples=draws(12), deadline=None)
@given(grown())
def test_old_data_reads_under_the_new_schema_as_it_read_before_and_evolved(case: tuple) -> None:
    old, new, newest, table = case
    assert incompatibilities(old, new) == incompatibilities(new, newest) == incompatibilities(old, newest) == ()
    part = encode_part(table, desc=DESC, schema=old)
    read = decode_part(part, key="k", schema=new).table
    assert read.schema == new.updates_schema
    assert read.equals(adapted(decode_part(part, key="k", schema=old).table, asked=new, key="k")) or _nan_equal(
        read, adapted(table, asked=new, key="k")
    )
    # In two steps as in one.
    assert _nan_equal(adapted(read, asked=newest, key="k"), adapted(table, asked=newest, key="k"))


@pytest.mark.slow
@settings(max_examples=draws(12), deadline=None)
@given(grown())
def test_evolving_keeps_order_and_identity_of_rows(case: tuple) -> None:
    """Else sorted runs of old parts could not be merged with new ones."""
    old, new, _, table = case
    assert _nan_equal(consolidate(adapted(table, asked=new, key="k")), adapted(consolidate(table), asked=new, key="k"))


@pytest.mark.slow
@settings(max_examples=draws(12), deadline=None)
@given(grown())
def test_what_an_old_reader_sees_of_evolved_rows_is_what_they_were(case: tuple) -> None:
    old, new, _, table = case
    part = encode_part(adapted(table, asked=new, key="k"), desc=DESC, schema=new)
    opened = open_part(part, key="k", schema=old, may_be_newer=True)
    back = pa.concat_tables([old.updates_schema.empty_table(), *map(opened.read_group, range(opened.groups))])
    assert _nan_equal(back, table)


def _nan_equal(one: pa.Table, other: pa.Table) -> bool:
    return repr(one.to_pylist()) == repr(other.to_pylist()) and one.schema == other.schema
