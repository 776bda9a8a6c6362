"""Each critical alert, from its cause to a real Alertmanager and back: the operator as a process, a real Redis, the rules as the chart makes
them in a real Prometheus. Only `for` is short, and the threshold of the queue.
"""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from inline_house import Kubelet
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.rows.schema import Schema
from persist_kit.prometheus import alertmanager_server, prometheus_server
from persist_kit.servers import free_port, redis_server
from persist_operator.api import conditions, names, times
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK
from replicas import Replica, eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

CHART = Path(__file__).resolve().parents[2] / "charts" / "persist-operator"
LEADERS = ("PersistOperatorNoLeader", "PersistOperatorDown")
SLICES = ("PersistOperatorSliceUnowned",)
QUEUE = ("PersistOperatorQueueStuck",)
STORES = ("PersistShardStorageUnreachable", "PersistShardLongNotReady")
DATA = (
    "PersistShardDeletionDeadlineMissed",
    "PersistShardBlobsMissing",
    "PersistShardCorrupt",
    "PersistShardLogForked",
)
SINKS = ("SparkSinkCrashLooping", "SparkSinkStalled", "SparkSinkFarBehind", "SparkSinkVeryStale")
EVERY = {*LEADERS, *SLICES, *QUEUE, *STORES, *DATA, *SINKS}
SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
DECLARED = {"schema": {"key": "id BIGINT", "value": "name STRING"}}
STREAM = {"mode": "Streaming", "freshness": {"targetSeconds": 60}}
PAST_MS = 3_600_000


def critical():
    groups = yaml.safe_load((CHART / "files/monitoring/alerts.yaml").read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"] if rule["severity"] == "critical"}


def rules():
    """The groups of the chart's PrometheusRule, as helm renders it, without its alerts that are not critical."""
    helm = shutil.which("helm", path=f"{os.environ['PATH']}:{Path.home()}/.cache/persist-operator/bin")
    assert helm, "helm is not installed: run `bash .ci/tools.sh helm`"
    values = {"enabled": True, "for": dict.fromkeys(sorted(critical()), "1s"), "thresholds": {"queueOldestSeconds": 3}}
    command = [
        helm,
        "template",
        "persist",
        str(CHART),
        "--kube-version=1.34.0",
        "--values=-",
        "--show-only=templates/prometheusrule.yaml",
    ]
    given = json.dumps({"prometheusRule": values})
    rendered = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=True)
    groups = yaml.load(rendered.stdout, yaml.CSafeLoader)["spec"]["groups"]
    for group in groups:
        group["rules"] = [one for one in group["rules"] if "record" in one or one["labels"]["severity"] == "critical"]
    return [group for group in groups if group["rules"]]


class PastEnv(SystemEnv):
    """The real environment, an hour ago."""

    def now_ms(self):
        return super().now_ms() - PAST_MS


