"""Plans on the live cluster: what waits for a person or a window, approved by the plugin, and seen in the console with the rights of the viewer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

NAMESPACE, SYSTEM = "persist-e2e", "persist-system"
PROGRAM = str(Path(sys.executable).parent / "kubectl-persist")
QUIET = {"gc": {"enabled": False}, "rollup": {"everySeqnos": 1000}}


def far_window() -> dict[str, Any]:
    """A window that opens in twelve hours."""
    hour = (time.gmtime().tm_hour + 12) % 24
    return {"schedule": f"0 {hour} * * *", "durationSeconds": 600, "timeZone": "Etc/UTC"}


def compactions(cluster: Any, shard: str) -> list[str]:
    history = cluster.status("persistshard", shard).get("history", [])
    return [run["outcome"] for run in history if run["type"] == "Compaction"]


def test_a_compaction_waits_for_its_window_and_for_an_approval_of_its_plan(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    spec = {"compaction": {"maxUncompactedBatches": 2}, "maintenance": {"windows": [far_window()]}}
    shard, shard_id = new_shard("plans", **QUIET, **spec)
    programs.result("write_batches", shard_id, "12", "50")
    before = programs.result("content", shard_id)
    closed = cluster.wait_condition(
        "persistshard", shard, "CompactionCurrent", "False", reason="WindowClosed", timeout_s=90
    )
    assert "the next window opens at" in closed["message"]

    change = {"spec": {"maintenance": {"windows": None, "approval": "Required"}}}
    cluster.kubectl("patch", "persistshard", shard, "--type=merge", "--patch", json.dumps(change))
    waiting = cluster.wait_condition(
        "persistshard", shard, "CompactionCurrent", "False", reason="AwaitingApproval", timeout_s=90
    )
    plan = cluster.status("persistshard", shard)["plan"]
    assert plan["id"] in waiting["message"]
    assert (plan["type"], plan["approved"]) == ("Compaction", False)
    assert compactions(cluster, shard) == []
    wrong = cluster.run(PROGRAM, "approve", shard, "--id", "another", "-n", NAMESPACE, check=False)
    assert wrong.returncode == 64
    assert plan["id"] in wrong.stderr

    done = cluster.run(
        PROGRAM, "approve", shard, "--id", plan["id"], "--wait", "-n", NAMESPACE, timeout_s=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert compactions(cluster, shard) == ["Succeeded"]
    run = next(one for one in cluster.status("persistshard", shard)["history"] if one["type"] == "Compaction")
    assert run["cpuSeconds"] >= 0
    assert programs.result("content", shard_id)["hash"] == before["hash"]


@contextlib.contextmanager
def console(cluster: Any) -> Iterator[Callable[[str, str], tuple[int, str]]]:
    """Fetches pages of the console's Service with a token: the code and the page."""
    command = ["kubectl", "-n", SYSTEM, "port-forward", "service/persist-operator-console", ":8787"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cluster.environment) as forward:
        try:
            assert forward.stdout is not None
            port = forward.stdout.readline().split("127.0.0.1:")[1].split()[0]

            def page(path: str, token: str) -> tuple[int, str]:
                request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
                if token:
                    request.add_header("Authorization", f"Bearer {token}")
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            yield page
        finally:
            forward.kill()


def test_the_console_shows_each_viewer_what_the_viewer_may_see(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("console")
    viewer, stranger = named("viewer"), named("stranger")
    for account in (viewer, stranger):
        cluster.kubectl("create", "serviceaccount", account)
    cluster.kubectl("create", "rolebinding", viewer, "--clusterrole=view", f"--serviceaccount={NAMESPACE}:{viewer}")
    tokens = {account: cluster.kubectl("create", "token", account).strip() for account in (viewer, stranger)}
    path = f"/shards/{NAMESPACE}/{shard}"
    with console(cluster) as page:
        assert page("/", "")[0] == 401
        assert page("/", "x" * 20)[0] == 401
        code, text = page(path, tokens[stranger])
        assert (code, shard_id in text) == (403, False)
        assert "get persistshards.persistshard.io" in text
        code, text = page("/", tokens[viewer])
        assert (code, shard in text) == (200, True)
        code, text = page(path, tokens[viewer])
        assert (code, shard_id in text) == (200, True)
        assert page(f"/shards/persist-e2e-other/{shard}", tokens[viewer])[0] == 403
