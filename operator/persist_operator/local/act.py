"""Carries out the plan's actions on this machine: calls the engine through the bridge, starts runs as child processes.

Every action is idempotent: a child's name is used once, and calls of the engine may be repeated. A run without room waits, because
the next plan starts it again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import conditions, names, times
from persist_operator.api.resource import Meta
from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR
from persist_operator.api.sink import SinkSpec
from persist_operator.bridge import Bridge
from persist_operator.local.objects import Objects
from persist_operator.local.processes import Child, Processes
from persist_operator.manifests import maintenance, sink_files, sink_memory, spark_compaction
from persist_operator.plan.actions import (
    Action,
    AdvanceSince,
    EvolveSchema,
    InitialiseShard,
    KeepFinalizer,
    PromoteDriver,
    StartDriver,
    StartInspection,
    StartMaintenance,
    StartReclaim,
    StopRun,
)

_MAINTENANCE_MAX = 4
#: The message on a run that `down` or Ctrl-C ended.
STOPPED = "`persist local` was interrupted or taken down; the next `persist local up` continues"
#: The label with the memory that a driver may take.
_MEMORY_LABEL = "memory_mib"
_QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The limits on concurrent runs. Other runs wait for a place, as a pod waits for a node."""

    cores: int
    """The upper bound of `local[N]` for each driver."""
    drivers_max: int
    maintenance_max: int
    memory_mib: int | None = None
    """The memory of all drivers together. A driver that runs alone always has room. None: no bound."""

    @classmethod
    def of_machine(cls, *, cores: int, memory_mib: int, drivers_max: int | None = None) -> Room:
        """One driver for each core, if they fit into the memory, because cores are idle while Spark starts, and drivers that do not fit
        would swap. `drivers_max` sets the number instead, regardless of memory.
        """
        return cls(
            cores=cores,
            drivers_max=drivers_max or max(1, cores),
            maintenance_max=min(_MAINTENANCE_MAX, max(1, cores)),
            memory_mib=memory_mib if drivers_max is None else None,
        )

    def workers(self, spec: SinkSpec) -> int:
        """The number of tasks that a driver runs at once: those of all its executors, but at most one for each core."""
        return max(1, min(self.cores, spec.spark.executors_max * spec.spark.executor.cores))

    def holds(self, need_mib: int, running_mib: Sequence[int]) -> bool:
        """Whether a driver that may take `need_mib` fits beside the running drivers."""
        if len(running_mib) >= self.drivers_max:
            return False
        return self.memory_mib is None or not running_mib or sum(running_mib) + need_mib <= self.memory_mib


