"""Statuses as values: they have exactly the fields of the resource definitions, survive the wire, and equal the recorded statuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_kit.depth import draws
from persist_operator.api import blocks, names
from persist_operator.api.shard_status import Inspections, ShardStatus
from persist_operator.api.sink_status import RunState, SinkStatus
from persist_operator.plan.observed import Phase, Run, ShardMissing, ShardObserved, StoreFailure
from persist_operator.plan.shard import plan_shard

#: Recorded statuses of two lives, from plans that built a status as a dictionary.
LIVES = json.loads((Path(__file__).parent / "status_lives.json").read_text())
KINDS = {"persistshards": ShardStatus, "sparksinks": SinkStatus}


def definition(file):
    (version,) = yaml.safe_load((Path(__file__).parents[2] / "crds" / f"{file}.yaml").read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["status"]


def block_in(hint):
    """The type of block that a field or each of its items holds; None for plain values."""
    if isinstance(hint, type) and issubclass(hint, blocks.Block):
        return hint
    if get_origin(hint) is tuple:
        return block_in(get_args(hint)[0])
    if get_origin(hint) is Mapping:
        return block_in(get_args(hint)[1])
    return next(filter(None, map(block_in, get_args(hint))), None)


def differences(block, schema, path):
    hints, members = get_type_hints(block), blocks.members(block)
    found = {one.wire for one in members} ^ set(schema["properties"])
    out = [f"{path}.{name}" for name in found]
    for one in members:
        inner, below = block_in(hints[one.name]), schema["properties"].get(one.wire, {})
        if inner is None:
            continue
        if get_origin(next(iter(get_args(hints[one.name])), None)) is Mapping:
            for name, each in below["properties"].items():
                out += differences(inner, each, f"{path}.{one.wire}.{name}")
        else:
            out += differences(inner, below.get("items", below), f"{path}.{one.wire}")
    return out


@pytest.mark.parametrize("file", KINDS)
def test_a_status_has_exactly_the_fields_of_its_definition(file):
    assert differences(KINDS[file], definition(file), "status") == []


def drawn(schema):
    """A strategy for values of a schema. Objects are empty only where any names are allowed."""
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {name: drawn(one) for name, one in schema["properties"].items()}
            return st.fixed_dictionaries({}, optional=fields).filter(bool)
        case "object":
            return st.dictionaries(st.text(max_size=4), drawn(schema["additionalProperties"]), max_size=2)
        case "array":
            return st.lists(drawn(schema["items"]), max_size=2)
        case "integer":
            return st.integers(min_value=schema.get("minimum", -5), max_value=9)
        case _:
            return st.sampled_from(schema["enum"]) if "enum" in schema else st.text(max_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("file", KINDS)
def test_a_status_survives_the_wire(file):
    @settings(max_examples=draws(60), deadline=None)
    @given(drawn(definition(file)))
    def survives(wire):
        assert KINDS[file].of(wire).wire() == wire

    survives()


def test_absent_null_and_unknown_fields_are_no_values():
    assert SinkStatus.of({"attempt": None, "surprise": 1, "run": {"shardId": "s", "other": 2}}) == SinkStatus(
        run=RunState(shard_id="s")
    )
    assert SinkStatus().wire() == {}
    assert ShardStatus(inspection=Inspections(), maintenance={}, history=()).wire() == {
        "inspection": {},
        "maintenance": {},
        "history": [],
    }


def sink_life(world):
    one = world({"mode": "Once", "restart": {"backoffSeconds": 10}})
    statuses = []

    def look(**options):
        one.step(**options)
        statuses.append(one.status)

    look()
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    look()
    one.fails(message="boom")
    look()
    look(after=11_000)
    one.change(phase=Phase.RUNNING, started_ms=one.now)
    one.succeeds()
    look()
    one.metadata = {"annotations": {f"{names.REQUEST_PREFIX}restart": "again"}}
    look()
    one.change(deleting=True, deleted_ms=one.now)
    look()
    one.runs.clear()
    look()
    one.spec["suspend"] = True
    look(after=60_000)
    return statuses


def shard_life(make_shard, make_inspection, operator_settings, now):
    shard_id, statuses, status = names.shard_id_of("uid-shard"), [], None
    debt = {"seqno": 300, "gc_seqnos": 20, "uncompacted_batches": 99, "upper": now - 3000, "since": now - 9000}
    late = [
        Run(
            name=f"flights-{names.VERB[kind]}-300", kind=kind, phase=phase, created_ms=now + 3000, started_ms=now + 4000,
            finished_ms=now + 9000, seqno=300, report=report, planned_reason="because",
        )
        for kind, phase, report in (
            ("compaction", Phase.SUCCEEDED, {"outcome": "Succeeded", "bytes_read": 9, "bytes_written": 3, "message": "done"}),
            ("gc", Phase.FAILED, None),
            ("rollup", Phase.SUCCEEDED, {"outcome": "Skipped"}),
        )
    ]  # fmt: skip
    for inspected, runs, annotations in (
        (None, (), {}),
        (ShardMissing(), (), {}),
        (make_inspection(birth="ab", tag="cd"), (), {}),
        (make_inspection(**debt, waits_from_ms=now), (), {}),
        (make_inspection(**debt), late, {}),
        (StoreFailure(reason="StorageUnreachable", message="no answer"), (), {}),
        (make_inspection(**debt), (), {f"{names.REQUEST_PREFIX}gc": "now"}),
        (make_inspection(seqno=4), (), {f"{names.REQUEST_PREFIX}accept-log": "yes"}),
    ):
        observed = (
            ShardObserved()
            if inspected is None
            else ShardObserved(inspected=inspected, runs=tuple(runs), shard_id=shard_id)
        )
        now += 40_000
        shard = make_shard(status=status, annotations=annotations)
        status = plan_shard(shard, observed, now_ms=now, settings=operator_settings).status
        statuses.append(status)
    return statuses


def test_the_statuses_of_a_sinks_life_equal_the_recorded_ones(world):
    assert sink_life(world) == LIVES["sink"]


def test_the_statuses_of_a_shards_life_equal_the_recorded_ones(make_shard, make_inspection, now, request):
    assert shard_life(make_shard, make_inspection, request.getfixturevalue("settings"), now) == LIVES["shard"]
