"""Children of the local runner: started once by name, observed by what they leave in files, found again after a restart.

Owns `<state>/children/<name>/`: child.json (pid, labels), log, report.json, exit. A name is taken for ever, as a pod's name would be:
starting it again is a no-op. A child whose supervisor is gone without an exit code was killed: exit code 137.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persist_engine.base.env import Env

KILLED = 137


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What is seen of one child. `exit_code` is None while it runs; `report` is what it wrote, if anything."""

    name: str
    owner: str
    labels: Mapping[str, str]
    pid: int
    started_ms: int
    ended_ms: int | None
    exit_code: int | None
    report: Mapping[str, Any] | None
    log: Path

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None

    def log_tail(self, lines: int) -> str:
        """The last lines it printed."""
        if not self.log.is_file():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Processes:
    """The children under one state folder."""

    def __init__(self, state: Path, env: Env) -> None:
        self._root = state / "children"
        self._env = env

    def folder(self, name: str) -> Path:
        """Where a child's files are; exists after the call."""
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(
        self, name: str, command: Sequence[str], *, owner: str, labels: Mapping[str, str], environ: Mapping[str, str]
    ) -> None:
        """Start `command` unless a child of that name was ever started. Idempotent. The child outlives this process."""
        folder = self.folder(name)
        record = folder / "child.json"
        if record.exists():
            return
        supervised = [sys.executable, "-m", "persist_operator.local.supervise", str(folder / "exit"), "--", *command]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                supervised, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environ), start_new_session=True
            )
        document = {"owner": owner, "labels": dict(labels), "pid": process.pid, "started_ms": self._env.now_ms()}
        record.with_suffix(".tmp").write_text(json.dumps(document), encoding="utf-8")
        record.with_suffix(".tmp").replace(record)

    def get(self, name: str) -> Child | None:
        """What is seen of the child now, or None when there is none."""
        folder = self._root / name
        try:
            document = json.loads((folder / "child.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        alive = _alive(document["pid"])
        exit_file = folder / "exit"
        code = int(exit_file.read_text(encoding="ascii")) if exit_file.exists() else None
        if code is None and not alive:
            code = KILLED
        ended_ms = None
        if code is not None:
            stamp = exit_file if exit_file.exists() else folder / "log"
            ended_ms = stamp.stat().st_mtime_ns // 1_000_000
        return Child(
            name=name,
            owner=document["owner"],
            labels=document["labels"],
            pid=document["pid"],
            started_ms=document["started_ms"],
            ended_ms=ended_ms,
            exit_code=code,
            report=_report(folder / "report.json"),
            log=folder / "log",
        )

    def every(self) -> list[Child]:
        """All children that were not retired, oldest first."""
        folders = [path for path in self._root.glob("*") if (path / "child.json").exists()]
        names = [path.name for path in folders if not (path / "retired").exists()]
        found = [child for child in map(self.get, names) if child is not None]
        return sorted(found, key=lambda child: (child.started_ms, child.name))

    def stop(self, name: str, *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL of the whole group after `grace_s`. Returns when it has ended."""
        child = self.get(name)
        if child is None or not child.running:
            return
        _signal(child.pid, signal.SIGTERM)
        deadline = self._env.monotonic_s() + grace_s
        while _alive(child.pid) and self._env.monotonic_s() < deadline:
            self._env.sleep(0.05)
        _signal(child.pid, signal.SIGKILL)

    def retire(self, name: str, *, grace_s: float) -> None:
        """Stop the child and leave it out of `every` from now on; its files stay, for its logs. Idempotent."""
        if self.get(name) is None:
            return
        self.stop(name, grace_s=grace_s)
        shutil.rmtree(self._root / name / "scratch", ignore_errors=True)
        (self._root / name / "retired").touch()


def _alive(pid: int) -> bool:
    """Whether the process runs; a zombie of ours is reaped and counts as gone."""
    with contextlib.suppress(ChildProcessError):
        done, _ = os.waitpid(pid, os.WNOHANG)
        return done == 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _report(path: Path) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found