class LocalActor:
    """Acts in one state folder. Children inherit `environ` and the working folder, to which paths of inputs are relative."""

    def __init__(
        self,
        processes: Processes,
        bridge: Bridge,
        *,
        environ: Mapping[str, str],
        room: Room,
        credentials_dir: str = OPERATOR_CREDENTIALS_DIR,
    ) -> None:
        """`credentials_dir`: see Bridge."""
        self._credentials_dir = credentials_dir
        self._processes = processes
        self._bridge = bridge
        self._environ = environ
        self._room = room
        self.is_bounded = False
        """Whether streams end when their source has no new rows."""

    def act(self, action: Action, meta: Meta, kind: str) -> bool:
        """Carry out `action` for the resource `kind`/`meta.name`. Raises the errors of the bridge.

        Returns whether this call started or stopped a run: False when an earlier call did, and when there is no room.
        """
        owner = f"{kind}/{meta.name}"
        match action:
            case InitialiseShard():
                self._bridge.initialise(action)
            case EvolveSchema():
                self._bridge.evolve(action)
            case AdvanceSince():
                self._bridge.advance_since(action)
            case StartMaintenance():
                return self._start_maintenance(action, owner)
            case StartDriver():
                return self._start_driver(action, meta, owner)
            case PromoteDriver():
                (self._processes.folder(action.name) / sink_files.PROMOTION_KEY).touch()
            case StartReclaim():
                return self._start_reclaim(action, owner)
            case KeepFinalizer():
                raise InvalidUsage(f"{owner}: the runner itself keeps the finalizers of its resources")
            case StartInspection():
                raise InvalidUsage(
                    f"{action.name}: the local runner starts no pods, so it cannot use stores that a resource names"
                )
            case StopRun():
                stopped = self._processes.is_known(action.name)
                self._processes.retire(action.name, grace_s=action.grace_seconds)
                return stopped
            case _:
                assert_never(action)
        return False

    def _has_room(self, name: str, *, driver_mib: int | None = None) -> bool:
        """Whether there is room for a driver that may take `driver_mib`, or (None) for a maintenance run."""
        if self._processes.is_known(name):
            return True  # started before: starting it again has no effect
        running = [child for child in self._processes.every() if child.running]
        drivers = [int(child.labels.get(_MEMORY_LABEL, "0")) for child in running if child.labels["kind"] == "driver"]
        if driver_mib is None:
            return len(running) - len(drivers) < self._room.maintenance_max
        return self._room.holds(driver_mib, drivers)

    def _start_maintenance(self, action: StartMaintenance, owner: str) -> bool:
        if not self._has_room(action.name):
            return False
        folder = self._processes.folder(action.name)
        location = action.location
        credentials, report = f"{self._credentials_dir}/{location.profile}", str(folder / "report.json")
        labels = {
            "kind": action.kind,
            "seqno": str(action.seqno),
            "reason": action.reason,
            "runner": action.runner or "",
        }
        if action.runner == "Spark":
            properties = folder / "spark-defaults.conf"
            problem = java_problem(self._environ)
            if problem is not None:
                raise InvalidUsage(f"compaction.runner: Spark: {problem}")
            conf = {**_QUIET, **_on_this_machine(folder, workers=min(self._room.cores, action.spark_executors))}
            properties.write_text(sink_files.properties_text(conf), encoding="utf-8")
            arguments = spark_compaction.arguments(
                action, credentials_dir=credentials, properties=str(properties), report=report
            )
            command = [sys.executable, "-m", "persist_spark.main", *arguments]
        else:
            blob, consensus = location.urls(credentials)
            arguments = maintenance.arguments(action, blob, consensus, memory=action.memory)
            arguments = [report if one == maintenance.TERMINATION_LOG else one for one in arguments]
            command = [sys.executable, "-m", "persist_engine.cli", *arguments]
        return self._processes.start(action.name, command, owner=owner, labels=labels, environ=self._environ)

    def _start_reclaim(self, action: StartReclaim, owner: str) -> bool:
        if not self._has_room(action.name):
            return False
        location, report = action.location, str(self._processes.folder(action.name) / "report.json")
        urls = location.urls(f"{self._credentials_dir}/{location.profile}")
        arguments = maintenance.reclaim_arguments(action, *urls)
        arguments = [report if one == maintenance.TERMINATION_LOG else one for one in arguments]
        command = [sys.executable, "-m", "persist_engine.cli", *arguments]
        labels = {"kind": names.RECLAIM}
        return self._processes.start(action.name, command, owner=owner, labels=labels, environ=self._environ)

    def _start_driver(self, action: StartDriver, meta: Meta, owner: str) -> bool:
        spec = action.spec
        workers = self._room.workers(spec)
        memory_mib = sink_memory.local_mib(spec, workers=workers)
        if not self._has_room(action.name, driver_mib=memory_mib):
            return False
        folder = self._processes.folder(action.name)
        credentials = f"{self._credentials_dir}/{action.location.profile}"
        source = action.location if action.source is None else action.source.location
        document = sink_files.sink_document(
            action,
            meta,
            credentials_dir=credentials,
            input_credentials_dir=f"{self._credentials_dir}/{source.profile}",
            is_bounded=self.is_bounded,
        )
        (folder / "sink.json").write_text(sink_files.json_text(document), encoding="utf-8")
        conf = {
            **_QUIET,
            **spec.spark.conf,
            **_on_this_machine(folder, workers=workers),
            "spark.app.name": meta.key,
            "spark.driver.memory": f"{sink_memory.local_heap_mib(spec)}m",
        }
        (folder / "spark-defaults.conf").write_text(sink_files.properties_text(conf), encoding="utf-8")
        labels = {
            "kind": "driver",
            "attempt": str(action.attempt),
            "run_number": str(action.run_number),
            "run_id": action.run_id,
            "revision": spec.revision,
            _MEMORY_LABEL: str(memory_mib),
            "stands_by": "true" if action.stands_by else "",
            "scheduled_ms": "" if action.scheduled_ms is None else str(action.scheduled_ms),
        }
        files = {
            "--spec": "sink.json",
            "--properties": "spark-defaults.conf",
            "--report": "report.json",
            "--progress": "progress.json",
            "--promote": sink_files.PROMOTION_KEY,
        }
        arguments = [part for option, name in files.items() for part in (option, str(folder / name))]
        if spec.options_secret:
            arguments += ["--options", f"{self._credentials_dir}/{spec.options_secret}"]
        if spec.code_config_map:
            arguments += ["--code", str(Path.cwd() / spec.code_config_map)]
        command = [sys.executable, "-m", "persist_spark.main", "driver", *arguments]
        return self._processes.start(action.name, command, owner=owner, labels=labels, environ=self._environ)


