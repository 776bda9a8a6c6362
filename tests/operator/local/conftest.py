"""A state folder with the parts of the local runner: real stores (files, SQLite), real children, and drivers without Spark."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import yaml
from persist_engine.base.env import SystemEnv
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_kit.command_line import persist
from persist_operator.api.schema_check import load_schemas
from persist_operator.bridge import Bridge
from persist_operator.local.act import LocalActor, Room, child_environ, stop_everything
from persist_operator.local.objects import Objects
from persist_operator.local.processes import Processes
from persist_operator.local.runner import LocalRunner, checked
from persist_operator.settings import AllowedNamespaces, OperatorSettings, StorageProfile

PATIENCE_S = 200.0


def wait_for(true, what):
    """Wait until the condition holds. The failure names what did not happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.05)


class House:
    """One state folder, its parts, and the commands on it. Files in `control` command the drivers (see driver.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.control = folder, folder / "state", folder / "control"
        self.control.mkdir(parents=True)
        module = folder / "path" / "persist_spark"
        module.mkdir(parents=True)
        (module / "__init__.py").touch()
        shutil.copyfile(Path(__file__).with_name("driver.py"), module / "main.py")
        self.environ = {**os.environ, "PYTHONPATH": str(module.parent)}
        self.env = SystemEnv()
        self.objects, self.processes = Objects(self.state, self.env), Processes(self.state, self.env)
        store = (self.state.resolve() / "store").as_uri()
        self.location = Location(blob=f"{store}/blobs", consensus=f"sqlite{store.removeprefix('file')}/consensus.db")
        profile = StorageProfile(
            blob=self.location.blob,
            consensus=self.location.consensus,
            allowed_namespaces=AllowedNamespaces(names=("local",)),
        )
        self.settings = OperatorSettings(operator_id="local", storage_profiles={"default": profile})
        self.notes = []

    def shard(self, name="things", **spec):
        spec = {"schema": {"key": "id STRING"}, "gc": {"intervalSeconds": 10}, **spec}
        return self._resource("PersistShard", name, spec)

    def sink(self, name="load", shard="things", **spec):
        source = {"type": "Format", "format": {"name": "parquet", "options": {"path": str(self.control)}}}
        spec = {"shardRef": {"name": shard}, "input": source, "envelope": {"type": "Append"}, **spec}
        return self._resource("SparkSink", name, {"restart": {"backoffSeconds": 1}, **spec})

    @staticmethod
    def _resource(kind, name, spec):
        return {"apiVersion": "persistshard.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}

    wait = staticmethod(wait_for)

    def on_note(self, owner, note):
        self.notes.append((owner, note.reason, note.message))

    def write(self, *documents, name="all.yaml"):
        file = self.folder / name
        file.write_text(yaml.safe_dump_all(documents))
        return file

    def apply(self, *documents):
        for document in checked(documents, load_schemas(), self.objects):
            self.objects.apply(document)

    def run(self, *documents, drivers=2, memory_mib=None):
        """`up` in this process. Returns the resources that failed."""
        self.apply(*documents)
        with Bridge(self.settings, env=self.env) as bridge:
            room = Room(cores=2, drivers_max=drivers, maintenance_max=2, memory_mib=memory_mib)
            actor = LocalActor(self.processes, bridge, environ=child_environ(self.environ), room=room)
            runner = LocalRunner(
                self.objects, self.processes, bridge, actor, settings=self.settings, env=self.env, on_note=self.on_note
            )
            return runner.run(watch=False, after_pass=lambda: None)

    def status(self, kind, name):
        return self.objects.get(kind, name)["status"]

    def attempts(self):
        return len(list(self.control.glob("attempt-*")))

    def command(self, *arguments):
        """The words that run the command line as a process."""
        return [sys.executable, "-m", "persist_engine.cli", "local", *arguments, "--state", str(self.state)]

    def local(self, *arguments, code=0):
        """Run the command line in this process to its end and check its exit code."""
        words = ["local", *map(str, arguments), "--state", str(self.state)]
        done = persist(*words, folder=self.folder, environ=self.environ)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def rows(self, name="things"):
        """The sum of the diffs in the shard."""
        shard_id = ShardId(self.status("PersistShard", name)["shardId"])
        with PersistClient.open(self.location) as client:
            upper = client.recent_upper(shard_id)
            if upper.time == 0:
                return 0
            with client.open_leased_reader(shard_id, purpose="test") as reader:
                table = reader.snapshot(as_of=Antichain.of(upper.time - 1)).to_table()
                return sum(table["diff"].to_pylist())


@pytest.fixture
def house(tmp_path):
    made = House(tmp_path)
    yield made
    stop_everything(made.processes, grace_s=0)


@pytest.fixture
def wait_until():
    return wait_for
