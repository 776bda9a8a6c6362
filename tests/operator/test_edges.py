"""The edges of the operator: lease, children, bridge, settings, probes, redaction."""

import http.client
import json
import threading
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, ShardNotFound, Unavailable
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Adopted, Owner
from persist_operator.api import names, quantity, times
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard import ShardSchema, StoreLocation
from persist_operator.bridge import Bridge, BridgeFailure
from persist_operator.cluster.lease import Election
from persist_operator.cluster.port import LEASE, ApiError
from persist_operator.handlers import controller as controller_module
from persist_operator.handlers.controller import Controller, Pressure
from persist_operator.handlers.logs import JsonFormatter
from persist_operator.handlers.probes import ProbeServer
from persist_operator.plan.actions import AdvanceSince, InitialiseShard
from persist_operator.plan.observed import Claim, NotOwned, Phase, Seen, ShardMissing, StoreFailure
from persist_operator.settings import LeaderSettings, LoopSettings, OperatorSettings
from persist_operator.steps.children import driver_run, executors, maintenance_run
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

SHARD_ID = names.shard_id_of("u")
OWNER = Owner("op", "team", "flights")
CLAIM = Claim(owner=OWNER, wanted=None, proposed=SHARD_ID)


# -- lease ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def env(now):
    return SeededEnv(start_ms=now)


@pytest.fixture
def cluster(env):
    return FakeCluster(now_ms=env.now_ms)


@pytest.fixture
def candidate(cluster, env):
    return lambda name: Election(cluster, LeaderSettings(lease_seconds=15, renew_seconds=5), name, env)


def test_a_leader_leads_while_it_renews_and_a_standby_takes_over_when_it_stops(candidate, env):
    first, second = candidate("a"), candidate("b")
    assert first.tick()
    for _ in range(10):
        env.advance_ms(5000)
        assert (first.tick(), second.tick()) == (True, False)
    env.advance_ms(14_000)
    assert not second.tick()
    env.advance_ms(1000)
    assert not first.is_leader
    assert second.tick()
    assert (first.tick(), second.is_leader) == (False, True)


def test_a_released_lease_is_taken_at_once(candidate, env):
    first, second = candidate("a"), candidate("b")
    assert first.tick()
    first.release()
    assert (first.is_leader, second.tick()) == (False, True)


def test_a_leader_survives_failures_only_until_its_lease_is_over(candidate, cluster, env):
    first = candidate("a")
    assert first.tick()
    cluster.fail_next = [ApiError("no answer", status=0)] * 3
    env.advance_ms(5000)
    assert first.tick()
    env.advance_ms(10_000)
    assert not first.tick()


def test_one_of_two_candidates_that_take_the_lease_at_once_wins(candidate, cluster, env):
    first, second = candidate("a"), candidate("b")
    following = cluster.intercept

    def second_takes_after_the_read(request):
        answer = request.send()
        cluster.intercept = following
        assert second.tick()
        return answer

    cluster.intercept = second_takes_after_the_read
    assert not first.tick()
    assert cluster.get(LEASE, "persist-operator", "persist-operator")["spec"]["holderIdentity"] == "b"


@pytest.mark.slow
def test_a_standby_reconciles_no_key_and_loses_none(cluster):
    """A process that slept for longer than its Lease is a standby before it notices."""
    done, leads, refused, acted = [], threading.Event(), threading.Semaphore(0), threading.Event()

    class Recorder:
        def reconcile(self, key):
            done.append(key)
            acted.set()

    def may_act():
        refused.release()
        return leads.is_set()

    settings = OperatorSettings(loop=LoopSettings(workers=1))
    metrics = OperatorMetrics(CollectorRegistry())
    controller = Controller(Recorder(), cluster, settings, SystemEnv(), metrics, may_act=may_act)
    controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": "a"}})
    controller.start()
    try:
        assert refused.acquire(timeout=60)
        assert refused.acquire(timeout=60), "the controller takes the key again: it was neither lost nor reconciled"
        assert done == []
        leads.set()
        assert acted.wait(60)
    finally:
        controller.stop()
    assert [str(key) for key in done] == ["SparkSink/n/a"]


