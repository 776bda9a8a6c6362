"""Children of the local runner. They are started once for each name, observed through their files, and found again after a restart.

Owns `<state>/children/<name>/`: child.json (owner, labels), lock, pid, log, report.json, exit. A name is used once: starting it again
is a no-op.

Invariant: `lock` is held exactly as long as the supervisor or its command lives. Process ids prove nothing, because a reboot assigns them
anew. A free lock without an exit code means that the child was killed: exit code 137.
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
from persist_engine.base.errors import CorruptData

from persist_operator.local.objects import files_in

KILLED = 137
_POLL_S = 0.05
#: The longest wait for the kernel to remove a process after SIGKILL.
_AFTER_KILL_S = 10.0
#: The most bytes at the end of a log that are read for a tail.
_TAIL_BYTES = 1 << 20
#: The most characters of a driver's progress that are read. Our drivers write less.
_TOLD_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One child as its files show it. `exit_code` is None while it runs. `report`: its report; None without one."""

    name: str
    owner: str
    labels: Mapping[str, str]
    started_ms: int
    ended_ms: int | None
    exit_code: int | None
    report: Mapping[str, Any] | None
    log: Path
    progress: str | None = None
    """The unchecked progress of a running driver; None when it reports nothing."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.exit_code is None

    def log_tail(self, lines: int) -> str:
        """The last `lines` lines of its output, from the last MiB."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


class Processes:
    """The children of one state folder. One process at a time starts children: the runner, which holds the state folder's lock."""

    def __init__(self, state: Path, env: Env) -> None:
        # The path must be absolute, because children get it, and the next runner may start in another folder.
        self._root = state.resolve() / "children"
        self._env = env
        self._own: list[subprocess.Popen[bytes]] = []

    def folder(self, name: str) -> Path:
        """The folder of a child's files. The call creates it."""
        path = self._root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def is_known(self, name: str) -> bool:
        """Whether a child of that name was ever started."""
        return (self._root / name / "child.json").exists()

    def start(
        self, name: str, command: Sequence[str], *, owner: str, labels: Mapping[str, str], environ: Mapping[str, str]
    ) -> bool:
        """Start `command` unless a child of that name was ever started; returns whether this call started it. The child outlives this
        process.

        The record is written before the process starts. So a runner that dies in between leaves one child that counts as killed, and never
        two.
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
            except OSError as error:  # no memory, too many processes: the child failed, but the runner continues
                log.write(f"cannot start: {error}\n".encode())
            else:
                self._own.append(process)
        return True

    def get(self, name: str) -> Child | None:
        """The child as its files show it now; None when there is none. Raises CorruptData, which names the file, for a damaged record."""
        folder = self._root / name
        document = _record(folder / "child.json")
        if document is None:
            return None
        # The lock is read first, because a child writes its exit code while the lock is held.
        held, exit_file = _is_held(folder / "lock"), folder / "exit"
        code, ended_ms = None, None
        if (written := _number(exit_file)) is not None:
            code, ended_ms = written, _changed_ms(exit_file)
        elif not held:  # nor can the code be read if the machine lost its power just after the end
            code, ended_ms = KILLED, _changed_ms(folder / "log")
        return Child(
            name=name,
            owner=document["owner"],
            labels=document["labels"],
            started_ms=document["started_ms"],
            ended_ms=ended_ms,
            exit_code=code,
            report=_report(folder / "report.json"),
            log=folder / "log",
            progress=_progress(folder / "progress.json"),
        )

    def every(self) -> list[Child]:
        """All children except the retired ones, oldest first. Raises OSError when the folder of children cannot be read."""
        self._own = [process for process in self._own if process.poll() is None]
        folders = [path for path in files_in(self._root) if (path / "child.json").exists()]
        names = [path.name for path in folders if not (path / "retired").exists()]
        found = [child for child in map(self.get, names) if child is not None]
        return sorted(found, key=lambda child: (child.started_ms, child.name))

    def stop(self, names: Iterable[str], *, grace_s: float) -> None:
        """Send SIGTERM to each command, and after `grace_s` SIGKILL to the process groups that still run. Returns when all have ended, or
        ten seconds after SIGKILL.

        Has no effect on ended children. Idempotent.
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
            self._signal_group(name)  # processes that the command left in its group, such as a JVM

    def retire(self, name: str, *, grace_s: float) -> None:
        """Stop the child, and leave it out of `every` from now on. Its files stay, for its log. Idempotent."""
        if not self.is_known(name):
            return
        self.stop([name], grace_s=grace_s)
        shutil.rmtree(self._root / name / "scratch", ignore_errors=True)
        (self._root / name / "retired").touch()

    def discard(self, name: str, *, grace_s: float) -> None:
        """Stop the child and remove its files, so that its name is free again. Idempotent."""
        self.stop([name], grace_s=grace_s)
        shutil.rmtree(self._root / name, ignore_errors=True)

    def forget(self, owner: str, *, grace_s: float) -> None:
        """`discard` every child of `owner`, including retired ones. Idempotent."""
        for path in files_in(self._root):
            child = self.get(path.name)
            if child is not None and child.owner == owner:
                self.discard(child.name, grace_s=grace_s)

    def _is_running(self, name: str) -> bool:
        child = self.get(name)
        return child is not None and child.running

    def _signal_supervisor(self, name: str) -> bool:
        """Send SIGTERM; False when the supervisor has not written its process id yet."""
        return self._signal(name, signal.SIGTERM, os.kill)

    def _signal_group(self, name: str) -> bool:
        return self._signal(name, signal.SIGKILL, os.killpg)

    def _signal(self, name: str, number: signal.Signals, send: Any) -> bool:
        pid = _number(self._root / name / "pid")
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
        return True


def _is_held(path: Path) -> bool:
    """Whether a process holds the lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _record(path: Path) -> dict[str, Any] | None:
    """A child's record; None when there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("owner", "labels", "started_ms")}
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        remedy = f"if none of its processes runs, remove the folder {path.parent}"
        raise CorruptData(
            f"{path} holds no record of a run: {type(error).__name__}: {error}; {remedy}", key=str(path)
        ) from error


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no file, or no number in it."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def _changed_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def _progress(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_TOLD_MAX)
    except (OSError, UnicodeDecodeError):
        return None


def _report(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # otherwise the file may be empty after a loss of power
    temporary.replace(path)
