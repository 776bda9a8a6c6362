"""Every command of the runbooks, on the live cluster: of kubectl with the kubeconfig of a person, of `persist` in pods."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_runs import IDLE, ask, succeeded
from sink_manifests import numbers_stream

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
NAMESPACE = "persist-e2e"
#: What shows nothing of a resource that is well, has no plan, and was never killed.
MAY_BE_EMPTY = re.compile(r"finalizers|status\.(plan|holds|verification|rollout|lastFailure)")
#: What this cluster has not: a metrics server, and a container of the operator that ended.
ABSENT = {"kubectl top": "Metrics API not available", "--previous": "previous terminated container"}


def commands(program: str) -> list[str]:
    """The commands of this program on all pages, each once: of blocks, and of texts."""
    found: dict[str, None] = {}
    for page in sorted(RUNBOOKS.glob("*.md")):
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
        lines = [*blocks, *re.findall(r"`([^`\n]+)`", text)]
        found |= dict.fromkeys(line for line in lines if line.startswith(f"{program} "))
    return list(found)


def test_every_command_of_the_runbooks_runs(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """A stream that runs, and a shard that was verified and that a reader holds."""
    shard, shard_id = new_shard("runbook", value="number BIGINT", **IDLE)
    sink = named("runbook")
    cluster.apply(numbers_stream(sink, shard))
    ask(cluster, "verify", shard)
    cluster.wait("the verification", lambda: "Verify" in succeeded(cluster, shard), timeout_s=300)
    cluster.wait_condition("sparksink", sink, "Running", timeout_s=400)
    cluster.wait(
        "an executor", lambda: cluster.items("pods", f"persistshard.io/sink={sink},persistshard.io/role=executor")
    )
    # Without a commit there is no time to read at.
    cluster.wait(
        "a commit of the stream",
        lambda: cluster.status("sparksink", sink).get("progress", {}).get("running", {}).get("upper"),
        timeout_s=300,
    )
    reader = programs.result("hold", shard_id, "weekly report")["reader"]

    def filled(command: str) -> str:
        name = sink if "ssink" in command or "/sink=" in command else shard
        words = {"NAMESPACE": NAMESPACE, "NAME": name, "SHARD": shard_id, "ID": reader}
        return re.sub(r"(?<![A-Z:])(NAMESPACE|NAME|SHARD|ID)(?!:)\b", lambda found: words[found[0]], command)

    bad = []
    # Requests last: a pod that is being created has no log yet.
    for command in sorted(commands("kubectl"), key=lambda one: "annotate" in one):
        done = cluster.run("bash", "-c", filled(command), check=False)
        reason = next((says for part, says in ABSENT.items() if part in command), None)
        if reason is not None:
            is_right = done.returncode == 0 or reason in done.stderr
        else:
            is_right = done.returncode == 0 and bool(done.stdout.strip() or MAY_BE_EMPTY.search(command))
        if not is_right:
            bad.append(f"{filled(command)}: {done.returncode} {done.stdout[-300:]}{done.stderr[-300:]}")
    assert not bad, "\n".join(bad)

    started = {
        command: programs.start_cli(*shlex.split(filled(command))[1:])
        for command in commands("persist")
        if "--expire" not in command
    }
    assert len(started) > 12
    for job in started.values():
        assert programs.finish(job).strip()
    (expire,) = [command for command in commands("persist") if "--expire" in command]
    # A critical reader, as the page says of one.
    assert reader in programs.finish(programs.start_cli(*shlex.split(filled(expire))[1:], "--force"))
