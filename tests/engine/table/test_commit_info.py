"""`commit_info`: history shows for each write what was said of it, and of no other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Antichain, PersistClient
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.state import COMMIT_INFO, COMMIT_INFO_BYTES_MAX
from persist_engine.table.notes.commit_info import encoded, noted, read, shown

ONE = {"id": 1, "name": "a", "price": None}


def infos(table):
    """Of the writes, oldest first."""
    return [
        None if row["commit_info"] is None else json.loads(row["commit_info"])
        for row in reversed(table.history().to_pylist())
        if row["time"] is not None
    ]


def test_each_write_shows_its_own(db, orders):
    orders.append([ONE], commit_info={"job": "first", "try": 1, "share": 0.5, "again": False, "by": None})
    orders.append([{**ONE, "id": 2}])
    orders.append([{**ONE, "id": 3}], commit_info={"job": "same"})
    orders.append([{**ONE, "id": 4}], commit_info={"job": "same"})
    orders.overwrite([ONE, {**ONE, "id": 2}], commit_info={"why": "over"})
    orders.delete("id = 2", commit_info={"why": "ä\n"}, txn=("app", 1))
    orders.delete("id = 99", commit_info={"why": "nothing to delete"})
    for number in range(3):  # the later ones go by the keys in memory
        orders.upsert([{**ONE, "name": str(number)}], commit_info={"upsert": number})
    said = [
        {"job": "first", "try": 1, "share": 0.5, "again": False, "by": None},
        None,
        {"job": "same"},
        {"job": "same"},
        {"why": "over"},
        {"why": "ä\n"},
        *({"upsert": number} for number in range(3)),
    ]
    assert infos(orders) == said
    orders.optimize()
    with type(db)(db.client, maintain=False) as again:
        assert infos(again["orders"]) == said
    assert "app 1" in orders.history().column("txn").to_pylist()
    assert set(db.client.inspect(orders.id).progress) == {"txn:app"}, "it is no progress of a sink"


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ("job", "must be a dict .* not a str"),
        ({1: "a"}, "the name 1 must be a text"),
        ({"job": [1]}, r"job must be a text, .* not \[1\]"),
        ({"rate": float("nan")}, "rate must be a text, a finite number"),
        ({"job": "\ud800"}, "surrogate"),
        ({"small": 1, "big": "x" * COMMIT_INFO_BYTES_MAX}, "4116 bytes .* may have 4095; the largest entry is big"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_written(orders, info, why):
    with pytest.raises(InvalidUsage, match=f"table orders: commit_info.*{why}"):
        orders.append([ONE], commit_info=info)
    assert orders.history().num_rows == 0


def test_a_number_that_python_does_not_print_is_refused(orders):
    with pytest.raises(InvalidUsage, match="table orders: commit_info.*thousands of digits"):
        orders.append([ONE], commit_info={"job": 10**5000})


def test_the_limit_is_stored_whole(orders):
    text = "x" * (COMMIT_INFO_BYTES_MAX - 1 - len('{"a":""}'))
    orders.append([ONE], commit_info={"a": text})
    assert infos(orders) == [{"a": text}]


def test_handles_take_bytes(db, orders):
    client: PersistClient = db.client
    with client.open_writer(orders.id, client.schema(orders.id), purpose="test") as writer:
        upper = Antichain.of(1)
        for bad in ("text", b"x" * (COMMIT_INFO_BYTES_MAX + 1)):
            with pytest.raises(InvalidUsage, match="commit_info"):
                writer.compare_and_append([], expected_upper=0, new_upper=upper, commit_info=bad)
        with pytest.raises(InvalidUsage, match="name the sink otherwise"):
            writer.compare_and_append([], expected_upper=0, new_upper=upper, progress=(COMMIT_INFO, b""))
        writer.compare_and_append([], expected_upper=0, new_upper=upper, commit_info=b"\xff")
    assert infos(orders) == ["ff"]
    assert orders.history().column("operation").to_pylist() == ["write"]


def test_history_names_the_operation(db, orders):
    orders.append([ONE])
    orders.upsert([{**ONE, "name": "b"}])
    orders.upsert([{**ONE, "name": "c"}], commit_info={"job": "nightly"})
    orders.overwrite([ONE])
    orders.delete("id = 1")
    orders.delete("id = 1")
    written = ["append", "upsert", "upsert", "overwrite", "delete"]
    assert list(reversed(orders.history().column("operation").to_pylist())) == written, (
        "what wrote nothing left nothing"
    )


@pytest.mark.parametrize(("operation", "byte"), [("append", 1), ("upsert", 2), ("delete", 3), ("overwrite", 4)])
def test_the_stored_form_of_an_operation(operation, byte):
    assert noted(operation).info == bytes([byte])
    assert noted(operation, None, {"a": 1}).info == bytes([byte]) + b'{"a":1}'
    assert read(bytes([byte])) == (operation, None)


@pytest.mark.parametrize("stored", [b"[" * COMMIT_INFO_BYTES_MAX, b"NaN", b'{"a":-Infinity}', b"{} {}", b""])
def test_what_is_no_json_shows_as_bytes(stored):
    assert json.loads(shown(stored)) == stored.hex()


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5))  # fmt: skip
def test_what_is_stored_reads_back(info):
    assert json.loads(shown(encoded(info))) == info
    operation, said = read(noted("upsert", None, info).info)
    assert (operation, json.loads(said)) == ("upsert", info)