class Site:
    """Replicas of the operator over one Redis, a kubelet that runs nothing unless `runs_pods`, and the alerts at the Alertmanager."""

    def __init__(self, folder, kubeconfig, server, redis, ports, alertmanager):
        self.folder, self.kubeconfig, self.server, self.redis = folder, kubeconfig, server, redis
        self.ports, self.alertmanager, self.replicas = ports, alertmanager, []
        self.kubelet, self.runs_pods = Kubelet(server.cluster, SystemEnv(), folder), False
        self.location = Location(blob=f"file://{folder}/blob", consensus=redis.url)

    def start(self, name="one", port=0, *, shares=False, **loop):
        loop = {
            "inspectSeconds": 1,
            "storeDeadlineSeconds": 5,
            "storeBreakerSeconds": 1,
            "backoffMaxSeconds": 2,
            **loop,
        }
        made = Replica(
            self.folder,
            self.kubeconfig,
            name,
            self.redis.url,
            take_over="Unowned",
            httpPort=self.ports[port],
            loop=loop,
            sharding={"enabled": shares},
        )
        self.replicas.append(made)
        return made

    def kill(self, replica):
        replica.process.kill()
        replica.process.wait()

    def happens(self, holds):
        """Waits for it, and lets pods run meanwhile."""

        def probe():
            if self.runs_pods:
                for kind in ("rollup", "compaction", "gc", "verify"):
                    self.kubelet.run(kind)
            return holds()

        return eventually(probe, pause_s=0.2)  # Prometheus evaluates four times a second

    def firing(self):
        found = self.alertmanager.firing()
        assert all(one["annotations"]["summary"] for one in found)
        return {one["labels"]["alertname"]: one["labels"] for one in found}

    def fires(self, *alerts, name=None):
        """Waits until they are at the Alertmanager, about the resource `name`."""

        def there():
            found = self.firing()
            return all(one in found and found[one].get("name") == name for one in alerts)

        assert self.happens(there), (alerts, self.firing())

    def ends(self, *alerts):
        assert self.happens(lambda: not self.firing().keys() & set(alerts)), (alerts, self.firing())

    def status(self, kind, name):
        return (self.server.cluster.get(kind, "team", name) or {}).get("status") or {}

    def annotate(self, kind, name, verb, value):
        annotation = f"{names.REQUEST_PREFIX}{verb}"
        self.server.cluster.edit(
            kind, "team", name, lambda one: one["metadata"].setdefault("annotations", {}).update({annotation: value})
        )


@pytest.fixture
def site(tmp_path, kubeconfig, server):
    ports = [free_port(), free_port()]
    targets = {f"127.0.0.1:{port}": {"namespace": "sys", "pod": f"persist-{port}"} for port in ports}
    with (
        redis_server() as redis,
        alertmanager_server() as alertmanager,
        prometheus_server(targets, groups=rules(), alertmanager=alertmanager.address),
    ):
        made = Site(tmp_path, kubeconfig, server, redis, ports, alertmanager)
        yield made
        for one in made.replicas:
            made.kill(one)


def test_every_critical_alert_has_its_cause_here():
    assert critical() == EVERY


def test_a_killed_leader_and_no_operator_at_all(site):
    """The Lease of a killed leader lasts, and nothing leads until it has run out."""
    one = site.start("one")
    assert eventually(one.leads)
    two = site.start("two", port=1)
    assert eventually(two.is_ready)
    site.ends(*LEADERS)
    site.kill(one)
    site.fires("PersistOperatorNoLeader")
    assert eventually(two.leads)
    site.ends(*LEADERS)
    site.kill(two)
    site.fires("PersistOperatorDown")
    assert eventually(site.start("three").leads)
    site.ends(*LEADERS)


def test_a_lost_replica_of_two_that_share_the_resources(site):
    """Its Lease lasts, and so long nothing reconciles its slices. The replica with the first slice counts as the leader."""
    replicas = [site.start("one", shares=True), site.start("two", port=1, shares=True)]
    assert eventually(lambda: sorted(one.metric("persist_operator_slices") or 0 for one in replicas) == [32, 32])
    site.ends(*LEADERS, *SLICES)
    (lost,) = [one for one in replicas if not one.leads()]
    site.kill(lost)
    site.fires(*SLICES)
    site.ends(*SLICES)


def test_a_store_that_is_cut_off(site, shard_resource):
    site.server.cluster.create(PERSIST_SHARD, shard_resource())
    site.start()
    assert site.happens(lambda: conditions.is_true(site.status(PERSIST_SHARD, "flights"), "Ready"))
    site.ends(*STORES)
    site.redis.stop()
    site.fires(*STORES, name="flights")
    site.redis.start()
    site.ends(*STORES)


