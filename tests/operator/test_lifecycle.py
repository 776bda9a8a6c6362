"""The operator as a process: how it starts, leads, follows resource definitions that come and go, and ends.

Without the behaviour under test a process would wait for minutes or for ever.
"""

import base64
import socket
import threading

import pytest
from persist_operator.api import conditions
from persist_operator.cluster.port import LEASE, PERSIST_SHARD
from persist_operator.main import Operator
from persist_operator.settings import LeaderSettings, OperatorSettings
from replicas import ENDS_S, HAPPENS_S, Replica, eventually


@pytest.fixture
def replica(tmp_path, kubeconfig):
    made = []

    def make(name="one", consensus=f"sqlite://{tmp_path}/consensus.db", **more):
        made.append(Replica(tmp_path, kubeconfig, name, consensus, **more))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def holder(server):
    lease = server.cluster.get(LEASE, "operator", "persist-operator")
    return None if lease is None else lease["spec"]["holderIdentity"]


def status(server, name="flights"):
    return (server.cluster.get(PERSIST_SHARD, "team", name) or {}).get("status") or {}


@pytest.mark.slow
def test_standbys_are_ready_and_one_leads_when_the_leader_ends(server, replica):
    """On SIGTERM each process ends with zero. A leader releases its Lease, and a standby leaves the Lease of the leader alone."""
    leader = {"namespace": "operator", "leaseSeconds": 3600}
    one = replica("one", leader=leader)
    assert eventually(lambda: one.leads() and one.is_ready())
    two, three = replica("two", leader=leader), replica("three", leader=leader)
    assert eventually(lambda: two.is_ready() and three.is_ready())
    assert not two.leads()
    assert not three.leads()
    assert three.end() == 0
    assert holder(server).startswith("one_")
    assert one.end() == 0
    assert eventually(two.leads), "the leader released the Lease, and the standby did not wait an hour for its expiry"
    assert eventually(two.is_ready)
    assert two.end() == 0
    assert holder(server) == ""


@pytest.mark.slow
def test_the_first_replica_makes_the_key_of_stops_and_no_replica_reads_it(server, replica):
    """The stub server has no kubelet, so no replica ever sees the key."""
    stop = {"port": 7080, "namespace": "operator", "secretName": "persist-stop-key"}
    one = replica("one", gracefulStop=stop)
    assert eventually(lambda: '"is_new": "True"' in one.log.read_text())
    first = server.cluster.stored("Secret", "operator", "persist-stop-key")
    assert len(base64.b64decode(first["data"]["key"])) == 32
    two = replica("two", gracefulStop=stop)
    assert eventually(lambda: '"is_new": "False"' in two.log.read_text())
    assert server.cluster.stored("Secret", "operator", "persist-stop-key") == first
    assert [one.end(), two.end()] == [0, 0]
    asked = {method for method, path, _, _ in server.requests if "/secrets" in path}
    assert asked == {"POST"}


@pytest.mark.slow
def test_replicas_share_the_resources_and_take_over_from_one_that_dies_or_leaves(server, replica, shard_resource):
    sharing = {"sharding": {"enabled": True}}
    one, two, three = (replica(name, **sharing) for name in ("one", "two", "three"))
    every = (one, two, three)

    def shares(*replicas):
        return sorted(one.metric("persist_operator_slices") or 0 for one in replicas)

    def shown(names):
        """The replicas that export each shard."""
        exported = {one: one.metrics() for one in every if one.process.poll() is None}
        series = [f'persist_shard_ready{{name="{name}",namespace="team"}}' for name in names]
        return [[one for one, samples in exported.items() if each in samples] for each in series]

    def become_ready(names):
        for name in names:
            server.cluster.create(PERSIST_SHARD, shard_resource(name=name, uid=f"uid-{name}"))
        return eventually(lambda: all(conditions.is_true(status(server, name), "Ready") for name in names))

    assert eventually(lambda: sum(shares(*every)) == 64 and max(shares(*every)) == 22)
    assert sum(one.leads() for one in every) == 1
    first = [f"first-{number}" for number in range(9)]
    assert become_ready(first)
    assert eventually(lambda: all(len(one) == 1 for one in shown(first))), "only its owner exports a shard"
    assert len({one.log for (one,) in shown(first)}) == 3, "each replica has some"

    one.process.kill()
    one.process.wait()
    assert eventually(lambda: shares(two, three) == [32, 32])
    assert eventually(lambda: all(len(one) == 1 for one in shown(first)))
    assert become_ready([f"second-{number}" for number in range(6)])

    assert two.end() == 0
    lease = server.cluster.get(LEASE, "operator", "persist-operator-two")
    assert lease["spec"]["holderIdentity"] == "", "it was released: nothing waits for its end"
    assert eventually(lambda: shares(three) == [64])
    assert eventually(lambda: all(one == [three] for one in shown(first)))

    four = replica("four", **sharing)
    assert eventually(lambda: shares(three, four) == [32, 32])
    assert become_ready([f"third-{number}" for number in range(6)])
    assert all(one.is_ready() for one in (three, four))
    assert (three.end(), four.end()) == (0, 0)