def _on_this_machine(folder: Path, *, workers: int) -> dict[str, str]:
    return {
        "spark.master": f"local[{workers}]",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(folder / "scratch"),
    }


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of children: the user's, with this interpreter for Spark's workers."""
    own = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    paths = [str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]
    return {**environ, **own, "PATH": os.pathsep.join(paths)}


def java_problem(environ: Mapping[str, str]) -> str | None:
    """The reason why Spark would find no Java, and the remedy; None when Spark finds one."""
    home = environ.get("JAVA_HOME")
    if home and not os.access(Path(home) / "bin" / "java", os.X_OK):
        return f"JAVA_HOME is {home}, which has no bin/java; set it to a Java runtime (17 or newer), or unset it"
    if not home and shutil.which("java", path=environ.get("PATH", os.defpath)) is None:
        return "Spark needs a Java runtime (17 or newer), and none was found: install one, or set JAVA_HOME"
    return None


def stop_everything(processes: Processes, *, grace_s: float, objects: Objects | None = None) -> list[str]:
    """Stop all running children and return their names. Idempotent. The next `up` repeats those that did not succeed, and nothing is
    written twice: a driver's next attempt finds the commit of its run, and maintenance starts again under the same name. The statuses in
    `objects` then record the attempts as stopped.
    """
    running = [child for child in processes.every() if child.running]
    processes.stop([child.name for child in running], grace_s=grace_s)
    for child in running:
        ended = processes.get(child.name)
        if ended is None or ended.exit_code == 0:
            continue
        if child.labels["kind"] == "driver":
            if objects is not None:
                _remember_stop(objects, child, ended_ms=ended.ended_ms or child.started_ms)
            processes.retire(child.name, grace_s=0)
        else:
            processes.discard(child.name, grace_s=0)
    return [child.name for child in running]


def _remember_stop(objects: Objects, child: Child, *, ended_ms: int) -> None:
    """Record the attempt as stopped. The planner then starts the next attempt, and does not count this one as lost or failed."""
    kind, _, name = child.owner.partition("/")
    document = objects.get(kind, name)
    driver = ((document or {}).get("status") or {}).get("driver") or {}
    if document is None or driver.get("podName") != child.name:
        return
    status, end = document["status"], times.to_text(ended_ms)
    item = {
        "attempt": status.get("attempt", 0),
        "run": str(status.get("run", {}).get("id", "")),
        "revision": str(status.get("run", {}).get("revision", "")),
        "startTime": driver.get("startTime", end),
        "endTime": end,
        "outcome": "Stopped",
        "message": f"stopped: {STOPPED}",
    }
    history = [item, *status.get("history", ())][: document["spec"]["cleanup"]["historyLimit"]]
    status = {**status, "driver": {**driver, "phase": "Deleted", "endTime": end}, "history": history}
    found = conditions.reconciling("Stopped", STOPPED)
    generation = document["metadata"]["generation"]
    before = document["status"].get("conditions", ())
    status = conditions.with_outcome(status, found, before, generation=generation, now_ms=ended_ms)
    objects.set_status(kind, name, status)
