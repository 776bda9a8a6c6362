"""Wrong arguments for every parameter of every public method of the handles: InvalidUsage names the parameter, and nothing is
written.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from persist_engine import (
    Antichain,
    Batch,
    BatchBuilder,
    CriticalReaderId,
    Location,
    PersistClient,
    ReadHandle,
    Schema,
    ShardId,
    SinceHandle,
    Sink,
    UpsertHandle,
    WriteHandle,
)
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.dataflow.open import open_sink, open_upsert
from persist_engine.dataflow.sink.handle import SinkInput
from persist_engine.model.ownership import Owner
from persist_kit.world import SCHEMA, AheadEnv, World, row

ANYTHING = [7, 9.99, True, "text", b"bytes", None, [], (), {}, object()]


def all_but(*allowed: type | None) -> list[Any]:
    """The values of `ANYTHING` that are not of these types."""
    kinds = tuple(type(None) if kind is None else kind for kind in allowed)
    return [each for each in ANYTHING if type(each) not in kinds]


TIME = [*all_but(int), "7", "2013-01-01", datetime(2013, 1, 1), -1]
TIME_OR_NONE = [each for each in TIME if each is not None]
SECONDS = [*all_but(int, float, None), float("nan")]
PROGRESS = [*all_but(None), ("s", "text"), ("s",), (7, b"x"), ("s", b"x", 3), ("\ud800", b"x")]
BYTES, FLAG, TEXT, COUNT = all_but(bytes), all_but(bool), [*all_but(str), "\ud800"], [*all_but(int), -5, 2**63]
SHARD = [*all_but(), "s123", CriticalReaderId.from_bytes(bytes(16))]
SCHEMAS = all_but()
#: "updates" may be any iterable. An empty one holds no updates.
ROWS = [7, 9.99, True, "text", b"bytes", None, object(), [7], [(((1,), ("a",)), 5)], [(((1,), ("a",)), 5.5, 1)], pa.table({"a": [1]})]  # fmt: skip
COMMANDS = [*ANYTHING, pa.table({"a": [1]})]
WHERE = [7, 9.99, True, b"bytes", [], (), {}, object(), "nope = 1", ""]
COLUMNS = [7, 9.99, True, "text", object(), [7], ["nope"]]
PURPOSE = {"purpose": TEXT}
READER = CriticalReaderId.from_bytes(bytes(16))
HOLDS = [
    *all_but(None),
    (),
    (READER, b"o"),
    (READER, "o", "p"),
    ("c", b"o", "p"),
    (READER, b"o", "\ud800"),
    (READER, b"o", "p", 1),
]


class Opening:
    """The functions that open the handles above the client."""

    open_sink, open_upsert = staticmethod(open_sink), staticmethod(open_upsert)


#: Wrong arguments of each parameter. SKIPPED lists the methods of tests and those checked elsewhere.
WRONG: dict[type, dict[str, dict[str, list[Any]]]] = {
    PersistClient: {
        "open": {"location": all_but(), "settings": all_but(None)},
        "open_writer": {"shard_id": SHARD, "schema": SCHEMAS, **PURPOSE},
        "open_leased_reader": {"shard_id": SHARD, "schema": all_but(None), "lease_ms": [*all_but(int, None), -5, 2**63], **PURPOSE},
        "open_critical_since": {"shard_id": SHARD, "critical_id": all_but(), "opaque": BYTES, **PURPOSE},
        "machine": {"shard_id": SHARD},
        "background_maintenance": {"switch": all_but(None)},
        "initialise": {"shard_id": SHARD, "schema": SCHEMAS, "retain_ms": [*all_but(int, None), -5, 2**64], "critical": HOLDS, "clock": [*ANYTHING, "s"], "codecs": [*all_but(None), ("row", "struct"), ("struct",), (1, 2)]},
        "schema": {"shard_id": SHARD},
        "clock": {"shard_id": SHARD},
        "shard_named": {"name": [*all_but(str), "", "\ud800", "no/such name"]},
        "evolve_schema": {"shard_id": SHARD, "schema": SCHEMAS},
        "recent_upper": {"shard_id": SHARD},
        "has_log": {"shard_id": SHARD},
        "hears_commits": {"shard_id": SHARD, "timeout_s": SECONDS},
        "is_newest": {"shard_id": SHARD, "seqno": [*all_but(int), -1], "tag": all_but(str)},
        "on_commit": {"shard_id": SHARD, "listener": ANYTHING},
        "set_retention": {"shard_id": SHARD, "retain_ms": [*all_but(int, None), -5, 2**64]},
        "set_filtered": {"shard_id": SHARD, "columns": COLUMNS},
        "progress": {"shard_id": SHARD, "sink_id": TEXT},
        "inspect": {"shard_id": SHARD, "known_seqno": [*all_but(int, None), -1]},
        "metadata": {"shard_id": SHARD, "table": TEXT},
        "adopt": {"owner": all_but(), "wanted": [each for each in SHARD if each is not None], "proposed": SHARD, "take_over": FLAG},
        "owner_of": {"shard_id": SHARD},
        "disown": {"shard_id": SHARD, "only": all_but(None)},
        "free_name": {"owner": all_but()},
        "registered": {"owner": all_but()},
        "rename": {"shard_id": SHARD, "old": all_but(), "new": all_but()},
        "finalize": {"shard_id": SHARD},
        "is_finalized": {"shard_id": SHARD},
    },
    WriteHandle: {
        "wait_for_upper_past": {"frontier": TIME, "timeout": SECONDS},
        "builder": {"lower": TIME},
        "clock_time": {"now_ms": [*all_but(int), -5, 2**63]},
        "batch": {"updates": ROWS, "lower": TIME, "upper": TIME},
        "batch_from_transmittable": {"data": BYTES, "is_only_copy": FLAG},
        "delete_batches": {"batches": [each for each in ANYTHING if each not in ([], (), b"")] },
        "discard": {"batch": ANYTHING},
        "compare_and_append": {
            "updates": ROWS, "expected_upper": TIME, "new_upper": TIME, "progress": PROGRESS, "expected_progress": all_but(bytes, None),
            "commit_info": all_but(bytes, None),
        },
        "append": {"updates": ROWS, "lower": TIME, "upper": TIME},
        "append_batch": {"batch": ANYTHING, "lower": TIME, "upper": TIME},
        "compare_and_append_batch": {
            "batches": [7, 9.99, True, "text", None, {}, object(), [7]], "expected_upper": TIME, "new_upper": TIME,
            "progress": PROGRESS, "expected_progress": all_but(bytes, None), "commit_info": all_but(bytes, None),
        },
    },
    ReadHandle: {
        "snapshot": {"as_of": TIME, "where": WHERE, "columns": COLUMNS, "timeout_s": SECONDS},
        "changes": {
            "since": TIME_OR_NONE, "upto": TIME, "shape": ANYTHING, "where": WHERE, "columns": COLUMNS, "timeout_s": SECONDS,
        },
        "listen": {"as_of": TIME, "where": WHERE},
        "subscribe": {"as_of": TIME, "where": WHERE, "timeout_s": SECONDS},
        "fetch": {"part": ANYTHING},
        "return_part": {"part": ANYTHING},
        "downgrade_since": {"since": TIME},
        "maybe_downgrade_since": {"since": TIME},
    },
    SinceHandle: {
        "compare_and_downgrade_since": {"expected_opaque": BYTES, "new": [*ANYTHING, (b"x", "7"), (7, 7)]},
        "maybe_compare_and_downgrade_since": {"expected_opaque": BYTES, "new": [*ANYTHING, (b"x", "7"), (7, 7)]},
    },
    UpsertHandle: {
        "upsert": {"commands": COMMANDS, "keeps_greater": all_but(str, None), "progress": PROGRESS, "expected_progress": all_but(bytes, None), "commit_info": all_but(bytes, None)},
        "upsert_at": {"commands": COMMANDS, "upper": TIME, "progress": PROGRESS, "expected_progress": all_but(bytes, None)},
        "upsert_stream": {"commands": [7, 9.99, True, None, "text", object(), [7]]},
    },
    Opening: {
        "open_sink": {
            "client": all_but(), "shard_id": SHARD, "schema": SCHEMAS, "workers": [*COUNT, 0, 1000], "as_of": TIME, "read_only": FLAG, "errors": FLAG,
            "refresh": all_but(None), "memory_limit_bytes": [*COUNT, 7], "spill_directory": all_but(None), **PURPOSE,
        },
        "open_upsert": {
            "client": all_but(), "shard_id": SHARD, "schema": SCHEMAS, "backend": ANYTHING, "directory": all_but(str, None),
            "spill_bytes": COUNT, "on_hydration": all_but(None), **PURPOSE,
        },
    },
    Sink: {"wait_for_upper": {"frontier": TIME, "timeout_s": SECONDS}},
    SinkInput: {"insert": {"updates": ROWS}, "advance": {"frontier": TIME}},
    Batch: {"rewrite_times": {"frontier": TIME, "new_upper": TIME}},
    BatchBuilder: {"add": {"updates": ROWS}, "finish": {"upper": TIME}},
    Schema: {"__init__": {"key": ANYTHING, "val": [7, 9.99, True, "text", b"bytes", None, object()]}},
    Location: {"__init__": {"blob": all_but(str), "consensus": all_but(str)}},
}  # fmt: skip
#: Ports of this process, which users do not call, and methods that only the rooms call.
SKIPPED = {
    "PersistClient.open.env", "PersistClient.open.metrics", "PersistClient.open.create", "PersistClient.open.on_wait", "WriteHandle.check_newest_schema",
    "SinkInput.insert_errors.errors", "SinkInput.advance_errors.frontier", "Sink.tagged_errors.errors", "Sink.insert.updates",
    "Sink.insert_tagged.updates", "Sink.advance.index", "Sink.advance.stream", "Sink.advance.frontier", "ReadHandle.open.machine",
    "ReadHandle.open.schema_id", "ReadHandle.open.purpose", "ReadHandle.open.lease_ms", "ReadHandle.pin_when.is_due",
    "ReadHandle.pin_when.timeout_s", "Batch.delete_but.named", "Batch.note_unknown_outcome.named_keys", "Batch.mark_spent.how",
}  # fmt: skip
#: Parameters whose message uses another word than the name.
MESSAGES = {"shard_id": "shard", "wanted": "shard", "proposed": "shard", "backend": "backend", "data": "data|transmitted batch", "where": "filter|column", "columns": "column|nope", "commands": "commands|orders", "batches": "batches", "shape": "changes come as", "new": "new", "workers": "workers", "memory_limit_bytes": "memory_limit_bytes", "updates": "updates|diff|time|row|key", "lower": "lower", "upper": "upper"}  # fmt: skip


def public_parameters(kind: type) -> set[str]:
    names = [name for name in vars(kind) if not name.startswith("_")]
    methods = [(name, getattr(kind, name)) for name in names if callable(getattr(kind, name))]
    return {
        f"{kind.__name__}.{name}.{parameter}"
        for name, method in methods
        for parameter in inspect.signature(method).parameters
        if parameter != "self"
    }


def test_every_parameter_of_every_public_method_has_its_wrong_arguments():
    kinds = [kind for kind in WRONG if kind not in (Location, Schema)]
    have = {
        f"{kind.__name__}.{method}.{name}" for kind in kinds for method, rows in WRONG[kind].items() for name in rows
    }
    are = set().union(*map(public_parameters, kinds))
    assert sorted(are - have - SKIPPED) == []
    assert sorted(have - are) == []


@pytest.fixture(scope="module")
def place():
    """A shard with one row in a part, and a handle of each kind on it."""
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)), env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    with ExitStack() as stack:
        writer = stack.enter_context(client.open_writer(shard_id, SCHEMA, purpose="test"))
        writer.compare_and_append([row(1, "a", 3)], expected_upper=Antichain.of(0), new_upper=Antichain.of(10))
        others = world.shard_id()
        critical = client.open_critical_since(shard_id, CriticalReaderId.from_bytes(bytes(16)), opaque=b"o")
        sink = stack.enter_context(open_sink(client, others, SCHEMA))
        yield SimpleNamespace(
            world=world,
            client=client,
            shard_id=shard_id,
            writer=writer,
            reader=stack.enter_context(client.open_leased_reader(shard_id, purpose="test")),
            critical=critical,
            upserts=stack.enter_context(open_upsert(client, shard_id, SCHEMA, purpose="test")),
            sink=sink,
        )


COMMAND = pa.table({"key": pa.array([{"id": 1}]), "val": pa.array([{"name": "b"}])})
#: Correct arguments. The wrong one replaces its own.
RIGHT: dict[str, Any] = {
    "seqno": 1, "tag": "00", "listener": SimpleNamespace(hear=print),
    "table": "batches", "columns": ["key.id"],
    "owner": Owner("operator", "team", "flights"), "old": Owner("operator", "team", "flights"), "wanted": None, "proposed": ShardId.from_bytes(bytes(16)), "schema": SCHEMA, "purpose": "test", "critical_id": CriticalReaderId.from_bytes(bytes(16)), "opaque": b"o", "sink_id": "s",
    "frontier": 12, "lower": 10, "upper": 20, "updates": [row(1, "a", 11)], "expected_upper": 10, "new_upper": 20, "as_of": 3,
    "retain_ms": 5, "since": 3, "upto": 5, "expected_opaque": b"o", "new": (b"o", 1), "commands": COMMAND, "progress": ("s", b"t"),
    "expected_progress": b"x", "batches": [], "key": SCHEMA.key, "val": SCHEMA.val, "blob": "mem:", "consensus": "mem:", "location": Location(blob="mem:", consensus="mem:"),
}  # fmt: skip


def subject_of(place: Any, kind: type) -> Any:
    if kind is Batch:
        return place.writer.batch([], lower=10, upper=20)
    if kind is BatchBuilder:
        return place.writer.builder(10)
    if kind is SinkInput:
        return place.sink.inputs[0]
    handles = {PersistClient: "client", WriteHandle: "writer", ReadHandle: "reader", SinceHandle: "critical", UpsertHandle: "upserts", Sink: "sink"}  # fmt: skip
    return kind if kind in (Location, Schema, Opening) else getattr(place, handles[kind])


CASES = [(kind, method, name) for kind, methods in WRONG.items() for method, rows in methods.items() for name in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method", "name"), CASES, ids=[f"{k.__name__}.{m}.{n}" for k, m, n in CASES])
def test_a_wrong_argument_is_refused_by_the_name_of_its_parameter_and_nothing_is_written(place, kind, method, name):
    wrong = WRONG[kind][method][name]
    before = (place.world.consensus.calls["compare_and_set"], set(place.world.blob_keys(place.shard_id, kind="part")))
    for bad in wrong:
        subject = subject_of(place, kind)
        call = subject if method == "__init__" else getattr(subject, method)
        parameters = inspect.signature(call).parameters
        ours = {"shard_id": place.shard_id, "client": place.client}
        right = {each: {**RIGHT, **ours}[each] for each in parameters if each in {**RIGHT, **ours}}  # fmt: skip
        if method in ("upsert_at",):
            right["commands"] = COMMAND.append_column("time", pa.array([11], pa.int64()))
        if method == "append_batch":
            right["batch"] = place.writer.batch([], lower=10, upper=20)
        if method == "batch_from_transmittable":
            right["data"] = place.writer.batch([], lower=10, upper=20).to_transmittable()
        with pytest.raises(InvalidUsage, match=MESSAGES.get(name, name)):
            call(**{**right, name: bad})
    if method == "upsert_stream":  # it checks its tables one by one, after hydration
        return
    after = (place.world.consensus.calls["compare_and_set"], set(place.world.blob_keys(place.shard_id, kind="part")))
    assert after == before


OPENINGS = dict.fromkeys(("open_writer", "open_leased_reader", "initialise"), PersistClient) | dict.fromkeys(
    ("open_upsert", "open_sink"), Opening
)
OPENED = [(kind, method, name) for method, kind in OPENINGS.items() for name in WRONG[kind][method] if name not in ("shard_id", "client")]  # fmt: skip


@pytest.mark.parametrize(("kind", "method", "name"), OPENED)
def test_a_wrong_argument_creates_no_shard(kind, method, name):
    world = World()
    client = world.process()
    for bad in WRONG[kind][method][name]:
        right = {"schema": SCHEMA} if method == "initialise" else {"schema": SCHEMA, "purpose": "test"}
        call = partial(getattr(kind, method), client)
        with pytest.raises(InvalidUsage):
            call(world.shard_id(), **{**right, name: bad})
    assert list(client.shards()) == []


def test_a_shard_id_may_be_given_as_text(place):
    assert place.client.recent_upper(str(place.shard_id)) == place.client.recent_upper(place.shard_id)
    with pytest.raises(InvalidUsage, match="schema must be a Schema, not a dict"):
        place.client.open_writer(ShardId.new(), {"id": "int"}, purpose="test")
    with pytest.raises(InvalidUsage, match="location must be a Location, not a str") as raised:
        PersistClient.open("redis://:secret@host/0")
    assert "secret" not in str(raised.value)
