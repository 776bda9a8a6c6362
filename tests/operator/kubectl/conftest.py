"""`kubectl-persist` as a program of this process, against the API server of the tests."""

import pytest
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.kubectl.main import main

#: Names and texts that a terminal, a shell or a page would obey.
HOSTILE = "\x1b[31mred\x07\u202eder\u200f; rm -rf ~ <script>$(x)"


@pytest.fixture
def hostile():
    return HOSTILE


@pytest.fixture
def plugin(kubeconfig, capsys, monkeypatch):
    """Runs the plugin with these arguments. Returns exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["kubectl-persist", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def team(server, shard_resource, sink_resource):
    """Puts a shard `flights` and a sink `load` of namespace `team` into the API server, with these statuses."""

    def make(shard_status=None, sink_status=None, **spec):
        server.cluster.create(PERSIST_SHARD, shard_resource(spec, status=shard_status or {}))
        server.cluster.create(SPARK_SINK, sink_resource({"mode": "Once"}, status=sink_status or {}))
        return server.cluster

    return make


@pytest.fixture
def pod(server):
    def make(name, *, created="2026-09-20T00:00:00Z", status=None, spec=None, **labels):
        labels = {"app.kubernetes.io/managed-by": "persist-operator"} | {
            f"persistshard.io/{key}": value for key, value in labels.items()
        }
        made = {
            "metadata": {"namespace": "team", "name": name, "labels": labels, "creationTimestamp": created},
            "spec": spec or {"containers": [{"name": "driver"}]},
            "status": status or {"phase": "Running"},
        }
        server.cluster.create(POD, made)
        return made

    return make