def taken_by(cluster, monkeypatch, *, is_high, workers=6):
    """The names of the workers that took the keys of a controller, each of which waits until as many as can have one."""
    monkeypatch.setattr(controller_module, "PAUSE_S", 3600)
    meet, names = threading.Barrier(controller_module.BUSY_WORKERS if is_high else workers), []
    all_taken = threading.Event()

    class Recorder:
        def reconcile(self, key):
            names.append(threading.current_thread().name)
            if len(names) == 60:
                all_taken.set()
            meet.wait(60)

    settings = OperatorSettings(loop=LoopSettings(workers=workers))
    controller = Controller(Recorder(), cluster, settings, SystemEnv(), OperatorMetrics(CollectorRegistry()))
    controller._pressure.is_high = lambda: is_high
    for number in range(60):
        controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": f"sink-{number}"}})
    controller.start()
    try:
        assert all_taken.wait(60)
    finally:
        controller.stop()
    return set(names)


def test_workers_beyond_the_first_pause_while_no_processor_is_left(cluster, monkeypatch):
    assert taken_by(cluster, monkeypatch, is_high=True) == {f"worker-{number}" for number in range(4)}


def test_all_workers_take_keys_while_processor_is_left(cluster, monkeypatch):
    assert taken_by(cluster, monkeypatch, is_high=False) == {f"worker-{number}" for number in range(6)}


def test_pressure_is_the_use_of_processor_over_the_last_interval():
    env, used = SeededEnv(), [0.0]
    pressure = Pressure(env, lambda: used[0])
    assert not pressure.is_high()
    used[0] += 0.5
    env.advance_ms(499)
    assert not pressure.is_high(), "the interval is not complete"
    env.advance_ms(1)
    assert pressure.is_high()
    used[0] += 0.1
    env.advance_ms(499)
    assert pressure.is_high()
    env.advance_ms(1)
    assert not pressure.is_high()


def test_a_change_of_a_shard_concerns_the_sinks_that_write_or_read_it(cluster):
    metrics = OperatorMetrics(CollectorRegistry())
    controller = Controller(None, cluster, OperatorSettings(), SystemEnv(), metrics, may_act=lambda: True)
    spec = {"shardRef": {"name": "target"}, "input": {"type": "Shard", "shard": {"name": "source"}}}
    controller.changed({"kind": "SparkSink", "metadata": {"namespace": "n", "name": "a"}, "spec": spec})
    for shard, concerned in (("target", True), ("source", True), ("other", False)):
        keys = controller._concerned({"kind": "PersistShard", "metadata": {"namespace": "n", "name": shard}})
        assert ("SparkSink/n/a" in map(str, keys)) is concerned


# -- children ---------------------------------------------------------------------------------------------------------


def pod(phase, *, state=None, status=None, **labels):
    container = [{"name": "c", "state": state}] if state else []
    return {
        "metadata": {"namespace": "n", "name": "p", "creationTimestamp": "2026-11-20T00:00:00Z", "labels": labels},
        "status": {"phase": phase, "containerStatuses": container, **(status or {})},
    }


def test_a_driver_without_container_statuses_is_understood():
    run = driver_run(pod("Failed", status={"reason": "NodeLost", "message": "node x went away"}))
    assert (run.phase, run.reason, run.exit_code) == (Phase.FAILED, "NodeLost", None)
    assert driver_run({"metadata": {"name": "p"}}).phase is Phase.PENDING


def test_a_pending_driver_carries_the_reason_it_waits():
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}
    assert driver_run(pod("Pending", state=waiting)).reason == "ImagePullBackOff"
    assert driver_run(pod("Pending", state={"waiting": {"reason": "ContainerCreating"}})).reason == ""
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]
    assert driver_run(pod("Pending", status={"conditions": conditions})).message == "0/2 nodes"


def test_a_report_is_read_from_the_termination_message_and_other_text_is_kept():
    def ended(message):
        return driver_run(pod("Failed", state={"terminated": {"exitCode": 70, "reason": "Error", "message": message}}))

    assert ended(json.dumps({"class": "Storage"})).report == {"class": "Storage"}
    assert (ended("Traceback").report, ended("Traceback").message) == (None, "Traceback")
    assert ended("[1]").report is None


def test_a_disruption_outranks_the_exit_reason_of_the_container():
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "m"}]
    state = {"terminated": {"exitCode": 143, "reason": "Error"}}
    assert driver_run(pod("Failed", state=state, status={"conditions": conditions})).reason == "PreemptionByScheduler"


