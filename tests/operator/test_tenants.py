"""Tenants that do not trust each other: resources reach only the stores of profiles that allow their namespace, and the dead store
of one tenant delays no other tenant.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import socket
import threading
import time

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.base.errors import InvalidUsage, StoreRefused, Unavailable
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.storage.addresses import RedisAddress, S3Address, with_credentials
from persist_kit.command_line import persist
from persist_kit.servers import redis_server
from persist_operator.api import conditions
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import CREDENTIALS_DIR, StoreLocation
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import JOB, NAMESPACE, PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.handlers.controller import Controller
from persist_operator.plan.observed import ShardView
from persist_operator.settings import AllowedNamespaces, InlineStorage, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry


class Silence:
    """Accepts connections on its own port and never answers. `heard` is the number of connections."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._connections, self.connected = [], threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                self._connections.append(self._listener.accept()[0])
                self.connected.set()

    @property
    def heard(self):
        return len(self._connections)

    def close(self):
        # A pending accept outlives a plain close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._connections:
            one.close()


@pytest.fixture
def silence():
    made = Silence()
    yield made
    made.close()


class House:
    """An operator on an in-memory API server with real stores and these storage profiles."""

    def __init__(self, profiles, *, env, credentials_dir="/nowhere", open_client=None, **loop):
        self.env = env
        self.cluster = FakeCluster(now_ms=env.now_ms)
        self.settings = OperatorSettings(storage_profiles=profiles, loop=LoopSettings(**loop))
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.bridge = Bridge(self.settings, env=env, open_client=open_client, credentials_dir=str(credentials_dir))
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, env, self.metrics)

    def go(self, namespace, name, times_=4):
        for _ in range(times_):
            self.env.advance_ms(6000)
            self.reconciler.reconcile(Key("PersistShard", namespace, name))
        return self.status(namespace, name)

    def status(self, namespace, name):
        return self.cluster.get(PERSIST_SHARD, namespace, name).get("status") or {}

    def reason(self, namespace, name, condition="Ready"):
        found = conditions.find(self.status(namespace, name), condition)
        return None if found is None else found["reason"]


@pytest.fixture
def house(now):
    made = []

    def build(profiles, **options):
        made.append(House(profiles, env=SeededEnv(start_ms=now), **options))
        return made[-1]

    yield build
    for one in made:
        one.bridge.close()


def profile(folder, *names, labels=None, **stores):
    allowed = AllowedNamespaces(names=names, match_labels=labels or {})
    urls = {"blob": f"file://{folder}/blob", "consensus": f"sqlite://{folder}/consensus.db", **stores}
    return StorageProfile(allowed_namespaces=allowed, **urls)


def hostile_specs(address, *, good=None):
    """Specs with an attack in each field of the inline stores in turn, and in the names of profile and shard. `good` is the address in
    the other fields.
    """
    good = good or address
    host, port = address.split(":")
    token = "%2Fvar%2Frun%2Fsecrets%2Fkubernetes.io%2Fserviceaccount%2Ftoken"  # noqa: S105 - a path
    texts = [
        address, f"http://{address}", f"https://{address}", f"//{address}", f"x@{address}", f"u:p@{address}", f"{address}/0",
        f"{address}?password_file={token}&prefix=:1", f"{address}?unsafe=true&prefix=:1", f"p?endpoint=http://{address}",
        f"p&endpoint=http%3A%2F%2F{host}%3A{port}", f"p#@{address}", f"p\n{address}", f"..%2f{address}", f"[{host}]:{port}",
        f"redis://{address}", f"p?unsafe=true&credentials_dir=/&x=http://{address}",
    ]  # fmt: skip
    for text in texts:
        for part, field in (
            ("blob", "bucket"), ("blob", "prefix"), ("blob", "endpoint"), ("blob", "region"),
            ("consensus", "address"), ("consensus", "keyPrefix"), ("consensus", "authSecretName"),
        ):  # fmt: skip
            storage = {
                "blob": {"bucket": "bbb", "endpoint": f"http://{good}"},
                "consensus": {"address": good, "authSecretName": "persist-store"},
            }
            storage[part][field] = text
            yield {"storage": storage}
        yield {"storageProfile": text}
        yield {"shardId": text}
    drawn = random.Random(7)  # noqa: S311 - the same in every run
    letters = [
        *"/?#&=@:%+; \n\0",
        address,
        f"http://{address}",
        "unsafe=true",
        "endpoint=",
        "password_file=/etc/passwd",
    ]
    for _ in range(40):
        text = "".join(drawn.choices(letters, k=5))
        yield {"storage": {"blob": {"bucket": text, "prefix": text}, "consensus": {"address": text, "keyPrefix": text}}}


