"""Carries out the plan's actions on this machine: engine calls through the bridge, runs as child processes.

Every action is idempotent: a child's name is taken once, engine calls may be repeated. What finds no room waits: the plan asks again.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from persist_operator.api import quantity
from persist_operator.api.resource import Meta
from persist_operator.bridge import Bridge
from persist_operator.build import maintenance, sink_files
from persist_operator.local.processes import Processes
from persist_operator.plan.actions import Action, AdvanceSince, InitialiseShard, StartDriver, StartMaintenance, StopRun

#: A local Spark driver is driver and executors in one process: JVM and Python workers take about this much together.
_DRIVER_MIB = 3072
_MAINTENANCE_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much runs at once. What is beyond it waits for a place, as a pod would for a node."""

    cores: int
    """Upper bound of `local[N]` for each driver."""
    drivers_max: int
    maintenance_max: int

    @classmethod
    def of_machine(cls, *, cores: int, memory_mib: int, drivers_max: int | None = None) -> Room:
        """Two drivers on a laptop with two cores and 8 GiB: starting Spark leaves cores idle, more than memory holds ends in swap."""
        fitting = max(1, min(cores, memory_mib // _DRIVER_MIB))
        return cls(
            cores=cores, drivers_max=drivers_max or fitting, maintenance_max=min(_MAINTENANCE_MAX, max(1, cores))
        )


class LocalActor:
    """Acts in one state folder. Children run where the runner runs (paths of inputs are relative to that) and inherit `environ`."""

    def __init__(self, processes: Processes, bridge: Bridge, *, environ: Mapping[str, str], room: Room) -> None:
        self._processes = processes
        self._bridge = bridge
        self._environ = environ
        self._room = room

    def act(self, action: Action, meta: Meta, kind: str) -> bool:
        """Do it, or raise what the bridge raises. The resource is `kind` / `meta.name`.

        Whether a run was started: not when it was started before, and not when it finds no room.
        """
        owner = f"{kind}/{meta.name}"
        match action:
            case InitialiseShard():
                self._bridge.initialise(action)
            case AdvanceSince():
                self._bridge.advance_since(action)
            case StartMaintenance():
                return self._start_maintenance(action, owner)
            case StartDriver():
                return self._start_driver(action, meta, owner)
            case StopRun():
                self._processes.retire(action.name, grace_s=action.grace_seconds)
            case _:
                assert_never(action)
        return False

    def _has_room(self, name: str, *, driver: bool) -> bool:
        if self._processes.is_known(name):
            return True  # started before: nothing will happen
        going = [child.labels["kind"] == "driver" for child in self._processes.every() if child.running]
        return going.count(driver) < (self._room.drivers_max if driver else self._room.maintenance_max)

    def _start_maintenance(self, action: StartMaintenance, owner: str) -> bool:
        if not self._has_room(action.name, driver=False):
            return False
        folder = self._processes.folder(action.name)
        location = action.location
        arguments = maintenance.arguments(
            action.kind, action.shard_id, location.blob, location.consensus, memory=action.memory
        )
        report = str(folder / "report.json")
        arguments = [report if one == maintenance.TERMINATION_LOG else one for one in arguments]
        labels = {"kind": action.kind, "seqno": str(action.seqno), "reason": action.reason}
        command = [sys.executable, "-m", "persist_engine.cli", *arguments]
        return self._processes.start(action.name, command, owner=owner, labels=labels, environ=self._environ)

    def _start_driver(self, action: StartDriver, meta: Meta, owner: str) -> bool:
        if not self._has_room(action.name, driver=True):
            return False
        folder = self._processes.folder(action.name)
        spec = action.spec
        document = sink_files.sink_document(
            meta,
            spec=spec,
            run_id=action.run_id,
            shard_id=action.shard_id,
            schema=action.schema,
            location=action.location,
        )
        (folder / "sink.json").write_text(sink_files.json_text(document), encoding="utf-8")
        driver, executor = spec.spark.driver, spec.spark.executor
        # One process is driver and executors: it gets the memory of all of them.
        memory = quantity.to_mebibytes(driver.memory) + executor.instances * quantity.to_mebibytes(executor.memory)
        conf = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            **spec.spark.conf,
            "spark.master": f"local[{max(1, min(self._room.cores, executor.instances * executor.cores))}]",
            "spark.app.name": meta.key,
            "spark.driver.memory": f"{memory}m",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.local.dir": str(folder / "scratch"),
        }
        (folder / "spark-defaults.conf").write_text(sink_files.properties_text(conf), encoding="utf-8")
        labels = {
            "kind": "driver",
            "attempt": str(action.attempt),
            "run_number": str(action.run_number),
            "run_id": action.run_id,
            "revision": spec.revision,
            "scheduled_ms": "" if action.scheduled_ms is None else str(action.scheduled_ms),
        }
        spec_file, report = str(folder / "sink.json"), str(folder / "report.json")
        command = [sys.executable, "-m", "persist_spark.main", "driver", "--spec", spec_file, "--report", report]
        environ = {**self._environ, "SPARK_CONF_DIR": str(folder)}
        return self._processes.start(action.name, command, owner=owner, labels=labels, environ=environ)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What children inherit: everything of the user's shell, with this interpreter for Spark's workers."""
    own = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    paths = [str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]
    return {**environ, **own, "PATH": os.pathsep.join(paths)}


def java_problem(environ: Mapping[str, str]) -> str | None:
    """Why Spark would find no Java where it looks, and what to do; None when there is one."""
    home = environ.get("JAVA_HOME")
    if home and not os.access(Path(home) / "bin" / "java", os.X_OK):
        return (
            f"JAVA_HOME is {home}, and there is no bin/java in it; set it to a Java runtime (17 or newer), or unset it"
        )
    if not home and shutil.which("java", path=environ.get("PATH", os.defpath)) is None:
        return "sinks run on Spark, which needs a Java runtime (17 or newer), and there is none: install one, or set JAVA_HOME"
    return None


def stop_everything(processes: Processes, *, grace_s: float) -> list[str]:
    """Stop what runs; the names. Idempotent. The next `up` repeats what did not end well, and nothing is doubled:

    a driver's next attempt finds what its run has appended, maintenance starts again under the same name.
    """
    running = [child for child in processes.every() if child.running]
    processes.stop([child.name for child in running], grace_s=grace_s)
    for child in running:
        ended = processes.get(child.name)
        if ended is None or ended.exit_code == 0:
            continue
        if child.labels["kind"] == "driver":
            processes.retire(child.name, grace_s=0)  # lost, as the plan sees it: no fault of the sink's
        else:
            processes.discard(child.name, grace_s=0)
    return [child.name for child in running]
