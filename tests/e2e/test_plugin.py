"""`kubectl persist` on the live cluster: what it shows, what it asks for, what a bundle holds, with the rights of the kubeconfig."""

from __future__ import annotations

import base64
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_runs import runs
from sink_manifests import airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

NAMESPACE = "persist-e2e"
PROGRAM = str(Path(sys.executable).parent / "kubectl-persist")


@pytest.fixture
def plugin(cluster: Any) -> Callable[..., Any]:
    """Runs `kubectl persist WORDS -n NAMESPACE`; standard output, or the whole process where another exit code is expected."""

    def run(*words: str, code: int = 0, timeout_s: float = 300) -> Any:
        done = cluster.run(PROGRAM, *words, "-n", NAMESPACE, timeout_s=timeout_s, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done

    return run


def test_the_plugin_shows_asks_waits_and_reads(
    cluster: Any, programs: Any, plugin: Callable[..., Any], new_shard: Callable[..., tuple[str, str]]
) -> None:
    quiet = {"compaction": {"mode": "Manual"}, "gc": {"enabled": False}, "rollup": {"everySeqnos": 1000}}
    shard, shard_id = new_shard("plugin", **quiet)
    programs.result("write_batches", shard_id, "12", "2000")
    before = programs.result("content", shard_id)

    assert f"PersistShard/{shard} is ready: Healthy" in plugin("status", shard)
    assert any(one["name"] == shard for one in json.loads(plugin("status", "-o", "json"))["items"])
    for verb in ("compact", "rollup", "gc", "verify", "orphans"):
        assert "Succeeded" in plugin(verb, shard, "--wait", "--timeout", "200"), verb
    kinds = {run["type"] for run in cluster.status("persistshard", shard)["history"] if run["outcome"] == "Succeeded"}
    assert kinds >= {"Rollup", "Compaction", "GC", "Verify", "OrphanScan"}
    history = plugin("history", shard)
    assert all(kind in history for kind in ("Compaction", "Verify"))
    assert cluster.condition("persistshard", shard, "Verified")["status"] == "True"
    assert "Succeeded" in plugin("logs", shard)
    assert shard in plugin("top")
    plugin("plan", shard)
    plugin("holds", shard)
    (record, *_) = [run["deletionRecord"] for run in runs(cluster, shard, "GC") if run.get("deletionRecord")]
    assert record in plugin("deletions", shard, "--pod")

    rows = plugin("read", shard, "--pod", "--count", "--json")
    assert json.loads(rows.strip().splitlines()[-1]) == {"rows": before["rows"]}

    def is_gone() -> bool:
        return not [pod for pod in cluster.items("pods") if f"{shard}-kubectl-" in pod["metadata"]["name"]]

    cluster.wait("the pod of the read to go", is_gone, timeout_s=60)

    plugin("suspend", shard)
    cluster.wait_condition("persistshard", shard, "Suspended", timeout_s=60)
    late = plugin("rollup", shard, "--wait", "--timeout", "3", code=2)
    assert "suspended" in late.stderr
    plugin("resume", shard)
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=60)
    assert "absent" in plugin("status", "absent", code=1).stderr
    assert programs.result("content", shard_id)["hash"] == before["hash"]


def test_the_plugin_follows_a_log_and_runs_a_sink_again(
    cluster: Any, plugin: Callable[..., Any], named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, _ = new_shard("plugin-sink", key="carrier STRING", value="name STRING")
    sink = named("plugin-sink")
    cluster.apply(airlines_sink(sink, shard))
    cluster.wait(
        "a driver", lambda: cluster.condition("sparksink", sink, "Running").get("status") == "True", timeout_s=300
    )
    assert '"event"' in plugin("logs", sink, "-f"), "it ends with the driver"
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=300)
    tree = plugin("status", shard)
    assert f"SparkSink/{sink}" in tree
    assert "succeeded" in plugin("restart", sink, "--wait", "--timeout", "400", timeout_s=420)
    assert len(cluster.status("sparksink", sink)["history"]) == 2
    assert "there is nothing to promote" in plugin("promote", sink, code=64).stderr
    completed = cluster.run(str(Path(PROGRAM).with_name("kubectl_complete-persist")), "logs", "-n", NAMESPACE, sink[:8])
    assert sink in completed.stdout


def test_the_plugin_expires_a_hold_adopts_a_shard_and_says_what_stays(
    cluster: Any,
    programs: Any,
    plugin: Callable[..., Any],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    shard, shard_id = new_shard("plugin-hold", retention={"sinceLagSeconds": 1})
    reader = programs.result("hold", shard_id, "weekly report")["reader"]
    programs.result("retract", shard_id, "a-mark", "20")
    cluster.wait("the hold to be shown", lambda: reader in plugin("holds", shard), timeout_s=120, every_s=3)
    assert "weekly report" in plugin("holds", shard)
    plugin("rollup", shard, "--wait", "--timeout", "200")  # the pod of the next command is like that of this run
    assert "critical reader" in plugin("holds", shard, "--expire", reader, "--pod", code=64).stdout
    plugin("holds", shard, "--expire", reader, "--pod", "--force")
    assert reader in plugin("holds", shard), "without --commit it says what would happen"
    plugin("holds", shard, "--expire", reader, "--pod", "--commit", "--force")
    cluster.wait("the hold to be gone", lambda: reader not in plugin("holds", shard), timeout_s=120, every_s=3)

    stays = plugin("uninstall-check", "-o", "json", code=1)
    assert any(one["verdict"] == "stays" and shard_id in one["what"] for one in json.loads(stays.stdout)["items"])
    cluster.delete("persistshards.persistshard.io", shard)
    again = named("plugin-adopted")
    assert shard_id in plugin("adopt", again, "--shard-id", shard_id, "--dry-run")
    assert cluster.get("persistshard", again) is None
    plugin("adopt", again, "--shard-id", shard_id)
    cluster.wait_condition("persistshard", again, "Ready", timeout_s=120)
    assert cluster.status("persistshard", again)["shardId"] == shard_id
    assert programs.result("content", shard_id)["rows"] == 20
    plugin("accept-log", again)
    assert "persistshard.io/request-accept-log" in cluster.get("persistshard", again)["metadata"]["annotations"]


def test_a_support_bundle_of_the_live_cluster_holds_no_secret(
    cluster: Any, plugin: Callable[..., Any], new_shard: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    shard, _ = new_shard("bundle")
    plugin("report", "--file", str(tmp_path / "report.zip"))
    with zipfile.ZipFile(tmp_path / "report.zip") as bundle:
        texts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert shard in texts["status.txt"]
    assert any(name.startswith("operator/") and name.endswith(".log") for name in texts)
    held = cluster.get("secret", "persist-store", namespace=NAMESPACE)["data"]
    for name in ("redis-password", "secret-key"):
        secret = base64.b64decode(held[name]).decode()
        for path, text in texts.items():
            assert secret not in text, path
            assert held[name] not in text, path


def test_the_plugin_says_which_right_is_missing(cluster: Any, plugin: Callable[..., Any], tmp_path: Path) -> None:
    cluster.kubectl("create", "serviceaccount", "looker", check=False)
    (tmp_path / "config").write_text(cluster.kubeconfig_of("looker"))
    refused = plugin("status", "--kubeconfig", str(tmp_path / "config"), code=1)
    assert "list" in refused.stderr
    assert "persistshards" in refused.stderr
