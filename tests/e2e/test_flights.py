"""The main path: the examples, applied with kubectl, run on real executors, and other pods read them back."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sink_manifests import flights_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1500), pytest.mark.usefixtures("operator_is_there")]

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "persist-e2e"
NAMES = ("airlines", "airports", "flights")
ROWS = {"airlines": 16, "airports": 1458, "flights": 336_776}


@pytest.fixture(scope="session")
def flights(cluster: Any, examples: Path) -> dict[str, set[str]]:
    """Applies the examples unchanged and waits for their end. Yields the executors that ran, by their driver."""
    executors: dict[str, set[str]] = {}
    # On a kept cluster they may exist from an earlier run; new resources get new shards.
    cluster.kubectl("delete", "--filename", str(examples), "--ignore-not-found", timeout_s=120)
    cluster.kubectl("apply", "--filename", str(examples))

    def completed() -> bool:
        for pod in cluster.items("pods", "spark-role=executor"):
            if pod["status"].get("phase") in ("Running", "Succeeded"):
                for owner in pod["metadata"].get("ownerReferences", []):
                    executors.setdefault(owner["name"], set()).add(pod["metadata"]["name"])
        return all(cluster.condition("sparksink", name, "Ready").get("reason") == "Completed" for name in NAMES)

    cluster.wait("the sinks of examples/flights to complete", completed, timeout_s=1200, every_s=1.0)
    return executors


@pytest.mark.parametrize("name", NAMES)
def test_the_sink_ran_on_two_executors(cluster: Any, flights: dict[str, set[str]], name: str) -> None:
    drivers = [driver for driver in flights if driver.startswith(f"{name}-")]
    assert drivers
    assert max(len(flights[driver]) for driver in drivers) >= 2
    assert cluster.condition("sparksink", name, "Ready")["status"] == "True"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("flights")
def test_another_pod_reads_back_what_the_source_holds(
    cluster: Any, programs: Any, content: Any, source: Callable[[str], Any], name: str
) -> None:
    expected = source(name)
    assert expected.num_rows == ROWS[name]
    read = programs.result("content", cluster.status("persistshard", name)["shardId"])
    assert read["rows"] == ROWS[name]
    assert read["hash"] == content.content_hash(expected)


@pytest.mark.usefixtures("flights")
def test_the_command_line_reads_a_shard_in_a_pod(cluster: Any, programs: Any, source: Callable[[str], Any]) -> None:
    job = programs.start_cli("read", cluster.status("persistshard", "airlines")["shardId"], "--format", "jsonl")
    lines = [json.loads(line) for line in programs.finish(job).splitlines() if line.startswith("{")]
    found = {(line.get("key", line)["carrier"], line.get("val", line)["name"]) for line in lines}
    expected = source("airlines")
    assert found == set(zip(expected["carrier"].to_pylist(), expected["name"].to_pylist(), strict=True))


@pytest.mark.usefixtures("flights")
def test_the_commands_of_the_tutorial_run(cluster: Any, tmp_path: Path) -> None:
    """In the namespace of the tests: the tutorial's own is the default of the context that `make cluster-demo` sets."""
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    commands = "".join(re.findall(r"^```sh cluster\n(.*?)^```$", tutorial, re.DOTALL | re.MULTILINE))
    assert "kubectl apply" in commands
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(cluster.run("kubectl", "config", "view", "--raw").stdout)
    kubeconfig.chmod(0o600)
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ("env", f"KUBECONFIG={kubeconfig}", path, "bash", "-euo", "pipefail", "-c")
    cluster.run(*shell, f"kubectl config set-context --current --namespace {NAMESPACE}")
    out = cluster.run(*shell, f"cd {ROOT}\n{commands}", timeout_s=900).stdout
    assert "sparksink.persistshard.io/flights condition met" in out
    assert all(f"PersistShard/{name}" in out for name in NAMES)
    assert "AA\tAmerican Airlines Inc.\n" in out


@pytest.mark.usefixtures("flights")
def test_the_numbers_on_the_objects_are_those_of_the_data(cluster: Any) -> None:
    """The status matches the store: rows read and written by the sink, updates in the shard."""
    progress = cluster.status("sparksink", "flights")["progress"]
    assert progress["rowsRead"] == ROWS["flights"]
    assert progress["updatesWritten"] == ROWS["flights"]

    def held() -> bool:
        return cluster.status("persistshard", "flights").get("storage", {}).get("updates") == ROWS["flights"]

    cluster.wait("status.storage.updates of shard flights", held, timeout_s=60)


def test_a_sink_whose_input_is_missing_says_so(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, _ = new_shard("no-input")
    sink = named("no-input")
    source = {"name": "parquet", "options": {"path": "examples/not-there.parquet"}}
    once = {"restart": {"maxConsecutiveFailures": 1}}
    cluster.apply(flights_sink(sink, shard, input={"type": "Format", "format": source}, **once))
    cluster.wait_condition("sparksink", sink, "Ready", "False", timeout_s=300)
    failure = cluster.wait(
        "status.lastFailure", lambda: cluster.status("sparksink", sink).get("lastFailure"), timeout_s=300
    )
    assert failure["class"] == "Configuration"
    assert "not-there.parquet" in failure["message"]