@pytest.mark.slow
def test_an_unexpected_error_while_renewing_the_lease_ends_the_operator(server, kubeconfig):
    """The renewing thread must not end silently while the other threads go on."""
    leader = LeaderSettings(namespace="operator", lease_seconds=2, renew_seconds=0.2)
    operator, codes = Operator(OperatorSettings(http_port=0, leader=leader), "one"), []
    running = threading.Thread(target=lambda: codes.append(operator.run()), daemon=True)
    running.start()
    try:
        assert eventually(lambda: holder(server) == "one")
        server.cluster.edit(
            LEASE, "operator", "persist-operator", lambda one: one["spec"].update(leaseTransitions="many")
        )
        running.join(HAPPENS_S)
        assert codes == [1]
    finally:
        operator.stop()
        running.join(HAPPENS_S)


@pytest.mark.slow
def test_a_store_that_hangs_does_not_delay_the_end_of_the_process(server, replica, shard_resource):
    """The store accepts a connection in the middle of a reconcile and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connected = threading.Event()
        accepted = []

        def accept():
            accepted.append(silent.accept()[0])
            connected.set()

        threading.Thread(target=accept, daemon=True).start()
        server.cluster.create(PERSIST_SHARD, shard_resource())
        one = replica(consensus=f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        assert connected.wait(HAPPENS_S)
        assert one.end(ENDS_S) == 0
        assert holder(server) == ""
        for connection in accepted:
            connection.close()


@pytest.mark.slow
def test_an_api_server_that_hangs_does_not_delay_the_end_of_the_process(server, replica):
    one = replica()
    assert eventually(one.is_ready)
    hangs, answer = threading.Event(), server.answer

    def never(*_):
        hangs.set()
        released.wait(HAPPENS_S)
        return 503, {"message": "too late"}

    released = threading.Event()
    server.answer = never
    try:
        assert hangs.wait(HAPPENS_S), "the lease is renewed every few seconds"
        assert one.end(ENDS_S) == 0
    finally:
        server.answer = answer
        released.set()


@pytest.mark.slow
def test_the_operator_follows_resource_definitions_that_come_later_go_and_return(server, replica, shard_resource):
    server.cluster.unserved = {"persistshards", "sparksinks"}
    one = replica()
    assert eventually(one.leads)
    assert eventually(lambda: "persistshards.persistshard.io" in one.probe("/readyz")[1])
    assert one.probe("/readyz")[0] == 503
    assert one.probe("/healthz") == (200, "ok\n")
    server.cluster.unserved = set()
    assert eventually(one.is_ready)
    server.cluster.create(PERSIST_SHARD, shard_resource())
    assert eventually(lambda: status(server).get("shardId"))

    server.cluster.unserved = {"persistshards", "sparksinks"}
    assert eventually(lambda: one.probe("/readyz")[0] == 503)
    server.cluster.unserved = set()
    assert eventually(one.is_ready)
    server.cluster.create(PERSIST_SHARD, shard_resource(name="again", uid="uid-again"))
    assert eventually(lambda: status(server, "again").get("shardId"))
    assert one.metric("persist_operator_watch_restarts_total") >= 1
    assert one.probe("/healthz") == (200, "ok\n")
    assert one.end() == 0
