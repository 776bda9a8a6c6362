"""Streams from Kafka and the envelopes with commands on keys, on executors: every record once, whatever pod is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

KEYS, ROWS = 500, 200
KAFKA_SECRET = "/etc/kafka"
LOGIN = (
    'org.apache.kafka.common.security.plain.PlainLoginModule required username="persist" '
    f'password="${{secret:{KAFKA_SECRET}:password}}";'
)
#: No password: Kafka's clients in driver and executors read it from the mounted Secret.
CLIENT = {
    "kafka.bootstrap.servers": "kafka.persist-stores.svc:9092",
    "kafka.security.protocol": "SASL_PLAINTEXT",
    "kafka.sasl.mechanism": "PLAIN",
    "kafka.sasl.jaas.config": LOGIN,
    "kafka.config.providers": "secret",
    "kafka.config.providers.secret.class": "org.apache.kafka.common.config.provider.DirectoryConfigProvider",
}
AIRLINES = {"key": "carrier STRING", "value": "name STRING"}
GRACE_S = 120


def with_secret(container: str, **spec: Any) -> dict[str, Any]:
    """A pod of the sink with the Secret of Kafka."""
    mounts = [{"name": "kafka", "mountPath": KAFKA_SECRET, "readOnly": True}]
    volumes = [{"name": "kafka", "secret": {"secretName": "kafka"}}]
    pod = {"volumes": volumes, "containers": [{"name": container, "volumeMounts": mounts}]}
    return {"template": {"spec": pod}, **spec}


def stream_manifest(name: str, shard: str, topic: str) -> dict[str, Any]:
    options = {**CLIENT, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2000"}
    sql = "select r.* from (select from_json(cast(value as string), 'id BIGINT, number BIGINT') as r from input)"
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "SparkSink",
        "metadata": {"name": name},
        "spec": {
            "shardRef": {"name": shard},
            "mode": "Streaming",
            "commitIntervalSeconds": 1,
            "input": {"type": "Format", "format": {"name": "kafka", "options": options, "sql": sql}},
            "envelope": {"type": "Upsert", "orderColumn": "number"},
            "write": {"parallelism": 2},
            "spark": {"driver": with_secret("driver"), "executor": with_secret("executor", instances=2)},
            # Ready again when a driver has run for ten seconds after a failure.
            "restart": {"backoffSeconds": 1, "maxBackoffSeconds": 10},
            "timeouts": {"terminationGraceSeconds": GRACE_S},
        },
    }


class Stream:
    """A Streaming sink on the cluster, and its pods."""

    def __init__(self, cluster: Any, name: str) -> None:
        self.cluster, self.name = cluster, name

    def driver(self, *, after: str = "") -> str:
        """The pod of the driver that runs, other than `after`."""

        def running() -> str:
            name = str(self.cluster.status("sparksink", self.name).get("driver", {}).get("podName", ""))
            pod = self.cluster.get("pod", name) if name and name != after else None
            return name if pod is not None and pod["status"].get("phase") == "Running" else ""

        return str(self.cluster.wait("a running driver", running, timeout_s=300))

    def batches(self, driver: str) -> int:
        """How many batches with rows the driver has committed."""
        log = self.cluster.kubectl("logs", driver, "--tail=-1", check=False)
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        return sum(line.get("event") == "batch" and line["rows"] > 0 for line in lines)

    def commits(self, driver: str, count: int) -> None:
        """Waits until the driver has committed `count` batches more than now."""
        wanted = self.batches(driver) + count
        self.cluster.wait(f"{count} more batches", lambda: self.batches(driver) >= wanted, timeout_s=300)

    def executors(self, driver: str) -> list[str]:
        """The executors of the driver that run."""
        pods = self.cluster.items("pods", "spark-role=executor")
        mine = [pod for pod in pods if any(one["name"] == driver for one in pod["metadata"].get("ownerReferences", []))]
        return [pod["metadata"]["name"] for pod in mine if pod["status"].get("phase") == "Running"]

    def suspend(self, suspended: bool) -> None:
        patch = json.dumps({"spec": {"suspend": suspended}})
        self.cluster.kubectl("patch", "sparksink", self.name, "--type=merge", "--patch", patch)


def last_values(count: int) -> pa.Table:
    """What the shard holds after the records 0 to `count`: the last number of each key."""
    last = {n % KEYS: n for n in range(count)}
    columns = {"id": list(last), "number": list(last.values()), "diff": [1] * len(last)}
    return pa.table(columns, schema=pa.schema([(name, pa.int64()) for name in columns]))


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

    rounds = 80
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
    second = stream.driver(after=driver)
    stream.commits(second, 1)
    programs.finish(sender, timeout_s=300)
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
    options = {"path": "examples/flights/data/airlines.csv", "header": "true"}
    shards, sinks = {}, {}
    for name, (envelope, sql) in ENVELOPES.items():
        shard, shards[name] = new_shard(name, schema=AIRLINES)
        sinks[name] = named(name)
        declared = {"name": "csv", "schema": "carrier STRING, name STRING", "options": options, "sql": sql}
        spec = {
            "shardRef": {"name": shard},
            "input": {"type": "Format", "format": declared},
            "envelope": envelope,
            "spark": {"executor": {"instances": 1}},
        }
        cluster.apply(
            {
                "apiVersion": "persistshard.io/v1alpha1",
                "kind": "SparkSink",
                "metadata": {"name": sinks[name]},
                "spec": spec,
            }
        )
    airlines = source("airlines").select(["carrier", "name"]).to_pylist()
    for name, sink in sinks.items():
        cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
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
    declared = {
        "name": "csv",
        "schema": "carrier STRING, name STRING",
        "options": {"path": "examples/flights/data/airlines.csv", "header": "true"},
        "sql": sql,
    }

    def ended(name: str, **spec: Any) -> dict[str, Any]:
        """The status of a sink over the input, after its run."""
        manifest = {
            "apiVersion": "persistshard.io/v1alpha1",
            "kind": "SparkSink",
            "metadata": {"name": named(name)},
            "spec": {"shardRef": {"name": shard}, "input": {"type": "Format", "format": declared}, **spec},
        }
        cluster.apply(manifest)
        cluster.wait_condition("sparksink", manifest["metadata"]["name"], "Ready", reason="Completed", timeout_s=600)
        return dict(cluster.status("sparksink", manifest["metadata"]["name"]))

    carriers = source("airlines").column("carrier").to_pylist()
    bad = sum(carrier > "V" for carrier in carriers)
    envelope = {"type": "Upsert", "onError": "Collect"}
    written = ended("collects", envelope=envelope)["progress"]
    assert (written["rowsRead"], written["errors"], written["updatesWritten"]) == (len(carriers), bad, len(carriers))
    compared = ended("compares", envelope=envelope | {"type": "Mirror"}, writeMode="ReadOnly")
    assert (compared["progress"]["missing"], compared["progress"]["extra"]) == (0, 0)
    (converged,) = [one for one in compared["conditions"] if one["type"] == "Converged"]
    assert (converged["status"], converged["reason"]) == ("True", "Equal")


def test_a_new_revision_takes_over_under_load_without_a_gap(
    cluster: Any, programs: Any, content: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """One revision that writes the same is promoted by itself while records come. One that leaves records out is not, until it is requested."""
    shard, shard_id = new_shard("rollout", schema={"key": "id BIGINT", "value": "number BIGINT"})
    name = named("rollout")
    topic, stream, rounds = f"records-{name}", Stream(cluster, name), 240
    numbers = [str(number) for number in (0, rounds, ROWS, KEYS)]
    sender = str(programs.start("send_records", json.dumps(CLIENT), topic, *numbers, has_spark=True))
    cluster.wait(
        "the first records", lambda: "sent" in cluster.kubectl("logs", f"job/{sender}", check=False), timeout_s=180
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

    sql = manifest["spec"]["input"]["format"]["sql"]
    manifest["spec"]["input"]["format"]["sql"] = f"{sql} where r.id <> 7"
    cluster.apply(manifest)
    cluster.wait("a difference", lambda: rollout().get("extra", 0) > 0, timeout_s=400)
    assert rollout()["state"] == "CatchingUp"
    assert stream.driver() == green
    manifest["spec"]["input"]["format"]["sql"] = sql
    manifest["spec"]["input"]["format"]["options"]["maxOffsetsPerTrigger"] = "1900"
    cluster.apply(manifest)
    cluster.wait("the end of the rollout", lambda: not rollout(), timeout_s=60)
    assert stream.driver() == green
    programs.finish(sender, timeout_s=400)
    expected = content.content_hash(last_values(rounds * ROWS))
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
    sql = "select value as id, value as number from input"
    declared = {"name": "rate", "options": {"rowsPerSecond": "5"}, "sql": sql}
    manifest = {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "SparkSink",
        "metadata": {"name": name},
        "spec": {
            "shardRef": {"name": shard},
            "mode": "Streaming",
            "commitIntervalSeconds": 1,
            "input": {"type": "Format", "format": declared},
            "envelope": {"type": "Append"},
            "spark": {"executor": {"instances": 1}, "conf": {"spark.dynamicAllocation.executorIdleTimeout": "5s"}},
        },
    }
    cluster.apply(manifest)
    first = stream.driver()
    cluster.wait("one executor", lambda: len(stream.executors(first)) == 1, timeout_s=300)
    cluster.kubectl("scale", "sparksink", name, "--replicas=2")
    second = stream.driver(after=first)
    cluster.wait("two executors", lambda: len(stream.executors(second)) == 2, timeout_s=300)
    cluster.wait("their count", lambda: cluster.status("sparksink", name)["executors"]["running"] == 2, timeout_s=60)
    stream.commits(second, 2)

    allocation = {"spark": {"dynamicAllocation": {"enabled": True, "minExecutors": 1, "maxExecutors": 2}}}
    cluster.kubectl("patch", "sparksink", name, "--type=merge", "--patch", json.dumps({"spec": allocation}))
    third = stream.driver(after=second)
    cluster.wait("two executors again", lambda: len(stream.executors(third)) == 2, timeout_s=300, every_s=0.5)
    cluster.wait("one idle executor to go", lambda: len(stream.executors(third)) == 1, timeout_s=120)
    stream.commits(third, 2)
    cluster.wait_condition("sparksink", name, "Ready", timeout_s=60)
