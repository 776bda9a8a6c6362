"""An operator with inline storage, and a kubelet that runs the commands of its Jobs."""

import contextlib
import subprocess
import sys

from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_kit.command_line import persist
from persist_operator.api import conditions, names, times
from persist_operator.api.shard import CREDENTIALS_DIR
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD
from persist_operator.manifests.maintenance import TERMINATION_LOG
from persist_operator.settings import InlineStorage, LoopSettings, OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

SHARD = Key("PersistShard", "team", "flights")
SECRET = "team-store"  # noqa: S105 - its name


class Kubelet:
    """Runs the commands of a cluster's Jobs and reports their ends as Kubernetes does. They are processes if `starts_processes`."""

    def __init__(self, cluster, env, folder):
        self.cluster, self.env, self.folder = cluster, env, folder
        self.secrets, self.arguments, self.starts_processes = {}, [], False

    def mount(self, namespace, name, files):
        folder = self.folder / "secrets" / namespace / name
        folder.mkdir(parents=True)
        for key, text in files.items():
            (folder / key).write_text(text)
        self.secrets[namespace, name] = folder

    def projected(self, job, sources):
        """The folder of a projected volume. AssertionError for what keeps a real pod waiting: a Secret or a key that is missing."""
        folder = self.folder / "mounted" / job["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for one in (source["secret"] for source in sources):
            secret = self.secrets.get((job["namespace"], one["name"]))
            for item in one["items"]:
                found = None if secret is None else secret / item["key"]
                if found is not None and found.exists():
                    (folder / item["path"]).write_bytes(found.read_bytes())
                else:
                    assert one.get("optional"), f"{one['name']} has no key {item['key']}"
        return folder

    def jobs(self, kind=names.INSPECTION):
        found = self.cluster.find(JOB, None, {names.LABEL_KIND: kind})
        return sorted(found, key=lambda one: one["metadata"]["creationTimestamp"])

    def waiting(self, kind=names.INSPECTION):
        return [one for one in self.jobs(kind) if not one.get("status")]

    def run(self, kind=names.INSPECTION):
        """Run every waiting Job to its end. Returns their number."""
        todo = self.waiting(kind)
        for job in todo:
            spec = job["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            report = self.folder / f"{job['metadata']['name']}.report"
            sources = [one["projected"]["sources"] for one in spec["volumes"] if "projected" in one]
            mounted = self.projected(job["metadata"], sources[0]) if sources else None
            arguments = [
                one.replace(CREDENTIALS_DIR, str(mounted)).replace(TERMINATION_LOG, str(report))
                for one in container["args"]
            ]
            self.arguments.append(arguments)
            environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
            if self.starts_processes:
                command = [sys.executable, "-m", "persist_engine.cli", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
            else:
                done = persist(*arguments, environ=environ)
            message = report.read_text() if report.exists() else done.stderr
            self.end(job, done.returncode, message)
        return len(todo)

    def end(self, job, code, message, **terminated):
        name, namespace, now = job["metadata"]["name"], job["metadata"]["namespace"], times.to_text(self.env.now_ms())
        state = {"exitCode": code, "message": message[-4096:], "startedAt": now, "finishedAt": now, **terminated}
        self.pod(job, {"phase": "Failed" if code else "Succeeded"}, {"terminated": state})
        condition = {"type": "Failed" if code else "Complete", "status": "True", "lastTransitionTime": now}
        status = {"startTime": now, "completionTime": now, "conditions": [condition]}
        self.cluster.edit(JOB, namespace, name, lambda one: one.update(status=status))

    def pod(self, job, status, state):
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        labels = {**job["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
        metadata = {"namespace": namespace, "name": f"{name}-x", "labels": labels}
        self.cluster.create(POD, {"metadata": metadata})
        status = {**status, "containerStatuses": [{"name": "maintain", "state": state}]}
        self.cluster.edit(POD, namespace, f"{name}-x", lambda one: one.update(status=status))


class House:
    """An operator with inline storage on and no profile at all."""

    def __init__(self, now, folder, **inline):
        self.env = SeededEnv(start_ms=now)
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        self.kubelet = Kubelet(self.cluster, self.env, folder)
        self.settings = OperatorSettings(inline_storage=InlineStorage(enabled=True, **inline), loop=LoopSettings())
        self.opened = []
        self.restart()

    def restart(self):
        def open_client(location):
            self.opened.append(location)
            raise AssertionError("the operator connects to a store")

        self.bridge = Bridge(self.settings, env=self.env, open_client=open_client)
        metrics = OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, metrics)

    def look(self, key=SHARD):
        return self.reconciler.reconcile(key)

    def settle(self, key=SHARD, rounds=6):
        """Reconcile and run pods `rounds` times while time passes. Returns the status."""
        for _ in range(rounds):
            self.env.advance_ms(6000)
            self.look(key)
            self.kubelet.run()
            self.look(key)
        return self.status(key)

    def status(self, key=SHARD):
        return self.cluster.get(PERSIST_SHARD, key.namespace, key.name).get("status") or {}

    def condition(self, condition="Ready", key=SHARD):
        found = conditions.find(self.status(key), condition)
        return None if found is None else (found["status"], found["reason"])

    def words(self, condition="Ready", key=SHARD):
        return conditions.find(self.status(key), condition)["message"]


@contextlib.contextmanager
def houses(now, folder):
    """Makes Houses, closes them, and checks that their operators connected to no store."""
    made = []

    def build(**inline):
        made.append(House(now, folder, **inline))
        return made[-1]

    yield build
    for one in made:
        one.bridge.close()
        assert one.opened == []


GOOD = {"blob": {"bucket": "bbb", "endpoint": "https://s3.example"}, "consensus": {"address": "redis.example:6379"}}
ALLOWED = {
    "allowed_endpoints": ("s3.example", "*.minio.svc:9000"),
    "allowed_consensus": ("redis.example", "*.redis.svc:7000"),
    "allowed_secrets": ("team-store", "team-tls"),
}
