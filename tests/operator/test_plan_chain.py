"""A sink that reads a shard: the plan waits for the shard, and the driver gets its id, its stores and their credentials."""

import dataclasses
import json

import pytest
from persist_operator.api import conditions
from persist_operator.api.shard import StoreLocation
from persist_operator.local import chains
from persist_operator.manifests.driver import driver_manifests
from persist_operator.plan.observed import Phase, ShardView, SinkObserved
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import AllowedNamespaces, OperatorSettings

READ = {"input": {"type": "Shard", "shard": {"name": "trips"}}, "envelope": {"type": "Mirror"}}
SHARD_ID = "s00000000-0000-4000-8000-0000000000aa"
WRITTEN = {
    "shardId": SHARD_ID,
    "schema": {"key": "id BIGINT", "value": ""},
    "frontiers": {"since": "5", "upper": "9", "seqno": 3},
}


@pytest.fixture
def view(make_shard, settings):
    """The view of PersistShard `trips` with changes of its status."""

    def make(*, is_stream=False, settings=settings, spec=None, **changes):
        shard = make_shard(spec, name="trips", status={**WRITTEN, **changes})
        return ShardView.of_input("trips", shard, settings, is_stream=is_stream)

    return make


def closed(since, upper):
    return {"frontiers": {"since": since, "upper": upper, "seqno": 3}}


def test_the_view_says_why_a_shard_cannot_be_read(view, make_shard, settings, now):
    def is_condition(name, status):
        made = {
            "type": name,
            "status": status,
            "reason": "R",
            "message": "why",
            "lastTransitionTime": "2026-09-20T00:00:00Z",
        }
        return {"conditions": [made]}

    assert ShardView.of_input("trips", None, settings, is_stream=False).reason == "InputNotFound"
    assert view().usable
    assert (view().reason, view().shard_id, view().message) == ("Resolved", SHARD_ID, f"reads {SHARD_ID}")
    assert view(shardId=None).reason == "InputNotReady"
    assert view(**is_condition("Stalled", "True")).reason == "InputStalled"
    assert view(**is_condition("StorageReachable", "False")).reason == "InputUnreachable"
    assert view(spec={"storageProfile": "other", "schema": {"key": "id BIGINT"}}).reason == "InputStalled"
    stranger = dataclasses.replace(
        settings.storage_profiles["default"], allowed_namespaces=AllowedNamespaces(names=("x",))
    )
    refused = view(settings=OperatorSettings(storage_profiles={"default": stranger}))
    assert refused.reason == "InputStalled"
    assert "does not allow namespace team" in refused.message
    assert view(**closed("0", "0")).reason == "InputNotWritten"
    assert view(is_stream=True, **closed("0", "0")).usable, "a stream waits for the first rows by itself"
    assert view(**closed("", "")).reason == "InputClosed"
    assert (view(**closed("7", "")).reason, view(is_stream=True, **closed("7", "")).reason) == (
        "Resolved",
        "InputClosed",
    )


@pytest.fixture
def world(world, view):
    made = world(READ)
    made.input = view()

    def step(*, after=1000):
        made.now += after
        observed = SinkObserved(shard=made.shard, input=made.input, runs=tuple(made.runs.values()))
        made.plan = plan_sink(
            made.make_sink(made.spec, status=made.status), observed, now_ms=made.now, settings=made.settings
        )
        made.status = made.plan.status
        made.act()
        return made.plan

    made.step = step
    return made


def test_a_driver_starts_when_the_input_is_there_and_the_status_says_what_it_waits_for(world, view):
    world.input = view(**closed("0", "0"))
    world.step()
    assert world.starts() == []
    assert world.reason("InputResolved") == ("False", "InputNotWritten")
    assert (world.reason("Ready"), world.reason("Reconciling")) == (
        ("False", "InputNotWritten"),
        ("True", "InputNotWritten"),
    )
    world.input = view()
    world.step()
    (start,) = world.starts()
    assert (start.source.shard_id, world.status["run"]["inputShardId"]) == (SHARD_ID, SHARD_ID)
    assert world.reason("InputResolved") == ("True", "Resolved")
    world.succeeds(input_upper=9)
    world.step()
    assert world.status["progress"]["inputUpper"] == "9"
    assert world.reason("Ready") == ("True", "Completed")


def test_a_run_is_repeated_when_the_input_is_another_shard(world, view):
    world.step()
    world.succeeds()
    world.step()
    before = world.status["run"]["number"]
    world.step()
    assert world.status["run"]["number"] == before
    other = SHARD_ID.replace("aa", "bb")
    world.input = view(shardId=other)
    world.step()
    (start,) = world.starts()
    assert (start.source.shard_id, world.status["run"]["number"]) == (other, before + 1)