def test_work_that_waits_behind_a_store_that_hangs(site, shard_resource):
    """One worker waits for Redis, and the other shards wait for the worker."""
    one = site.start(workers=1, storeDeadlineSeconds=60)
    assert eventually(one.leads)
    with site.redis.paused():
        for name in ("first", "second", "third"):
            site.server.cluster.create(PERSIST_SHARD, shard_resource(name=name, uid=f"uid-{name}"))
        site.fires(*QUEUE)
    site.ends(*QUEUE)
    for name in ("first", "second", "third"):
        assert site.happens(lambda name=name: conditions.is_true(site.status(PERSIST_SHARD, name), "Ready"))


class Aged:
    """A shard whose rows were retracted an hour ago and never compacted. No resource owned it before the one that takes it over."""

    def __init__(self, site, make):
        self.site, self.tries = site, 0
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None)
        self.client = PersistClient.open(site.location, env=PastEnv(), settings=settings)
        self.shard_id = ShardId.new()
        self.client.initialise(self.shard_id, SCHEMA)
        for diff in (1, -1):
            self.write((1, "a person", diff), (2 + diff, "another", 1))
        spec = {
            **DECLARED,
            "shardId": str(self.shard_id),
            "retention": {"sinceLagSeconds": 0},
            "compaction": {"deadlineSeconds": 300},
            "verify": {"mode": "Full", "intervalSeconds": 86400},
        }
        self.site.server.cluster.create(
            PERSIST_SHARD, make(spec, annotations={names.ANNOTATION_TAKE_OVER: str(self.shard_id)})
        )

    def write(self, *rows):
        """Commit (id, name, diff) at the present time of the client."""
        with self.client.open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            upper = writer.upper.time
            at = max(upper, self.client.machine(self.shard_id).env.now_ms())
            updates = [(((key,), (name,)), at, diff) for key, name, diff in rows]
            writer.compare_and_append(updates, expected_upper=upper, new_upper=at + 1)

    def parts(self):
        return sorted((self.site.folder / "blob" / str(self.shard_id)).glob("n*/p*"))

    def verify(self):
        self.tries += 1
        self.site.annotate(PERSIST_SHARD, "flights", "verify", str(self.tries))

    def copy_log(self, source, target):
        """Copy the log with this suffix over the one with that suffix, at once; without a suffix it is the log itself."""
        copy = "for i = 1, 3, 2 do redis.call('COPY', KEYS[i], KEYS[i + 1], 'REPLACE') end return 1"
        keys = [f"{{{self.shard_id}}}:{part}{suffix}" for part in "ml" for suffix in (source, target)]
        assert self.site.redis.command("EVAL", copy, "4", *keys) == b":1\r\n"


@pytest.fixture
def aged(site, shard_resource):
    made = Aged(site, shard_resource)
    with contextlib.closing(made.client):
        yield made


def test_a_missed_deadline_lost_and_damaged_blobs_and_a_log_that_was_rolled_back(site, aged):
    """The deadline is missed while no pod runs. The blobs and the log come back from copies."""
    operator = site.start()
    site.fires("PersistShardDeletionDeadlineMissed", name="flights")
    site.runs_pods = True
    site.ends("PersistShardDeletionDeadlineMissed")
    aged.write((9, "kept", 1))
    aged.verify()
    assert site.happens(lambda: site.status(PERSIST_SHARD, "flights").get("verification")), site.status(
        PERSIST_SHARD, "flights"
    )

    part = aged.parts()[-1]
    kept = part.read_bytes()
    part.unlink()
    aged.verify()
    site.fires("PersistShardBlobsMissing", name="flights")
    part.write_bytes(bytes(len(kept)))
    aged.verify()
    site.fires("PersistShardCorrupt", name="flights")
    site.ends("PersistShardBlobsMissing")
    part.write_bytes(kept)
    aged.verify()
    site.ends("PersistShardCorrupt")

    aged.copy_log("", "older")
    aged.write((10, "acknowledged", 1))
    seqno = int(aged.client.inspect(aged.shard_id).seqno)
    assert site.happens(lambda: site.status(PERSIST_SHARD, "flights")["frontiers"]["seqno"] >= seqno)
    aged.copy_log("", "newer")
    aged.copy_log("older", "")
    # One is about the resource, another one about what a process met.
    lost = {"alertname": "PersistShardLogForked", "name": "flights"}
    assert site.happens(lambda: any(lost.items() <= one["labels"].items() for one in site.alertmanager.firing()))
    aged.copy_log("newer", "")
    site.kill(operator)
    site.start("two")
    site.ends("PersistShardLogForked")


