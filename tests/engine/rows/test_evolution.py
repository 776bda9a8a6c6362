"""What may succeed a schema, and rows of one version shown in another."""

from __future__ import annotations

import pyarrow as pa
import pytest
from persist_engine.base.errors import SchemaMismatch
from persist_engine.codec.part import decode_part, encode_part
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.evolution import adapted, incompatibilities
from persist_engine.rows.schema import Schema

DESC = Description(Antichain(0), Antichain(10), Antichain(0))
OLD = Schema.from_ddl("id INT NOT NULL, at STRUCT<x: INT>", "n INT, f FLOAT, p STRUCT<q: TINYINT>")
ROWS = [
    {"key": {"id": 1, "at": {"x": 2}}, "val": {"n": 5, "f": 0.1, "p": {"q": 7}}, "time": 3, "diff": 1},
    {"key": {"id": 2, "at": None}, "val": {"n": None, "f": float("nan"), "p": None}, "time": 4, "diff": -1},
]
TABLE = pa.Table.from_pylist(ROWS, schema=OLD.updates_schema)


@pytest.mark.parametrize(
    ("key", "val"),
    [
        ("id INT NOT NULL, at STRUCT<x: INT>", "n INT, f FLOAT, p STRUCT<q: TINYINT>"),
        ("id INT NOT NULL, at STRUCT<x: INT>", "n BIGINT, f DOUBLE, p STRUCT<q: SMALLINT>"),
        (
            "new STRING, id INT NOT NULL, at STRUCT<y: DATE, x: INT>",
            "a BOOLEAN, n INT, f FLOAT, p STRUCT<q: TINYINT, r: INT>",
        ),
    ],
)
def test_a_schema_may_grow(key: str, val: str) -> None:
    assert incompatibilities(OLD, Schema.from_ddl(key, val)) == ()


@pytest.mark.parametrize(
    ("key", "val", "reason"),
    [
        ("id INT NOT NULL", OLD.val_ddl, "key.at is dropped"),
        (OLD.key_ddl, "n INT, g FLOAT, p STRUCT<q: TINYINT>", "val.f is dropped"),
        (OLD.key_ddl, "n INT, f FLOAT, p STRUCT<r: TINYINT>", "val.p.q is dropped"),
        (OLD.key_ddl, OLD.val_ddl + ", z INT NOT NULL", "val.z is new and NOT NULL"),
        (OLD.key_ddl, "n SMALLINT, f FLOAT, p STRUCT<q: TINYINT>", "val.n is INT and cannot become SMALLINT"),
        (OLD.key_ddl, "n DOUBLE, f FLOAT, p STRUCT<q: TINYINT>", "val.n is INT and cannot become DOUBLE"),
        (OLD.key_ddl, "n STRING, f FLOAT, p STRUCT<q: TINYINT>", "val.n is INT and cannot become STRING"),
        (OLD.key_ddl, "n INT, f FLOAT, p TINYINT", "val.p is STRUCT<q: TINYINT> and cannot become TINYINT"),
        (OLD.key_ddl, "n INT NOT NULL, f FLOAT, p STRUCT<q: TINYINT>", "val.n is nullable and cannot become NOT NULL"),
        ("id INT, at STRUCT<x: INT>", OLD.val_ddl, "key.id is NOT NULL and cannot become nullable"),
        ("id BIGINT NOT NULL, at STRUCT<x: INT>", OLD.val_ddl, "the type of a key field is fixed"),
        ("id INT NOT NULL, at STRUCT<x: BIGINT>", OLD.val_ddl, "key.at.x is INT and cannot become BIGINT"),
        ("at STRUCT<x: INT>, id INT NOT NULL", OLD.val_ddl, "key has its fields in another order"),
        (OLD.key_ddl, "f FLOAT, n INT, p STRUCT<q: TINYINT>", "val has its fields in another order"),
    ],
)
def test_a_schema_never_drops_moves_narrows_or_tightens(key: str, val: str, reason: str) -> None:
    """Spec 26.3."""
    (found,) = incompatibilities(OLD, Schema.from_ddl(key, val))
    assert reason in found


