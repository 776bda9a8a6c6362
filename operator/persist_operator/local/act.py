"""Carries out the plan's actions on this machine: engine calls through the bridge, runs as child processes.

Every action is idempotent: a child's name is taken once, engine calls may be repeated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from persist_operator.api import quantity
from persist_operator.api.resource import Meta
from persist_operator.bridge import Bridge
from persist_operator.build import maintenance, sink_files
from persist_operator.local.processes import Processes
from persist_operator.plan.actions import Action, AdvanceSince, InitialiseShard, StartDriver, StartMaintenance, StopRun


class LocalActor:
    """Acts in one state folder. Children run where the runner runs (paths of inputs are relative to that) and inherit `environ`."""

    def __init__(self, processes: Processes, bridge: Bridge, *, environ: Mapping[str, str], cores: int) -> None:
        self._processes = processes
        self._bridge = bridge
        self._environ = environ
        self._cores = cores

    def act(self, action: Action, meta: Meta, kind: str) -> None:
        """Do it, or raise what the bridge raises. The resource is `kind` / `meta.name`."""
        owner = f"{kind}/{meta.name}"
        match action:
            case InitialiseShard():
                self._bridge.initialise(action)
            case AdvanceSince():
                self._bridge.advance_since(action)
            case StartMaintenance():
                self._start_maintenance(action, owner)
            case StartDriver():
                self._start_driver(action, meta, owner)
            case StopRun():
                self._processes.retire(action.name, grace_s=action.grace_seconds)
            case _:
                assert_never(action)

    def _start_maintenance(self, action: StartMaintenance, owner: str) -> None:
        folder = self._processes.folder(action.name)
        location = action.location
        arguments = maintenance.arguments(action.kind, action.shard_id, location.blob, location.consensus)
        report = str(folder / "report.json")
        arguments = [report if one == maintenance.TERMINATION_LOG else one for one in arguments]
        labels = {"kind": action.kind, "seqno": str(action.seqno), "reason": action.reason}
        command = [sys.executable, "-m", "persist_engine.cli", *arguments]
        self._processes.start(action.name, command, owner=owner, labels=labels, environ=self._environ)

    def _start_driver(self, action: StartDriver, meta: Meta, owner: str) -> None:
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
            **spec.spark.conf,
            "spark.master": f"local[{max(1, min(self._cores, executor.instances * executor.cores))}]",
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
        self._processes.start(action.name, command, owner=owner, labels=labels, environ=environ)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What children inherit: everything of the user's shell, with this interpreter for Spark's workers."""
    own = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    paths = [str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]
    return {**environ, **own, "PATH": os.pathsep.join(paths)}
