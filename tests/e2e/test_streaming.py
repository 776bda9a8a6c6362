"""Streams from Kafka and the envelopes with commands on keys, on executors: every record once, whatever pod is lost."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_streams import (
    CLIENT,
    GRACE_S,
    KAFKA_SECRET,
    KEYS,
    LOGIN,
    RECORDS,
    ROWS,
    UPSERT,
    Stream,
    last_values,
    stream_manifest,
)
from live_cluster import OPERATOR_NAMESPACE
from shard_runs import patch
from sink_manifests import AIRLINES, airlines_input, airlines_sink, numbers_stream, sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

NAMESPACE = "persist-e2e"
PROGRAM = str(Path(sys.executable).parent / "kubectl-persist")


def test_a_stream_from_kafka_holds_every_record_once_although_its_pods_are_lost(
    cluster: Any, programs: Any, content: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """An executor is killed, then the driver. Then the sink is suspended, and resumed after more records have come."""
    shard, shard_id = new_shard("stream", schema={"key": "id BIGINT", "value": "number BIGINT"})
    name = named("stream")
    topic, stream = f"records-{name}", Stream(cluster, name)

    def send(first: int, rounds: int) -> str:
        numbers = [str(number) for number in (first, rounds, ROWS, KEYS)]
        return str(programs.start("send_records", json.dumps(CLIENT), topic, *numbers, has_spark=True))

    def wait_for(count: int) -> None:
        expected = content.content_hash(last_values(count))

        def equal() -> bool:
            read = programs.result("content", shard_id)
            return bool(read["upper"]) and read["hash"] == expected

        cluster.wait(f"the last values of {count} records", equal, timeout_s=300, every_s=3)

    rounds = 120
    sender = send(0, rounds)
    cluster.wait(
        "the first records", lambda: "sent" in cluster.kubectl("logs", f"job/{sender}", check=False), timeout_s=180
    )
    cluster.apply(stream_manifest(name, shard, topic))
    driver = stream.driver()
    stream.commits(driver, 2)
    cluster.wait_condition("sparksink", name, "Ready", timeout_s=60)

    executors = cluster.wait("two executors", lambda: stream.executors(driver)[1:] and stream.executors(driver))
    cluster.kill(executors[0])
    stream.commits(driver, 2)
    assert stream.driver() == driver, "Spark replaces an executor, and the driver goes on"

    cluster.kill(driver)
    again = send(rounds * ROWS, 20)  # the first records may all be committed by now
    second = stream.driver(after=driver)
    stream.commits(second, 1)
    for one in (sender, again):
        programs.finish(one, timeout_s=300)
    rounds += 20
    wait_for(rounds * ROWS)
    cluster.wait_condition("sparksink", name, "Ready", timeout_s=60)

    began = time.monotonic()
    stream.suspend(True)
    cluster.wait("the driver to end", lambda: cluster.get("pod", second) is None, timeout_s=GRACE_S + 60)
    assert time.monotonic() - began < GRACE_S, "it ended by itself"
    assert cluster.status("sparksink", name)["history"][0]["outcome"] == "Stopped"
    programs.finish(send(rounds * ROWS, 3), timeout_s=180)
    wait_for(rounds * ROWS)
    stream.suspend(False)
    stream.driver(after=second)
    wait_for((rounds + 3) * ROWS)

    expected = last_values((rounds + 3) * ROWS)
    read = programs.result("read_with_spark", shard_id, "id", "number", has_spark=True)
    assert read == {"rows": KEYS, "keys": KEYS, "sum": sum(expected["number"].to_pylist())}


@pytest.fixture
def login(cluster: Any) -> Iterator[tuple[str, str]]:
    """A Secret with an option of Kafka that holds the password, and the password."""
    held = cluster.get("secret", "kafka", "persist-stores")["data"]["password"]
    password = base64.b64decode(held).decode()
    option = LOGIN.replace(f"${{secret:{KAFKA_SECRET}:password}}", password)
    assert password in option
    data = {"kafka.sasl.jaas.config": base64.b64encode(option.encode()).decode()}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "api-key"}, "data": data})
    yield "api-key", password
    cluster.delete("secret", "api-key")


def test_an_option_in_a_secret_reaches_kafka_and_stands_nowhere_else(
    cluster: Any,
    programs: Any,
    content: Any,
    login: tuple[str, str],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    """A run over a topic, whose driver and executors get the password as an option. No pod mounts the Secret of the other tests."""
    secret, password = login
    shard, shard_id = new_shard("secret", schema={"key": "id BIGINT", "value": "number BIGINT"})
    name = named("secret")
    numbers = [str(number) for number in (0, 2, ROWS, KEYS)]
    programs.result("send_records", json.dumps(CLIENT), f"records-{name}", *numbers, has_spark=True)
    stated = {key: value for key, value in CLIENT.items() if "config" not in key}
    options = {**stated, "subscribe": f"records-{name}", "startingOffsets": "earliest", "endingOffsets": "latest"}
    declared = {"name": "kafka", "options": options, "sql": RECORDS, "optionsSecretName": secret}
    cluster.apply(
        sink(
            name,
            shard,
            input={"type": "Format", "format": declared},
            envelope=UPSERT,
            cleanup={"retainDriver": "Always"},
        )
    )
    cluster.wait_condition("sparksink", name, "Ready", reason="Completed", timeout_s=400)
    assert programs.result("content", shard_id)["hash"] == content.content_hash(last_values(2 * ROWS))
    driver = cluster.status("sparksink", name)["driver"]["podName"]
    assert secret in json.dumps(cluster.get("pod", driver)["spec"]["volumes"])
    shown = cluster.kubectl("get", "sparksinks,pods,configmaps,services,events", "-o", "json")
    shown += cluster.kubectl("logs", driver, "--tail=-1")
    assert driver in shown
    assert password not in shown


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("spec.commitIntervalSeconds", "FIELD: commitIntervalSeconds <integer>"),
        ("spec.envelope.type", "Debezium"),
        ("spec.envelope.deleteColumn", "Upsert only"),
        ("spec.envelope.diffColumn", "Diff only"),
    ],
)
def test_kubectl_explains_the_fields_of_streams_and_envelopes(cluster: Any, path: str, words: str) -> None:
    assert words in cluster.kubectl("explain", f"sparksink.{path}")


ROW = "struct<carrier: string, name: string>"
ENVELOPES = {
    "upsert": (
        {"type": "Upsert", "orderColumn": "version"},
        "select carrier, name, 1 as version from input union all select carrier, upper(name), 2 from input where carrier < 'C' "
        "union all select 'gone', null, 3",
    ),
    "debezium": (
        {"type": "Debezium"},
        f"select cast(null as {ROW}) as before, named_struct('carrier', carrier, 'name', name) as after, 'r' as op, 1L as ts_ms from input "
        "union all select named_struct('carrier', carrier, 'name', name), named_struct('carrier', carrier, 'name', upper(name)), 'u', 2L "
        "from input where carrier < 'C' "
        f"union all select named_struct('carrier', carrier, 'name', name), cast(null as {ROW}), 'd', 3L from input where carrier > 'V'",
    ),
    "diff": (
        {"type": "Diff", "diffColumn": "d"},
        "select carrier, name, 2L as d from input union all select carrier, name, -1L from input where carrier >= 'C'",
    ),
}


def wanted(name: str, carrier: str, text: str) -> tuple[str, int] | None:
    """The name and the count that an airline has after the sink."""
    if name == "diff":
        return text, 1 if carrier >= "C" else 2
    if name == "debezium" and carrier > "V":
        return None
    return (text.upper() if carrier < "C" else text), 1


def test_batch_sinks_with_each_envelope_of_commands(
    cluster: Any,
    programs: Any,
    content: Any,
    source: Callable[[str], Any],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    shards, sinks = {}, {}
    for name, (envelope, sql) in ENVELOPES.items():
        shard, shards[name] = new_shard(name, schema=AIRLINES)
        sinks[name] = named(name)
        cluster.apply(airlines_sink(sinks[name], shard, input=airlines_input(sql=sql), envelope=envelope))
    airlines = source("airlines").select(["carrier", "name"]).to_pylist()
    for name, applied in sinks.items():
        cluster.wait_condition("sparksink", applied, "Ready", reason="Completed", timeout_s=600)
        rows = [(row["carrier"], wanted(name, row["carrier"], row["name"])) for row in airlines]
        kept = [(carrier, *row) for carrier, row in rows if row is not None]
        columns = dict(zip(("carrier", "name", "diff"), map(list, zip(*kept, strict=True)), strict=True))
        assert programs.result("content", shards[name])["hash"] == content.content_hash(pa.table(columns)), name


def test_a_sink_collects_errors_and_another_one_proves_that_the_shard_equals_its_input(
    cluster: Any,
    source: Callable[[str], Any],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    shard, _ = new_shard("errors", schema={"key": "carrier STRING, err STRING", "value": "name STRING"})
    sql = "select carrier, name, if(carrier > 'V', concat(carrier, ' is bad'), null) as err from input"
    declared = airlines_input(sql=sql)

    def ended(name: str, **spec: Any) -> dict[str, Any]:
        """The status of a sink over the input, after its run."""
        writer = named(name)
        cluster.apply(sink(writer, shard, input=declared, **spec))
        cluster.wait_condition("sparksink", writer, "Ready", reason="Completed", timeout_s=600)
        return dict(cluster.status("sparksink", writer))

    carriers = source("airlines").column("carrier").to_pylist()
    bad = sum(carrier > "V" for carrier in carriers)
    envelope = {"type": "Upsert", "onError": "Collect"}
    written = ended("collects", envelope=envelope)["progress"]
    assert (written["rowsRead"], written["errors"], written["updatesWritten"]) == (len(carriers), bad, len(carriers))
    compared = ended("compares", envelope=envelope | {"type": "Mirror"}, writeMode="ReadOnly")
    assert (compared["progress"]["missing"], compared["progress"]["extra"]) == (0, 0)
    (converged,) = [one for one in compared["conditions"] if one["type"] == "Converged"]
    assert (converged["status"], converged["reason"]) == ("True", "Equal")


@pytest.mark.wish(10)
def test_wish_a_new_revision_of_a_sink_takes_over_under_load_without_a_gap(
    cluster: Any, programs: Any, content: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """Of revisions that write the same, one is promoted by itself while records come, another one when a person asks. One that leaves records
    out is not.
    """
    shard, shard_id = new_shard("rollout", schema={"key": "id BIGINT", "value": "number BIGINT"})
    name = named("rollout")
    topic, stream, rounds = f"records-{name}", Stream(cluster, name), 240
    senders: list[str] = []

    def sends() -> str:
        """From now on records come for some minutes."""
        numbers = [str(number) for number in (len(senders) * rounds * ROWS, rounds, ROWS, KEYS)]
        senders.append(programs.start("send_records", json.dumps(CLIENT), topic, *numbers, has_spark=True))
        return senders[-1]

    first = sends()
    cluster.wait(
        "the first records", lambda: "sent" in cluster.kubectl("logs", f"job/{first}", check=False), timeout_s=180
    )
    manifest = stream_manifest(name, shard, topic)
    manifest["spec"]["rollout"] = {"strategy": "BlueGreen", "timeoutSeconds": 900}
    manifest["spec"]["spark"]["executor"]["instances"] = 1
    cluster.apply(manifest)
    blue = stream.driver()
    stream.commits(blue, 2)
    cluster.wait_condition("sparksink", name, "Ready", timeout_s=60)

    def rollout() -> dict[str, Any]:
        return dict(cluster.status("sparksink", name).get("rollout", {}))

    manifest["spec"]["input"]["format"]["options"]["maxOffsetsPerTrigger"] = "1900"
    cluster.apply(manifest)
    green = stream.driver(after=blue)
    assert not rollout(), "the new driver is the sink's, and the rollout is over"
    cluster.wait("the end of the former driver", lambda: cluster.get("pod", blue) is None, timeout_s=180)
    cluster.wait_condition("sparksink", name, "Ready", timeout_s=10)
    events = {one["reason"] for one in cluster.items("events") if one["involvedObject"]["name"] == name}
    assert {"RolloutStarted", "Promoted"} <= events

    sends()
    manifest["spec"]["rollout"]["promotion"] = "Manual"
    manifest["spec"]["input"]["format"]["options"]["maxOffsetsPerTrigger"] = "1800"
    cluster.apply(manifest)
    cluster.wait("a revision that is equal", lambda: rollout().get("state") == "ReadyToPromote", timeout_s=400)
    assert stream.driver() == green
    cluster.run(PROGRAM, "promote", name, "--wait", "-n", NAMESPACE, timeout_s=400)
    green = stream.driver(after=green)

    sends()
    sql = manifest["spec"]["input"]["format"]["sql"]
    manifest["spec"]["input"]["format"]["sql"] = f"{sql} where r.id <> 7"
    cluster.apply(manifest)
    cluster.wait("a difference", lambda: rollout().get("extra", 0) > 0, timeout_s=400)
    assert rollout()["state"] == "CatchingUp"
    assert stream.driver() == green
    manifest["spec"]["input"]["format"]["sql"] = sql
    cluster.apply(manifest)
    cluster.wait("the end of the rollout", lambda: not rollout(), timeout_s=60)
    assert stream.driver() == green
    for sender in senders:
        programs.finish(sender, timeout_s=400)
    expected = content.content_hash(last_values(len(senders) * rounds * ROWS))
    cluster.wait(
        "the last values", lambda: programs.result("content", shard_id)["hash"] == expected, timeout_s=300, every_s=3
    )


def test_executors_follow_kubectl_scale_and_then_the_load(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """By the scale subresource a stream gets a driver with as many executors. With dynamic allocation Spark lets idle ones go."""
    shard, _ = new_shard("scale", schema={"key": "id BIGINT", "value": "number BIGINT"})
    name = named("scale")
    stream = Stream(cluster, name)
    idle = {"spark.dynamicAllocation.executorIdleTimeout": "5s"}
    cluster.apply(numbers_stream(name, shard, spark={"executor": {"instances": 1}, "conf": idle}))
    first = stream.driver()
    cluster.wait("one executor", lambda: len(stream.executors(first)) == 1, timeout_s=300)
    cluster.kubectl("scale", "sparksink", name, "--replicas=2")
    second = stream.driver(after=first)
    cluster.wait("two executors", lambda: len(stream.executors(second)) == 2, timeout_s=300)
    cluster.wait("their count", lambda: cluster.status("sparksink", name)["executors"]["running"] == 2, timeout_s=60)
    stream.commits(second, 2)

    allocation = {"dynamicAllocation": {"enabled": True, "minExecutors": 1, "maxExecutors": 2}}
    patch(cluster, "sparksink", name, {"spark": allocation})
    third = stream.driver(after=second)
    cluster.wait("two executors again", lambda: len(stream.executors(third)) == 2, timeout_s=300, every_s=0.5)
    cluster.wait("one idle executor to go", lambda: len(stream.executors(third)) == 1, timeout_s=120)
    stream.commits(third, 2)
    cluster.wait_condition("sparksink", name, "Ready", timeout_s=60)


def test_a_stream_that_is_asked_to_stop_ends_by_itself_and_its_pod_stays_with_its_log(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """The network policy lets the operator reach the driver. What the driver committed, it reports, and a resumed sink continues from there."""

    def has_key() -> bool:
        program = "import pathlib; print(len(pathlib.Path('/var/run/secrets/persist/stop/key').read_bytes()))"
        operator = cluster.operator_pod()["metadata"]["name"]
        words = ("exec", operator, "--", "python3", "-c", program)
        return bool(cluster.kubectl(*words, namespace=OPERATOR_NAMESPACE, check=False).strip() == "32")

    cluster.wait("the key in the operator's pod", has_key, timeout_s=180, namespace=OPERATOR_NAMESPACE)
    shard, _ = new_shard("stop", schema={"key": "id BIGINT", "value": "number BIGINT"})
    name = named("stop")
    stream = Stream(cluster, name)
    cluster.apply(numbers_stream(name, shard, cleanup={"retainDriver": "Always"}))
    driver = stream.driver()
    stream.commits(driver, 2)
    arguments = cluster.get("pod", driver)["spec"]["containers"][0]["args"]
    assert {"--stop-port", "--stop-digest"} <= set(arguments)

    stream.suspend(True)
    cluster.wait_condition("sparksink", name, "Ready", reason="Suspended", timeout_s=120)
    pod = cluster.get("pod", driver)
    assert pod["status"]["phase"] == "Succeeded"
    assert "deletionTimestamp" not in pod["metadata"], "it was not deleted"
    log = cluster.kubectl("logs", driver, "--tail=-1")
    assert '"event": "stop_asked"' in log
    report = json.loads(log.splitlines()[-1])
    assert (report["outcome"], report["class"]) == ("Stopped", None)
    status = cluster.status("sparksink", name)
    assert status["driver"]["phase"] == "Succeeded"
    assert status["progress"]["upper"] == str(report["upper"])
    (item,) = [one for one in status["history"] if one["attempt"] == status["attempt"]]
    assert (item["outcome"], item["message"]) == ("Stopped", f"stopped: suspended; {report['message']}")
    assert stream.executors(driver) == []
    events = {one["reason"] for one in cluster.items("events") if one["involvedObject"]["name"] == name}
    assert "DriverStopped" in events

    stream.suspend(False)
    second = stream.driver(after=driver)
    stream.commits(second, 1)
    assert cluster.get("pod", driver) is not None