def test_every_reason_is_given() -> None:
    assert len(incompatibilities(OLD, Schema.from_ddl("id STRING", "z INT NOT NULL"))) == 7


def test_old_rows_show_nulls_in_new_fields_and_their_own_values_wider() -> None:
    """Spec 26.4."""
    new = Schema.from_ddl(
        "k DATE, id INT NOT NULL, at STRUCT<y: INT, x: INT>", "n BIGINT, f DOUBLE, p STRUCT<q: INT>, z STRING"
    )
    shown = adapted(TABLE, asked=new, key="k")
    assert shown.schema == new.updates_schema
    first, second = shown.to_pylist()
    assert first["key"] == {"k": None, "id": 1, "at": {"y": None, "x": 2}}
    assert first["val"] == {"n": 5, "f": pytest.approx(0.1, rel=1e-7), "p": {"q": 7}, "z": None}
    assert second["key"] == {"k": None, "id": 2, "at": None}
    assert second["val"]["p"] is None
    assert (second["time"], second["diff"]) == (4, -1)


def test_new_rows_show_in_an_old_schema_without_what_came_since() -> None:
    new = Schema.from_ddl(OLD.key_ddl, "n BIGINT, f DOUBLE, p STRUCT<q: INT>, z STRING")
    wide = adapted(TABLE, asked=new, key="k")
    assert repr(adapted(wide, asked=OLD, key="k").to_pylist()) == repr(TABLE.to_pylist())


@pytest.mark.parametrize(("val", "name"), [({"n": 2**31}, "n"), ({"f": 0.1}, "f"), ({"p": {"q": 128}}, "p.q")])
def test_a_value_that_does_not_fit_an_old_schema_is_refused_by_name(val: dict, name: str) -> None:
    new = Schema.from_ddl(OLD.key_ddl, "n BIGINT, f DOUBLE, p STRUCT<q: INT>")
    row = {"key": {"id": 1, "at": None}, "val": {"n": 0, "f": 0.5, "p": None, **val}, "time": 0, "diff": 1}
    table = pa.Table.from_pylist([row], schema=new.updates_schema)
    with pytest.raises(SchemaMismatch, match=f"k: val.{name} holds values that do not fit"):
        adapted(table, asked=OLD, key="k")


def test_a_slice_of_a_table_shows_its_own_rows() -> None:
    new = Schema.from_ddl("id INT NOT NULL, at STRUCT<y: INT, x: INT>", OLD.val_ddl)
    shown = adapted(TABLE.slice(1), asked=new, key="k")
    assert [row["key"]["id"] for row in shown.to_pylist()] == [2]


def test_an_empty_value_may_get_fields() -> None:
    bare, full = Schema.from_ddl("id INT"), Schema.from_ddl("id INT", "name STRING")
    assert incompatibilities(bare, full) == ()
    table = pa.Table.from_pylist([{"key": {"id": 1}, "val": {}, "time": 0, "diff": 1}], schema=bare.updates_schema)
    part = encode_part(table, desc=DESC, schema=bare)
    decoded = decode_part(part, key="k", schema=full).table
    assert decoded.to_pylist() == [{"key": {"id": 1}, "val": {"name": None}, "time": 0, "diff": 1}]


def test_single_fields_of_an_old_part_are_found_by_name() -> None:
    new = Schema.from_ddl(OLD.key_ddl, "z STRING, n BIGINT, f FLOAT, p STRUCT<q: TINYINT>")
    part = encode_part(TABLE, desc=DESC, schema=OLD)
    decoded = decode_part(part, key="k", schema=new, columns=["diff", "val.n", "val.z", "key"]).table
    assert decoded.column_names == ["key", "val", "diff"]
    assert decoded.column("val").to_pylist() == [{"z": None, "n": 5}, {"z": None, "n": None}]


def test_a_part_of_a_newer_schema_is_refused_unless_it_was_asked_for() -> None:
    new = Schema.from_ddl(OLD.key_ddl, OLD.val_ddl + ", z STRING")
    part = encode_part(adapted(TABLE, asked=new, key="k"), desc=DESC, schema=new)
    with pytest.raises(SchemaMismatch, match="val.z is not in the shard's schema"):
        decode_part(part, key="k", schema=OLD)
