"""Streams from Kafka on the live cluster: the options of its clients, a sink over a topic, the pods of that sink, and what its shard holds in the end."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from shard_runs import patch
from sink_manifests import sink

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
RECORDS = "select r.* from (select from_json(cast(value as string), 'id BIGINT, number BIGINT') as r from input)"
UPSERT = {"type": "Upsert", "orderColumn": "number"}
GRACE_S = 120


def with_secret(container: str, **spec: Any) -> dict[str, Any]:
    """A pod of the sink with the Secret of Kafka."""
    mounts = [{"name": "kafka", "mountPath": KAFKA_SECRET, "readOnly": True}]
    volumes = [{"name": "kafka", "secret": {"secretName": "kafka"}}]
    pod = {"volumes": volumes, "containers": [{"name": container, "volumeMounts": mounts}]}
    return {"template": {"spec": pod}, **spec}


def stream_manifest(name: str, shard: str, topic: str) -> dict[str, Any]:
    options = {**CLIENT, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2000"}
    return sink(
        name,
        shard,
        mode="Streaming",
        commitIntervalSeconds=1,
        input={"type": "Format", "format": {"name": "kafka", "options": options, "sql": RECORDS}},
        envelope=UPSERT,
        write={"parallelism": 2},
        spark={"driver": with_secret("driver"), "executor": with_secret("executor", instances=2)},
        # Ready again when a driver has run for ten seconds after a failure.
        restart={"backoffSeconds": 1, "maxBackoffSeconds": 10},
        timeouts={"terminationGraceSeconds": GRACE_S},
    )


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
        patch(self.cluster, "sparksink", self.name, {"suspend": suspended})


def last_values(count: int) -> pa.Table:
    """What the shard holds after the records 0 to `count`: the last number of each key."""
    last = {n % KEYS: n for n in range(count)}
    columns = {"id": list(last), "number": list(last.values()), "diff": [1] * len(last)}
    return pa.table(columns, schema=pa.schema([(name, pa.int64()) for name in columns]))