class Drivers:
    """The pods of a sink, which the operator creates and the test lets run, fail and succeed."""

    def __init__(self, site, sink):
        self.site, self.sink = site, sink

    def newest(self, earlier=""):
        """The name of the driver that waits to run, another one than `earlier`."""

        def found():
            name = self.site.status(SPARK_SINK, self.sink).get("driver", {}).get("podName", "")
            return name if name != earlier and self.site.server.cluster.get(POD, "team", name) else None

        assert self.site.happens(found), self.site.status(SPARK_SINK, self.sink)
        return found()

    def turns(self, name, phase, state, **annotations):
        now = times.to_text(SystemEnv().now_ms())
        times_of = {"startedAt": now, "finishedAt": now} if "terminated" in state else {"startedAt": now}
        state = {word: {**facts, **times_of} for word, facts in state.items()}

        def change(pod):
            pod["metadata"].setdefault("annotations", {}).update(annotations)
            pod["status"] = {"phase": phase, "containerStatuses": [{"name": "driver", "state": state}]}

        self.site.server.cluster.edit(POD, "team", name, change)

    def fail(self, name):
        self.turns(name, "Failed", {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such table"}})

    def succeed(self, name):
        report = json.dumps({"outcome": "Succeeded", "rows_read": 1, "updates_written": 1, "upper": 7})
        self.turns(name, "Succeeded", {"terminated": {"exitCode": 0, "message": report}})

    def streams(self, name, *, lag_ms, age_ms):
        """The driver reports a batch that took this long, and rows of an input that it read completely this long ago."""
        fresh_ms = SystemEnv().now_ms() - age_ms
        progress = json.dumps({"stage": "Streaming", "batches": 3, "lag_ms": lag_ms, "fresh_ms": fresh_ms})
        self.turns(name, "Running", {"running": {}}, **{names.ANNOTATION_PROGRESS: progress})


def test_a_sink_that_fails_gives_up_and_is_restarted_and_a_stream_far_behind(site, shard_resource, sink_resource):
    cluster = site.server.cluster
    cluster.create(PERSIST_SHARD, shard_resource())
    restart = {"restart": {"maxConsecutiveFailures": 4, "backoffSeconds": 1, "maxBackoffSeconds": 1}}
    cluster.create(SPARK_SINK, sink_resource(restart, name="batch", uid="uid-batch"))
    cluster.create(SPARK_SINK, sink_resource(STREAM, name="stream", uid="uid-stream"))
    site.start()
    batch, stream = Drivers(site, "batch"), Drivers(site, "stream")
    last = ""
    for _ in range(3):
        last = batch.newest(earlier=last)
        batch.fail(last)
    site.fires("SparkSinkCrashLooping", name="batch")
    last = batch.newest(earlier=last)
    batch.fail(last)
    site.fires("SparkSinkStalled", name="batch")
    site.annotate(SPARK_SINK, "batch", "restart", "1")
    batch.succeed(batch.newest(earlier=last))
    site.ends("SparkSinkCrashLooping", "SparkSinkStalled")

    running = stream.newest()
    stream.streams(running, lag_ms=1_600_000, age_ms=3_600_000)
    site.fires("SparkSinkFarBehind", "SparkSinkVeryStale", name="stream")
    stream.streams(running, lag_ms=1000, age_ms=0)
    site.ends("SparkSinkFarBehind", "SparkSinkVeryStale")
