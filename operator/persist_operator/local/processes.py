"""Children of the local runner: started once by name, observed by what they leave in files, found again after a restart.

Owns `<state>/children/<name>/`: child.json (owner, labels), lock, pid, log, report.json, exit. A name is taken for ever, as a pod's
name would be: starting it again is a no-op.

Invariant: `lock` is held exactly as long as the supervisor or its command lives (never by process ids alone: those come back after
a reboot). Free and no exit code: it was killed, exit code 137.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persist_engine.base.env import Env

KILLED = 137
_POLL_S = 0.05
#: How long the kernel may take to clear a process away after SIGKILL before we stop waiting for it.
_AFTER_KILL_S = 10.0
#: A tail is read from at most this many bytes at the end of a log.
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What is seen of one child. `exit_code` is None while it runs; `report` is what it wrote, if anything."""

    name: str
    owner: str
    labels: Mapping[str, str]
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
        """The last lines it printed, of the last MiB."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Processes:
    """The children under one state folder. One starter at a time (the runner holds the state folder's lock)."""

    def __init__(self, state: Path, env: Env) -> None:
        # Children get this path, and the runner may be started from elsewhere next time.
        self._root = state.resolve() / "children"
        self._env = env
        self._own: list[subprocess.Popen[bytes]] = []

    def folder(self, name: str) -> Path:
        """Where a child's files are; exists after the call."""
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def is_known(self, name: str) -> bool:
        """Whether a child of that name was ever started."""
        return (self._root / name / "child.json").exists()

    def start(
        self, name: str, command: Sequence[str], *, owner: str, labels: Mapping[str, str], environ: Mapping[str, str]
    ) -> bool:
        """Start `command` unless a child of that name was ever started; whether it was started now. The child outlives this process.

        The record stands before the process does: a runner that dies in between leaves a child that counts as killed, never two.
        """
        if self.is_known(name):
            return False
        folder = self.folder(name)
        with (folder / "lock").open("wb") as lock, (folder / "log").open("ab") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            document = {"owner": owner, "labels": dict(labels), "started_ms": self._env.now_ms()}
            _write(folder / "child.json", json.dumps(document))
            supervisor = [
                sys.executable,
                "-m",
                "persist_operator.local.supervise",
                str(folder),
                str(lock.fileno()),
                "--",
            ]
            try:
                process = subprocess.Popen(
                    [*supervisor, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(environ),
                    start_new_session=True,
                    pass_fds=(lock.fileno(),),
                )
            except OSError as error:  # no memory, too many processes: the child failed, the runner goes on
                log.write(f"cannot start: {error}\n".encode())
            else:
                self._own.append(process)
        return True

    def get(self, name: str) -> Child | None:
        """What is seen of the child now, or None when there is none."""
        folder = self._root / name
        try:
            document = json.loads((folder / "child.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        # In this order: an exit code is written while the lock is still held.
        held, exit_file = _is_held(folder / "lock"), folder / "exit"
        code, ended_ms = None, None
        if exit_file.exists():
            code = int(exit_file.read_text(encoding="ascii"))
            ended_ms = exit_file.stat().st_mtime_ns // 1_000_000
        elif not held:
            code = KILLED
            ended_ms = (folder / "log").stat().st_mtime_ns // 1_000_000
        return Child(
            name=name,
            owner=document["owner"],
            labels=document["labels"],
            started_ms=document["started_ms"],
            ended_ms=ended_ms,
            exit_code=code,
            report=_report(folder / "report.json"),
            log=folder / "log",
        )

    def every(self) -> list[Child]:
        """All children that were not retired, oldest first."""
        self._own = [process for process in self._own if process.poll() is None]
        folders = [path for path in self._root.glob("*") if (path / "child.json").exists()]
        names = [path.name for path in folders if not (path / "retired").exists()]
        found = [child for child in map(self.get, names) if child is not None]
        return sorted(found, key=lambda child: (child.started_ms, child.name))

    def stop(self, names: Iterable[str], *, grace_s: float) -> None:
        """SIGTERM to each command, then SIGKILL to everything of those that still run after `grace_s`. Returns when they have ended.

        Ended children are left alone. Idempotent.
        """
        going, asked = set(names), set[str]()
        deadline = self._env.monotonic_s() + grace_s
        while going := {name for name in going if self._is_running(name)}:
            late = self._env.monotonic_s() >= deadline
            for name in going:
                if late:
                    self._signal_group(name)
                elif name not in asked and self._signal_supervisor(name):
                    asked.add(name)
            if self._env.monotonic_s() >= deadline + _AFTER_KILL_S:
                return
            self._env.sleep(_POLL_S)
        for name in asked:
            self._signal_group(name)  # what the command left behind in its group, such as a JVM

    def retire(self, name: str, *, grace_s: float) -> None:
        """Stop the child and leave it out of `every` from now on; its files stay, for its logs. Idempotent."""
        if not self.is_known(name):
            return
        self.stop([name], grace_s=grace_s)
        shutil.rmtree(self._root / name / "scratch", ignore_errors=True)
        (self._root / name / "retired").touch()

    def discard(self, name: str, *, grace_s: float) -> None:
        """Stop the child and remove all of it: its name is free again. Idempotent."""
        self.stop([name], grace_s=grace_s)
        shutil.rmtree(self._root / name, ignore_errors=True)

    def _is_running(self, name: str) -> bool:
        child = self.get(name)
        return child is not None and child.running

    def _signal_supervisor(self, name: str) -> bool:
        """SIGTERM; False when it has not told its process id yet."""
        return self._signal(name, signal.SIGTERM, os.kill)

    def _signal_group(self, name: str) -> bool:
        return self._signal(name, signal.SIGKILL, os.killpg)

    def _signal(self, name: str, number: signal.Signals, send: Any) -> bool:
        try:
            pid = int((self._root / name / "pid").read_text(encoding="ascii"))
        except FileNotFoundError:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
        return True


def _is_held(path: Path) -> bool:
    """Whether somebody holds the lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _report(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
