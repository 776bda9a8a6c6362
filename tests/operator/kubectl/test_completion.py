"""Names for the shell, in the form in which kubectl asks for them."""

import sys
from types import SimpleNamespace

import pytest
from persist_operator.cluster.port import ApiError
from persist_operator.kubectl.completion import complete_shard, main

pytestmark = pytest.mark.slow


@pytest.fixture
def complete(kubeconfig, capsys, monkeypatch):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kubectl_complete-persist", *words])
        main()
        return capsys.readouterr().out.splitlines()

    return run


def test_kubectl_completes_commands_and_names(complete, team, shard_resource):
    cluster = team()
    assert complete("sta") == ["status\tShow shards with their sinks and pods, as...", ":4"]
    assert complete("compact", "-n", "team", "") == ["flights", ":4"]
    assert complete("restart", "-n", "team", "l") == ["load", ":4"]
    assert complete("suspend", "-n", "team", "") == ["flights", "load", ":4"]
    assert complete("compact", "-n", "other", "") == [":4"]
    cluster.deny["find", "PersistShard"] = ApiError("no", status=403)
    assert complete("compact", "-n", "team", "") == [":4"], "an error is no name"
    # A shell that asks without kubectl shows what is raised.
    assert complete_shard(SimpleNamespace(params={"namespace": "team"}), "") == []
