"""`kubectl persist read`: with the person's own credentials, and in a pod like those of the shard's maintenance."""

import threading

import pytest
from persist_engine import Location, PersistClient, ShardId
from persist_engine.model.frontier import Antichain
from persist_operator.api import names
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD
from persist_operator.kubectl.reading import pod_like

pytestmark = pytest.mark.slow


def append(location, shard_id):
    with PersistClient.open(location) as client:
        schema = client.schema(ShardId(shard_id))
        with client.open_writer(ShardId(shard_id), schema, purpose="test") as writer:
            upper = writer.fetch_recent_upper()
            writer.compare_and_append(
                [(((41,), ()), upper.time, 1)], expected_upper=upper, new_upper=Antichain.of(upper.time + 1)
            )


@pytest.fixture
def shard(operated, server, tmp_path):
    """A shard `flights` with one row on stores that the operator made, as its API server shows it."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/log.db")
    made = operated(location)
    server.cluster = made.cluster
    append(location, made.settle(4)["shardId"])
    return made


def test_a_name_is_read_with_the_stores_of_its_status(plugin, shard):
    code, out, err = plugin("read", "flights", "-n", "team", "--format", "csv", "--columns", "id")
    assert (code, out.split()) == (0, ['"id"', "41"]), err


def test_other_stores_may_be_named(plugin, shard, monkeypatch, tmp_path):
    monkeypatch.setenv("PERSIST_BLOB", f"file://{tmp_path}/elsewhere")
    monkeypatch.setenv("PERSIST_CONSENSUS", f"sqlite://{tmp_path}/elsewhere.db")
    code, out, _ = plugin("read", "flights", "-n", "team", "--format", "csv")
    assert code != 0
    assert "41" not in out


def test_a_shard_without_an_id_or_without_stores_says_so(plugin, team):
    cluster = team()
    assert "flights has no shard yet" in plugin("read", "flights", "-n", "team")[2]
    cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one.update(status={"shardId": "s1"}))
    assert "give --blob and --consensus, or --pod" in plugin("read", "flights", "-n", "team")[2]


def requested(shard):
    note = {f"{names.REQUEST_PREFIX}rollup": "1"}
    shard.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations=note))
    shard.settle(2)


def runs(cluster, log, code):
    """Plays the kubelet: every new pod has written this log and ended with this code."""
    seen, create = [], cluster.create

    def created(kind, manifest):
        answer = create(kind, manifest)
        if kind.kind == "Pod":
            seen.append(manifest)
            name = manifest["metadata"]["name"]
            cluster.log_texts[f"team/{name}"] = log
            state = {"terminated": {"exitCode": code}}
            status = {
                "phase": "Failed" if code else "Succeeded",
                "containerStatuses": [{"name": "maintain", "state": state}],
            }
            threading.Timer(
                0.05, lambda: cluster.edit(POD, "team", name, lambda one: one.update(status=status))
            ).start()
        return answer

    cluster.create = created
    return seen


@pytest.mark.parametrize("code", [0, 71])
def test_a_pod_reads_as_the_maintenance_pods_do_and_is_gone_afterwards(plugin, shard, code):
    assert (
        "has no maintenance Job whose pod this one could be like" in plugin("read", "flights", "-n", "team", "--pod")[2]
    )
    requested(shard)
    (job,) = shard.cluster.find(JOB, "team", {})
    pods = runs(shard.cluster, "id\n41\n", code)
    found = plugin("read", "flights", "-n", "team", "--pod", "--format", "csv")
    assert found[:2] == (code, "id\n41\n"), found[2]
    (pod,) = pods
    assert shard.cluster.find(POD, "team", {}) == []
    container, like = pod["spec"]["containers"][0], job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][:4] == ["read", shard.status["shardId"], "--format", "csv"]
    assert container["args"][4:] == [
        one for one in like["args"] if one.startswith(("file:", "sqlite:", "--blob", "--cons"))
    ]
    for field in ("image", "env", "volumeMounts", "securityContext", "resources"):
        assert container[field] == like[field]
    assert pod["spec"]["volumes"] == job["spec"]["template"]["spec"]["volumes"]
    assert names.LABEL_MANAGED_BY not in pod["metadata"]["labels"], "the operator must not count it among its own"


def test_rows_that_do_not_arrive_whole_are_no_success(plugin, shard, server):
    """The connection to the log broke. The first rows were shown, and the exit code was 0."""
    requested(shard)
    runs(shard.cluster, "id\n41\n", 0)
    server.is_cutting = True
    code, out, err = plugin("read", "flights", "-n", "team", "--pod", "--format", "csv")
    assert (code, out) == (1, "id\n41\n")
    assert "the answer broke off" in err
    assert shard.cluster.find(POD, "team", {}) == []


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a [31mb\n"), (False, "a\x1b[31mb\n")])
def test_rows_that_a_pod_reads_give_a_terminal_no_orders_and_reach_a_pipe_as_they_are(
    plugin, shard, monkeypatch, is_terminal, shown
):
    requested(shard)
    runs(shard.cluster, "a\x1b[31mb\n", 0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert plugin("read", "flights", "-n", "team", "--pod")[1] == shown


def test_a_hold_is_expired_by_the_engine(plugin, shard):
    requested(shard)
    pods = runs(shard.cluster, "expired\n", 0)
    assert plugin("holds", "flights", "-n", "team", "--expire", "c1", "--force", "--commit", "--pod")[1] == "expired\n"
    assert pods[0]["spec"]["containers"][0]["args"][:7] == [
        "admin",
        "holds",
        shard.status["shardId"],
        "--expire",
        "c1",
        "--force",
        "--commit",
    ]


def test_records_of_deletions_are_shown_by_the_engine(plugin, shard):
    requested(shard)
    pods = runs(shard.cluster, "no records\n", 0)
    assert plugin("deletions", "flights", "-n", "team", "--since", "-7d", "--pod")[1] == "no records\n"
    expected = ["admin", "deletions", shard.status["shardId"], "--since", "-7d"]
    assert pods[0]["spec"]["containers"][0]["args"][:5] == expected


def test_no_pod_is_like_that_of_a_compaction_on_spark():
    spark = {
        "metadata": {"name": "j"},
        "spec": {"template": {"spec": {"containers": [{"name": "driver", "args": ["x"]}]}}},
    }
    shard = {"metadata": {"name": "flights", "namespace": "team"}}
    assert pod_like([spark], shard, ["read"], suffix="x") is None