@pytest.mark.slow
def test_hostile_resources_cause_no_connection_to_another_address(house, shard_resource, silence, tmp_path):
    """The specs pass the schema check, or bypass it as under an API server with an older definition."""
    made = house({"default": profile(tmp_path, "team")}, store_deadline_seconds=2)
    reached = accepted = 0
    reasons = set()
    for number, spec in enumerate(hostile_specs(silence.address)):
        resource = shard_resource(spec, name=f"h{number}", uid=f"uid-{number}")
        accepted += not load_schemas().check(resource)
        with contextlib.suppress(InvalidUsage):
            made.cluster.create(PERSIST_SHARD, resource)
            made.go("team", f"h{number}", 3)
            reached += 1
            assert silence.heard == 0, spec
            if "shardId" not in spec:
                reasons.add(made.reason("team", f"h{number}", "Stalled"))
    assert reasons == {"InlineStorageOff", "UnknownStorageProfile"}
    assert reached >= 100
    assert 0 < accepted < reached
    assert silence.heard == 0


@pytest.mark.slow
def test_hostile_inline_stores_cause_no_connection_from_operator_or_pods(house, shard_resource, silence, tmp_path):
    """Addresses that the allow-list accepts reach the arguments of the pods unchanged, and the pods connect to no other address."""
    allowed = "127.0.0.1:9"  # no server listens there
    made = house({"default": profile(tmp_path, "team")}, store_deadline_seconds=2)
    inline = InlineStorage(
        enabled=True, allowed_endpoints=(allowed,), allowed_consensus=(allowed,), allowed_secrets=("persist-store",)
    )
    made.settings = dataclasses.replace(made.settings, inline_storage=inline)
    made.reconciler = Reconciler(made.cluster, made.bridge, made.settings, made.env, made.metrics)
    specs = [*hostile_specs(silence.address, good=allowed), *hostile_specs(silence.address)]
    for number, spec in enumerate(specs):
        with contextlib.suppress(InvalidUsage):
            made.cluster.create(PERSIST_SHARD, shard_resource(spec, name=f"h{number}", uid=f"uid-{number}"))
            made.go("team", f"h{number}", 3)
    jobs = made.cluster.find(JOB, None, {})
    assert len(specs) > len(jobs) > 20
    every = set()
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        arguments = dict(itertools.pairwise(container["args"]))
        blob, consensus = S3Address.parse(arguments["--blob"]), RedisAddress.parse(arguments["--consensus"])
        assert (blob.endpoint, f"{consensus.host}:{consensus.port}") == (f"http://{allowed}", allowed)
        assert (consensus.unsafe, consensus.password, consensus.password_file, blob.ca_file) == (
            False,
            None,
            None,
            None,
        )
        assert {one.credentials_dir for one in (blob, consensus)} <= {None, CREDENTIALS_DIR}
        mounted = [one["projected"]["sources"] for one in pod["volumes"] if "projected" in one]
        assert {one["secret"]["name"] for sources in mounted for one in sources} <= {"persist-store"}
        assert not any("secret" in one for one in pod["volumes"])
        slashes = json.loads(arguments["--wish"])["owner"].count("/")
        every.add((arguments["--blob"], arguments["--consensus"], slashes))
    assert len(every) > 10
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    for blob_url, consensus_url, _ in sorted(every)[:: max(1, len(every) // 2)]:
        where = ["--blob", blob_url, "--consensus", consensus_url, "--wish", arguments["--wish"], "--give-up", "0"]
        ended = persist("maintain", "tend", *where, environ={**os.environ, **keys})
        assert ended.returncode in {64, 70}, ended.stderr
    assert silence.heard == 0


@pytest.mark.slow
def test_a_profile_that_names_the_listener_connects_to_it(silence, house, shard_resource, tmp_path):
    """The test above relies on this: a connection to the listener is noticed."""
    dead = profile(tmp_path, "team", consensus=f"redis://{silence.address}/0")
    made = house({"default": dead}, store_deadline_seconds=1)
    made.cluster.create(PERSIST_SHARD, shard_resource())
    made.go("team", "flights", 2)
    assert silence.connected.wait(60)


@pytest.mark.parametrize(
    ("allowed", "namespace_labels", "expected"),
    [
        ({}, {}, "ProfileNotAllowed"),
        ({"names": ("other",)}, {}, "ProfileNotAllowed"),
        ({"names": ("team",)}, {}, "Healthy"),
        ({"names": ("*",)}, {}, "Healthy"),
        ({"match_labels": {"persist": "yes"}}, {"persist": "yes", "more": "x"}, "Healthy"),
        ({"match_labels": {"persist": "yes"}}, {"persist": "no"}, "ProfileNotAllowed"),
        ({"match_labels": {"persist": "yes", "more": "x"}}, {"persist": "yes"}, "ProfileNotAllowed"),
    ],
)
def test_a_profile_is_for_the_namespaces_that_it_names(
    house, shard_resource, tmp_path, allowed, namespace_labels, expected
):
    stores = {"blob": f"file://{tmp_path}/blob", "consensus": f"sqlite://{tmp_path}/consensus.db"}
    made = house({"default": StorageProfile(**stores, allowed_namespaces=AllowedNamespaces(**allowed))})
    made.cluster.create(NAMESPACE, {"metadata": {"namespace": "", "name": "team", "labels": namespace_labels}})
    made.cluster.create(PERSIST_SHARD, shard_resource())
    made.go("team", "flights", 5)
    assert made.reason("team", "flights") == expected
    assert (tmp_path / "blob").exists() == (expected == "Healthy")
    if expected != "Healthy":
        assert "allowedNamespaces" in conditions.find(made.status("team", "flights"), "Stalled")["message"]


def test_no_driver_starts_on_stores_that_are_not_for_its_namespace(
    house, shard_resource, sink_resource, make_shard, tmp_path
):
    """This also holds after the loss of the profile and before the first reconcile of the shard, whose status is still Ready."""
    made = house({"default": profile(tmp_path, "team")})
    made.cluster.create(PERSIST_SHARD, shard_resource())
    healthy = made.go("team", "flights")
    made.cluster.create(SPARK_SINK, sink_resource())
    allowed = made.settings.storage_profiles["default"]
    made.settings.storage_profiles["default"] = profile(tmp_path, "other")
    view = ShardView.of("flights", make_shard(status=healthy), made.settings)
    assert (view.usable, view.location) == (False, None)
    for _ in range(4):
        made.env.advance_ms(6000)
        made.reconciler.reconcile(Key("SparkSink", "team", "load"))
    assert made.cluster.find(POD, None, {}) == []
    made.settings.storage_profiles["default"] = allowed
    for _ in range(4):
        made.env.advance_ms(6000)
        made.reconciler.reconcile(Key("SparkSink", "team", "load"))
    assert len(made.cluster.find(POD, None, {})) == 1


def test_a_label_that_is_taken_away_takes_the_stores_away(house, shard_resource, tmp_path):
    made = house({"default": profile(tmp_path, labels={"persist": "yes"})})
    made.cluster.create(NAMESPACE, {"metadata": {"namespace": "", "name": "team", "labels": {"persist": "yes"}}})
    made.cluster.create(PERSIST_SHARD, shard_resource())
    made.go("team", "flights")
    assert made.reason("team", "flights") == "Healthy"
    made.cluster.edit(NAMESPACE, "", "team", lambda one: one["metadata"].update(labels={}))
    made.go("team", "flights")
    assert made.reason("team", "flights") == "ProfileNotAllowed"


def test_a_namespace_is_not_read_when_its_profile_has_no_label_selector(house, shard_resource, tmp_path):
    made = house({"default": profile(tmp_path, "team"), "other": profile(tmp_path, labels={"a": "b"})})
    requests = made.cluster.record()
    made.cluster.create(PERSIST_SHARD, shard_resource())
    made.go("team", "flights")
    kinds = {request.kind for request in requests}
    assert PERSIST_SHARD.kind in kinds
    assert NAMESPACE.kind not in kinds


@pytest.mark.redis
def test_two_tenants_with_stores_and_secrets_of_their_own(house, shard_resource, tmp_path):
    """The Secret of a profile is used at the stores of that profile only. A tenant neither reaches nor sees the other's shard."""
    with (
        redis_server(settings=DURABLE, password="red's own") as red,
        redis_server(settings=DURABLE, password="blue's") as blue,
    ):  # noqa: S106
        profiles, addresses = {}, {"red": red.address, "blue": blue.address}
        for name, password in (("red", "red's own"), ("blue", "blue's")):
            (tmp_path / "secrets" / name).mkdir(parents=True)
            (tmp_path / "secrets" / name / "redis-password").write_text(password)
            urls = {"blob": f"file://{tmp_path}/{name}", "consensus": f"redis://{addresses[name]}/0"}
            allowed = AllowedNamespaces(names=(name,))
            profiles[name] = StorageProfile(**urls, secret_name="persist-store", allowed_namespaces=allowed)
        made = house(profiles, credentials_dir=tmp_path / "secrets", store_deadline_seconds=60)
        for name in ("red", "blue"):
            resource = shard_resource({"storageProfile": name}, uid=f"uid-{name}", name="own", namespace=name)
            made.cluster.create(PERSIST_SHARD, resource)
            made.go(name, "own")
            assert made.reason(name, "own") == "Healthy"
        red_id = made.status("red", "own")["shardId"]
        before = seqno_of(made.bridge, location_of(profiles, "red"), ShardId(red_id))
        # With the other tenant's profile, and with the other's shard id in the own stores.
        attacks = {
            "theirs": {"storageProfile": "red", "shardId": red_id},
            "named": {"storageProfile": "blue", "shardId": red_id},
        }
        for name, spec in attacks.items():
            made.cluster.create(PERSIST_SHARD, shard_resource(spec, uid=f"u-{name}", name=name, namespace="blue"))
            made.go("blue", name)
        assert made.reason("blue", "theirs") == "ProfileNotAllowed"
        for name in attacks:
            assert addresses["red"] not in str(made.status("blue", name))
            assert "frontiers" not in made.status("blue", "theirs")
        assert seqno_of(made.bridge, location_of(profiles, "red"), ShardId(red_id)) == before
        with PersistClient.open(Location(blob=f"file://{tmp_path}/blue", consensus=blue.url)) as client:
            assert ShardId(made.status("blue", "own")["shardId"]) in set(client.shards())


@pytest.mark.redis
def test_two_tenants_on_one_redis_with_users_of_their_own(house, shard_resource, tmp_path):
    """With the rights of docs/security.md the server itself confines each tenant to its keys."""
    with redis_server(settings=DURABLE, password="admin's") as server:  # noqa: S106
        profiles = {}
        for name in ("red", "blue"):
            rights = RIGHTS.format(name=name).split()
            assert server.command("ACL", "SETUSER", name, "on", f">{name}'s", *rights) == b"+OK\r\n"
            (tmp_path / "secrets" / name).mkdir(parents=True)
            (tmp_path / "secrets" / name / "redis-password").write_text(f"{name}'s\n")
            urls = {
                "blob": f"file://{tmp_path}/{name}",
                "consensus": f"redis://{name}@{server.address}/0?prefix={name}",
            }
            allowed = AllowedNamespaces(names=(name,))
            profiles[name] = StorageProfile(**urls, secret_name="persist-store", allowed_namespaces=allowed)
        made = house(profiles, credentials_dir=tmp_path / "secrets", store_deadline_seconds=60)
        for name in ("red", "blue"):
            resource = shard_resource({"storageProfile": name}, uid=f"uid-{name}", name="own", namespace=name)
            made.cluster.create(PERSIST_SHARD, resource)
            made.go(name, "own")
            assert made.reason(name, "own") == "Healthy", made.status(name, "own")
        as_red = with_credentials(f"redis://red@{server.address}/0?prefix=blue", str(tmp_path / "secrets" / "red"))
        with pytest.raises(StoreRefused, match="(?i)perm"):
            PersistClient.open(Location(blob=f"file://{tmp_path}/blue", consensus=as_red), settings=SHORT)


#: The rights in docs/security.md.
RIGHTS = "~{name}* &{name}* +@all -@admin -@dangerous +info +config|get"
SHORT = Settings(retry=RetrySettings(give_up_ms=2000))


def seqno_of(bridge, location, shard_id):
    return bridge._call(location, lambda client: client.inspect(shard_id)).seqno


def location_of(profiles, name):
    one = profiles[name]
    return StoreLocation(blob=one.blob, consensus=one.consensus, secret_name=one.secret_name, profile=name)


DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


# -- delay ------------------------------------------------------------------------------------------------------------


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_store_that_never_answers_delays_no_other_tenant(shard_resource, silence, tmp_path):
    """The deadline is an hour. A worker that waited for red's store would never come to blue's shard."""
    profiles = {
        "red": profile(tmp_path / "red", "red", consensus=f"redis://{silence.address}/0"),
        "blue": profile(tmp_path / "blue", "blue"),
    }

    def open_client(location):
        if str(silence.port) not in location.consensus:
            return PersistClient.open(location)
        with socket.create_connection(("127.0.0.1", silence.port)) as connection:
            connection.recv(1)
        raise Unavailable(location.consensus)

    made = House(profiles, env=SystemEnv(), open_client=open_client, store_deadline_seconds=3600, inspect_seconds=1)
    controller = Controller(made.reconciler, made.cluster, made.settings, made.env, made.metrics)
    for number in range(12):
        spec, metadata = {"storageProfile": "red"}, {"namespace": "red", "name": f"r{number}", "uid": f"red-{number}"}
        made.cluster.create(PERSIST_SHARD, shard_resource(spec, **metadata))
    controller.start()
    try:
        assert silence.connected.wait(60)
        for number in range(3):
            spec, metadata = (
                {"storageProfile": "blue"},
                {"namespace": "blue", "name": f"b{number}", "uid": f"blue-{number}"},
            )
            resource = shard_resource(spec, **metadata)
            made.cluster.create(PERSIST_SHARD, resource)
            controller.changed(resource)
        wait_until(lambda: all(made.reason("blue", f"b{number}") == "Healthy" for number in range(3)))
    finally:
        silence.close()
        controller.stop()
        made.bridge.close()