def test_a_stream_ends_when_its_input_is_another_shard(world, view):
    world.spec = {**world.spec, "mode": "Streaming", "envelope": {"type": "Diff", "diffColumn": "_diff"}}
    world.step()
    world.change(phase=Phase.RUNNING, started_ms=world.now)
    world.input = view(shardId=None)
    world.step()
    assert world.stops() == [], "an input that is not known for a moment ends nothing"
    world.input = view(shardId=SHARD_ID.replace("aa", "bb"))
    world.step()
    assert [one.reason for one in world.stops()] == ["the shard that it reads is another one"]


def test_a_sink_without_such_an_input_has_no_condition_for_it(make_sink, usable_shard, settings, now):
    plan = plan_sink(make_sink(), SinkObserved(shard=usable_shard), now_ms=now, settings=settings)
    assert conditions.find(plan.status, "InputResolved") is None


@pytest.mark.parametrize("secret", ["persist-store", "other-store", None])
def test_the_driver_and_its_executors_get_the_credentials_of_both_pairs_of_stores(world, view, settings, secret):
    world.step()
    (start,) = world.starts()
    stores = StoreLocation(blob="s3://other/data", consensus="redis://other:6379/0", secret_name=secret)
    start = dataclasses.replace(start, source=dataclasses.replace(start.source, location=stores))
    made = {one["kind"]: one for one in driver_manifests(start, world.make_sink().meta, settings, rpc_secret=b"x" * 32)}
    data = made["ConfigMap"]["data"]
    folder = {"persist-store": "store", "other-store": "input", None: None}[secret]
    query = f"?credentials_dir=/var/run/secrets/persist/{folder}" if folder else ""
    assert json.loads(data["sink.json"])["source"] == {
        "shard_id": SHARD_ID,
        "location": {"blob": f"s3://other/data{query}", "consensus": f"redis://other:6379/0{query}"},
    }
    for pod in (made["Pod"], json.loads(data["executor.yaml"])):
        secrets = {one["name"]: one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one}
        mounts = {one["name"]: one["mountPath"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
        assert secrets["store"] == "persist-store"
        assert secrets.get("store-input") == ("other-store" if secret == "other-store" else None)
        assert mounts.get("store-input") == ("/var/run/secrets/persist/input" if secret == "other-store" else None)


def sink(name, reads, writes):
    source = {"type": "Shard", "shard": {"name": reads}} if reads else {"type": "Format", "format": {"name": "csv"}}
    return {"metadata": {"name": name}, "spec": {"shardRef": {"name": writes}, "input": source}}


def test_sinks_run_after_those_that_write_what_they_read():
    sinks = [
        sink("a", "third", "fourth"),
        sink("b", "first", "third"),
        sink("c", None, "first"),
        sink("d", None, "third"),
    ]
    assert [one["metadata"]["name"] for one in chains.upstream_first(sinks)] == ["c", "b", "d", "a"]
    ring = [sink("b", "first", "second"), sink("a", "second", "first"), sink("c", None, "other")]
    assert [one["metadata"]["name"] for one in chains.upstream_first(ring)] == ["b", "a", "c"]


def test_a_sink_that_only_compares_runs_after_those_that_write_its_shard(make_sink, settings):
    comparing = sink("a", None, "first")
    comparing["spec"]["writeMode"] = "ReadOnly"
    sinks = [comparing, sink("b", "first", "second"), sink("c", None, "first")]
    assert [one["metadata"]["name"] for one in chains.upstream_first(sinks)] == ["c", "a", "b"]
    assert chains.written_by(comparing) is None, "nothing waits for it"
    compares, writes = make_sink({"writeMode": "ReadOnly", "envelope": {"type": "Mirror"}}), make_sink()
    name = compares.spec.shard_name
    assert chains.target_of(compares, None, settings, busy={name}).reason == "ShardBusy"
    assert chains.target_of(compares, None, settings, busy={"other"}).reason == "ShardNotFound"
    assert chains.target_of(writes, None, settings, busy={name}).reason == "ShardNotFound"


def test_the_name_of_an_input_may_be_an_id_on_a_laptop(make_sink, settings):
    named = make_sink({**READ, "input": {"type": "Shard", "shard": {"name": SHARD_ID}}})
    found = chains.input_of(named, None, settings, busy=frozenset())
    assert (found.usable, found.shard_id, found.location.profile) == (True, SHARD_ID, "default")
    unknown = chains.input_of(make_sink(READ), None, settings, busy=frozenset())
    assert unknown.reason == "InputNotFound"
    assert chains.input_of(make_sink(READ), None, settings, busy={"trips"}).reason == "InputBusy"
    assert chains.input_of(make_sink(), None, settings, busy={"trips"}) is None