def test_a_failed_job_carries_the_exit_reason_of_its_pod_or_pod_lost():
    labels = {names.LABEL_KIND: "gc", names.LABEL_SEQNO: "7"}
    ended = [
        {
            "type": "Failed",
            "status": "True",
            "reason": "BackoffLimitExceeded",
            "lastTransitionTime": "2026-11-20T00:00:09Z",
        }
    ]
    job = {"metadata": {"name": "j", "labels": labels}, "status": {"conditions": ended}}
    died = pod("Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    died["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "j"
    run = maintenance_run(job, [died])
    assert (run.phase, run.reason, run.seqno, run.exit_code) == (Phase.FAILED, "OOMKilled", 7, 137)
    assert run.finished_ms == times.to_ms("2026-11-20T00:00:09Z")
    assert maintenance_run(job, []).reason == "PodLost"
    ended[0]["reason"] = "DeadlineExceeded"
    assert maintenance_run(job, [died]).reason == "DeadlineExceeded"
    assert maintenance_run({"metadata": {"name": "other"}}, []) is None


def test_a_job_with_a_failure_target_counts_as_failed_before_its_pod_is_gone():
    """The node of the pod is cut off. If the Job counted as running, no other of its kind would ever start."""
    labels = {names.LABEL_KIND: "gc", names.LABEL_SEQNO: "7"}
    moment = "2026-11-20T00:00:09Z"
    ends = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded", "lastTransitionTime": moment}
    stuck = pod("Running", state={"running": {"startedAt": "2026-11-20T00:00:00Z"}})
    stuck["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "j"
    run = maintenance_run({"metadata": {"name": "j", "labels": labels}, "status": {"conditions": [ends]}}, [stuck])
    assert (run.phase, run.reason, run.finished_ms) == (Phase.FAILED, "DeadlineExceeded", times.to_ms(moment))


def test_a_sidecar_is_not_taken_for_the_driver():
    """The status of a sidecar may come first in the list. Its termination message is no report."""
    ended = {"exitCode": 70, "reason": "Error", "message": json.dumps({"class": "Storage"})}
    beside = {"name": "a-proxy", "state": {"terminated": {"exitCode": 0, "message": "bye"}}}
    found = pod("Failed")
    found["status"]["containerStatuses"] = [beside, {"name": "driver", "state": {"terminated": ended}}]
    run = driver_run(found)
    assert (run.exit_code, run.report) == (70, {"class": "Storage"})


def test_executors_are_counted_for_one_attempt():
    pods = [pod("Running", **{names.LABEL_ATTEMPT: "2"}), pod("Failed", **{names.LABEL_ATTEMPT: "2"}), pod("Running")]
    counted = executors(pods, 2)
    assert (counted.running, counted.pending, counted.failed) == (1, 0, 1)


# -- bridge -----------------------------------------------------------------------------------------------------------

LOCATION = StoreLocation(blob="s3://b", consensus="redis://r:6379/0")
OTHER = StoreLocation(blob="s3://other", consensus="redis://r:6379/0")


class Client:
    """Returns or raises the answer that the test sets."""

    def __init__(self):
        self.calls, self.answer = 0, None

    def adopt(self, owner, wanted, proposed, *, take_over):
        return Adopted(proposed, is_new=False)

    def has_log(self, shard_id):
        return True

    def inspect(self, shard_id, *, known_seqno=None):
        self.calls += 1
        if callable(self.answer):
            return self.answer()
        raise self.answer

    def close(self):
        pass


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def bridge(client, env):
    settings = OperatorSettings(loop=LoopSettings(store_deadline_seconds=0.2, store_breaker_seconds=10))
    with Bridge(settings, env=env, open_client=lambda location: client) as made:
        yield made


def test_a_store_that_is_down_is_not_called_while_its_breaker_is_open(bridge, client, env):
    client.answer = Unavailable("redis://r:6379/0: connection refused")
    first = bridge.inspect(LOCATION, CLAIM).inspected
    assert (first.reason, first.permanent) == ("StorageUnreachable", False)
    assert bridge.inspect(LOCATION, CLAIM).inspected == first
    assert client.calls == 1
    bridge.inspect(OTHER, CLAIM)
    assert client.calls == 2
    env.advance_ms(10_001)
    client.answer = lambda: "alive"
    assert bridge.inspect(LOCATION, CLAIM).inspected == "alive"


@pytest.mark.slow
def test_a_call_to_a_store_that_hangs_ends_at_the_deadline(bridge, client):
    released = threading.Event()
    client.answer = released.wait
    try:
        found = bridge.inspect(LOCATION, CLAIM).inspected
    finally:
        released.set()
    assert isinstance(found, StoreFailure)
    assert "did not answer within 0.2 s" in found.message
    assert "redis://r:6379/0" in found.message


def test_regression_a_call_that_the_stop_of_the_operator_cuts_off_is_no_invalid_storage(bridge, client):
    """The engine reports a call on a closed client as misuse. The shard stalled with a wrong configuration for good."""

    def hanging():
        bridge.close()
        raise InvalidUsage("head s1 at redis://r:6379/0: the store was closed")

    client.answer = hanging
    found = bridge.inspect(LOCATION, CLAIM).inspected
    assert (found.reason, found.permanent) == ("StorageUnreachable", False)


@pytest.mark.parametrize(
    ("error", "reason"), [(CorruptData("rollup r"), "CorruptState"), (Incompatible("newer"), "IncompatibleState")]
)
def test_a_broken_shard_opens_no_breaker_for_its_store(bridge, client, error, reason):
    client.answer = error
    assert (bridge.inspect(LOCATION, CLAIM).inspected.reason, bridge.inspect(LOCATION, CLAIM).inspected.permanent) == (
        reason,
        True,
    )
    assert client.calls == 2


def test_a_missing_shard_is_an_answer_and_no_failure(bridge, client):
    client.answer = ShardNotFound("no")
    assert bridge.inspect(LOCATION, CLAIM).inspected == ShardMissing()


def test_a_shard_is_initialised_once_and_its_since_only_moves_forward(tmp_path):
    location = StoreLocation(blob=f"file://{tmp_path}/b", consensus=f"sqlite://{tmp_path}/c.db")
    schema = ShardSchema(key="id BIGINT", value="")
    critical = names.critical_id_of(SHARD_ID)

    def advance(since, owner=OWNER):
        return AdvanceSince(owner=owner, shard_id=SHARD_ID, location=location, critical_id=critical, since_ms=since)

    with Bridge(OperatorSettings()) as bridge:
        create = InitialiseShard(owner=OWNER, shard_id=SHARD_ID, location=location, schema=schema)
        with pytest.raises(InvalidUsage, match="its owner is None"):
            bridge.initialise(create)
        assert bridge.inspect(location, CLAIM) == Seen(inspected=ShardMissing(), shard_id=SHARD_ID)
        for _ in range(2):
            bridge.initialise(create)
        other = ShardSchema(key="id STRING", value="")
        with pytest.raises(InvalidUsage, match="another schema"):
            bridge.initialise(replace(create, schema=other))
        assert [bridge.advance_since(advance(since)) for since in (5, 3, 9)] == [5, 5, 9]
        assert bridge.inspect(location, CLAIM).inspected.since == 9
        heir = replace(OWNER, name="heir")
        with pytest.raises(InvalidUsage, match="its owner is op/team/flights"):
            bridge.advance_since(advance(20, heir))
        assert bridge.inspect(location, replace(CLAIM, owner=heir, wanted=SHARD_ID)).inspected == NotOwned(
            shard_id=SHARD_ID, owner=OWNER
        )
        bridge.inspect(location, replace(CLAIM, owner=heir, wanted=SHARD_ID, take_over=True))
        # The hold changes its owner with the shard, at once, even if since does not advance. The old owner is refused.
        assert [bridge.advance_since(advance(since, heir)) for since in (7, 20)] == [9, 20]
        with pytest.raises(InvalidUsage, match="its owner is op/team/heir"):
            bridge.advance_since(advance(30))
    with PersistClient.open(Location(blob=location.blob, consensus=location.consensus)) as client:
        (hold,) = client.inspect(ShardId(SHARD_ID)).readers
        assert (hold.id, hold.since) == (critical, 20)


@pytest.mark.slow
def test_an_action_on_an_unreachable_store_fails_with_the_address_of_the_store():
    dead = StoreLocation(blob="mem:", consensus="redis://127.0.0.1:1/0")
    action = InitialiseShard(
        owner=OWNER, shard_id=SHARD_ID, location=dead, schema=ShardSchema(key="id BIGINT", value="")
    )
    settings = OperatorSettings(loop=LoopSettings(store_deadline_seconds=1))
    with Bridge(settings) as bridge, pytest.raises(BridgeFailure, match="127.0.0.1"):
        bridge.initialise(action)


# -- settings, probes, texts ------------------------------------------------------------------------------------------


def test_settings_are_read_and_unknown_or_mistyped_fields_are_refused():
    text = """
    defaultProfile: hot
    storageProfiles: {hot: {blob: "s3://b", consensus: "redis://r:6379/0", secretName: s, takeOver: Unowned}}
    operatorId: eu-1/main
    namespaces: [a, b]
    images: {engine: "e:1", pullSecrets: [x]}
    loop: {inspectSeconds: 3}
    leader: {enabled: false}
    """
    settings = OperatorSettings.parse(text)
    assert settings.storage_profiles["hot"].secret_name == "s"
    assert (settings.namespaces, settings.images.pull_secrets) == (("a", "b"), ("x",))
    assert settings.loop.inspect_seconds == 3
    assert (settings.operator_id, settings.storage_profiles["hot"].take_over) == ("eu-1/main", "Unowned")
    assert OperatorSettings.parse("") == OperatorSettings()
    wrong = ["storageProfile: {}", "images: {engin: e}", "loop: 3", "a: [", "storageProfiles: {a: {blob: x}}", "- 1"]
    wrong += ["storageProfiles: {a: {blob: 's3://b', consensus: 'redis://r'}}", "leader: {leaseSeconds: 2}"]
    wrong += ["operatorId: ''", "operatorId: 7", f"operatorId: {'x' * 129}", "operatorId: 'a b'"]
    wrong += ["storageProfiles: {default: {blob: 's3://b', consensus: 'redis://r', takeOver: All}}"]
    for one in wrong:
        with pytest.raises(InvalidUsage):
            OperatorSettings.parse(one)


@pytest.mark.slow
def test_probes_answer_with_the_reason_while_unhealthy_or_not_ready():
    healthy = threading.Event()
    server = ProbeServer(
        0,
        registry=CollectorRegistry(),
        sick_of=lambda: None if healthy.is_set() else "a cold",
        waits_for=lambda: None if healthy.is_set() else "the doctor",
        refresh=lambda: None,
        host="127.0.0.1",
    )
    server.start()

    def answer(path):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.request("GET", path)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    try:
        assert [answer(path)[0] for path in ("/healthz", "/readyz", "/metrics", "/other")] == [503, 503, 200, 404]
        assert (answer("/healthz")[1], answer("/readyz")[1]) == (b"a cold\n", b"waiting for the doctor\n")
        healthy.set()
        assert [answer(path) for path in ("/healthz", "/readyz")] == 2 * [(200, b"ok\n")]
    finally:
        server.stop()


@pytest.mark.parametrize(
    "text",
    [
        "redis://user:hunter2@host:6379/0", "password=hunter2", '"aws_secret_access_key": "hunter2"',
        "fs.s3a.secret.key=hunter2", "X-Token: hunter2", "redis://:at@hunter2@host:6379", 'password="a;b c,d)hunter2e"',
        "{'apiKey': 'a&hunter2', 'n': 1}",
    ],
)  # fmt: skip
def test_redaction_removes_secrets(text):
    assert "hunter2" not in redact(f"before {text} after")
    assert redact(f"before {text} after").startswith("before")


def test_redaction_leaves_nothing_that_a_terminal_obeys():
    assert redact("a\x1b[2Jb\x9b1mc\r\x00\n\td é") == "a [2Jb 1mc  \n\td é"


def test_redaction_keeps_names_of_files():
    for url in ("redis://r:6379/0?password_file=/run/x", "s3://b?credentials_dir=/run/x"):
        assert redact(url) == url


@pytest.mark.slow
def test_redaction_takes_time_linear_in_the_length_of_a_log():
    for text in ("k" * 200_000, "token-" * 40_000, "a://" * 50_000):
        assert redact(text) == text  # quadratic work would take minutes


def test_clipping_keeps_beginning_and_end():
    text = clip("a" * 500 + "z" * 500, 100)
    assert len(text) == 100
    assert (text[0], text[-1]) == ("a", "z")


def test_logs_are_one_json_object_per_line():
    import logging

    record = logging.makeLogRecord({"msg": "a\nb", "levelname": "INFO", "name": "n", "key": "PersistShard/a/b"})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["key"] == "PersistShard/a/b"


@pytest.mark.parametrize(("text", "mib"), [("1Gi", 1024), ("1G", 954), ("512Mi", 512), ("1.5Gi", 1536), (1, 1)])
def test_quantities_are_read_as_mebibytes(text, mib):
    assert quantity.to_mebibytes(text) == mib


def test_text_that_is_no_quantity_is_refused():
    with pytest.raises(InvalidUsage):
        quantity.to_bytes("lots")
