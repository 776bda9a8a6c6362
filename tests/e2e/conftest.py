"""The cluster of the end-to-end tests, which run.sh creates and fills.

Without a cluster the tests fail with the command that creates it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import yaml
from persist_engine.rows.schema import Schema
from persist_engine.storage.addresses import with_credentials
from persist_kit.neighbours import neighbours
from prometheus_client.parser import text_string_to_metric_families

neighbours(__file__, "sink_manifests")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "flights"
OPERATOR_NAMESPACE = "persist-system"
NAMESPACE = "persist-e2e"
STORES = "persist-stores"
#: Where programs mount the Secret of their namespace with the stores' credentials.
STORE_SECRET = "/var/run/secrets/persist/store"
#: Where pods mount the Secret with the password of Kafka.
KAFKA_SECRET = "/etc/kafka"
RELEASE = "persist-operator"
VALUES = yaml.safe_load((HERE / "values.yaml").read_text())
Manifest = dict[str, Any]
T = TypeVar("T")


class Seen:
    """Every object of a kind that existed while the block ran, also those that are gone again: their uids by name. `lines` has the name of
    one for each of its changes.
    """

    def __init__(self, environment: dict[str, str], kind: str, selector: str) -> None:
        columns = "custom-columns=UID:.metadata.uid,NAME:.metadata.name"
        words = ["--watch", "--no-headers", "--selector", selector, "--output", columns]
        self._command = ["kubectl", "--namespace", NAMESPACE, "get", kind, *words]
        self._environment = environment
        self.uids: dict[str, set[str]] = {}
        self.lines: list[str] = []

    def __enter__(self) -> Seen:
        self._watch = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=self._environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.kill()
        self._watch.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._watch.stdout is not None
        for line in self._watch.stdout:
            uid, name = line.split()
            self.uids.setdefault(name, set()).add(uid)
            self.lines.append(name)


class Cluster:
    """kubectl and helm with deadlines. A failed wait says what it waited for and shows the cluster."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def run(
        self, *command: str, given: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=timeout_s, env=self.environment, check=False
        )
        if check and done.returncode != 0:
            pytest.fail(
                f"{' '.join(command[:8])} failed ({done.returncode}):\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return done

    def kubectl(
        self,
        *words: str,
        namespace: str = NAMESPACE,
        given: str | None = None,
        timeout_s: float = 60,
        check: bool = True,
    ) -> str:
        return self.run(
            "kubectl", "--namespace", namespace, *words, given=given, timeout_s=timeout_s, check=check
        ).stdout

    def helm(self, *words: str, timeout_s: float = 240) -> str:
        return self.run("helm", "--namespace", OPERATOR_NAMESPACE, *words, timeout_s=timeout_s).stdout

    def get(self, kind: str, name: str, namespace: str = NAMESPACE) -> Manifest | None:
        text = self.kubectl("get", kind, name, "--ignore-not-found", "--output", "json", namespace=namespace)
        return json.loads(text) if text.strip() else None

    def items(self, kind: str, selector: str = "", namespace: str = NAMESPACE) -> list[Manifest]:
        found: list[Manifest] = json.loads(
            self.kubectl("get", kind, "--selector", selector, "--output", "json", namespace=namespace)
        )["items"]
        return found

    def apply(self, *manifests: Manifest, namespace: str = NAMESPACE) -> None:
        # JSON, because kubectl takes a bare n or y in YAML for a boolean.
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        self.kubectl("apply", "--filename", "-", namespace=namespace, given=json.dumps(listed))

    def delete(self, kind: str, *names: str, namespace: str = NAMESPACE, timeout_s: float = 60) -> None:
        self.kubectl(
            "delete",
            kind,
            *names,
            "--ignore-not-found",
            f"--timeout={int(timeout_s)}s",
            namespace=namespace,
            timeout_s=timeout_s + 10,
        )

    def kill(self, pod: str, namespace: str = NAMESPACE) -> None:
        """Deletes without a grace period, as the loss of a node does."""
        self.kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false", namespace=namespace)

    @contextmanager
    def cut_off(self, service: str) -> Iterator[None]:
        """A Service of the stores has no endpoints for the duration of the block."""
        app = service.removesuffix("-cut")
        patch = '{{"spec": {{"selector": {{"app": "{}"}}}}}}'
        self.kubectl("patch", "service", service, "--patch", patch.format("absent"), namespace=STORES)
        try:
            yield
        finally:
            self.kubectl("patch", "service", service, "--patch", patch.format(app), namespace=STORES)

    def status(self, kind: str, name: str, namespace: str = NAMESPACE) -> Manifest:
        found = self.get(kind, name, namespace)
        return {} if found is None else found.get("status", {})

    def condition(self, kind: str, name: str, type_: str, namespace: str = NAMESPACE) -> Manifest:
        return next(
            (one for one in self.status(kind, name, namespace).get("conditions", []) if one["type"] == type_), {}
        )

    def are(self, wanted: tuple[str, str, str], *names: str, namespace: str = NAMESPACE) -> bool:
        """Whether the condition (kind, type, status) holds of all of these."""
        kind, type_, status = wanted
        holding = {
            one["metadata"]["name"]
            for one in self.items(kind, namespace=namespace)
            for found in one.get("status", {}).get("conditions", [])
            if (found["type"], found["status"]) == (type_, status)
        }
        return holding >= set(names)

    def wait(
        self,
        what: str,
        probe: Callable[[], T],
        *,
        timeout_s: float = 120,
        every_s: float = 1.0,
        namespace: str = NAMESPACE,
    ) -> T:
        """The first true value of `probe`. On timeout the test fails and shows the cluster."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = probe()
            if value:
                return value
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout_s:.0f} s in vain for {what}\n{self.describe(namespace)}")
            time.sleep(every_s)

    def wait_condition(
        self,
        kind: str,
        name: str,
        type_: str,
        status: str = "True",
        *,
        reason: str | None = None,
        timeout_s: float = 120,
        namespace: str = NAMESPACE,
    ) -> Manifest:
        def probe() -> Manifest | None:
            found = self.condition(kind, name, type_, namespace)
            return found if found.get("status") == status and reason in (None, found.get("reason")) else None

        wanted = f"{kind} {name}: {type_}={status}" + (f" ({reason})" if reason else "")
        found = self.wait(wanted, probe, timeout_s=timeout_s, namespace=namespace)
        assert found is not None
        return found

    def describe(self, namespace: str) -> str:
        """Objects, events, and the ends of the logs of failing pods and of the operator."""
        parts = [
            self.kubectl(
                "get", "persistshards,sparksinks,pods,jobs", "--output", "wide", namespace=namespace, check=False
            ),
            self.kubectl(
                "get",
                "persistshards,sparksinks",
                "--output",
                'jsonpath={range .items[*]}{.kind} {.metadata.name} {.status}{"\\n"}{end}',
                namespace=namespace,
                check=False,
            ),
            self.kubectl("get", "events", "--sort-by=.lastTimestamp", namespace=namespace, check=False)[-3000:],
        ]
        for pod in self.items("pods", namespace=namespace):
            if pod.get("status", {}).get("phase") in ("Failed", "Running", "Pending"):
                name = pod["metadata"]["name"]
                parts.append(
                    f"--- {name}\n" + self.kubectl("logs", name, "--tail=30", namespace=namespace, check=False)[-4000:]
                )
        parts.append(
            "--- operator\n"
            + self.kubectl("logs", f"deployment/{RELEASE}", "--tail=60", namespace=OPERATOR_NAMESPACE, check=False)[
                -8000:
            ]
        )
        return "\n".join(parts)

    def operator_pod(self) -> Manifest | None:
        """The operator's pod that is ready and not terminating."""
        pods = self.items("pods", "app.kubernetes.io/component=operator", OPERATOR_NAMESPACE)
        alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        ready = [
            pod
            for pod in alive
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]
        return ready[0] if ready else None

    def scale_operator(self, replicas: int) -> None:
        """Scales the operator. Returns when terminating pods are gone and new pods are ready."""
        self.kubectl("scale", "deployment", RELEASE, f"--replicas={replicas}", namespace=OPERATOR_NAMESPACE)

        def settled() -> bool:
            pods = self.items("pods", "app.kubernetes.io/component=operator", OPERATOR_NAMESPACE)
            return len(pods) == replicas and (replicas == 0 or self.operator_pod() is not None)

        self.wait(f"{replicas} operators", settled, timeout_s=180, namespace=OPERATOR_NAMESPACE)

    def install(self, *words: str) -> None:
        """The chart with the values of the tests, and `words` for helm. Without words, as run.sh installs it."""
        self.helm(
            "upgrade",
            "--install",
            RELEASE,
            str(ROOT / "charts" / "persist-operator"),
            "--values",
            str(HERE / "values.yaml"),
            "--wait",
            "--timeout=180s",
            *words,
        )

    def figure(self, series: str, /, **labels: str) -> float:
        """The sum of the samples of a series of the operator that have these labels."""
        pod = self.operator_pod()
        assert pod is not None, "no operator is ready"
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{pod['metadata']['name']}:8080/proxy/metrics"
        families = text_string_to_metric_families(self.kubectl("get", "--raw", path))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        )

    def on_node(self, node: str, *command: str, check: bool = True) -> str:
        """Run a command in the container of a node."""
        return self.node("exec", node, *command, check=check)

    def node(self, *words: str, check: bool = True) -> str:
        """Run a command of the container engine that has the nodes."""
        engine = self.environment.get("KIND_EXPERIMENTAL_PROVIDER", "docker")
        return self.run(engine, *words, check=check).stdout

    @contextmanager
    def forwarded(self, target: str, port: int, namespace: str) -> Iterator[int]:
        """A port of this machine that leads to this port of a Service or a pod, while the block runs."""
        command = ["kubectl", "--namespace", namespace, "port-forward", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment) as forward:
            try:
                assert forward.stdout is not None
                yield int(forward.stdout.readline().split("127.0.0.1:")[1].split()[0])
            finally:
                forward.kill()

    def kubeconfig_of(self, account: str, *, namespace: str = NAMESPACE) -> str:
        """A kubeconfig with a token of a service account."""
        config = yaml.safe_load(self.kubectl("config", "view", "--raw", "--minify"))
        config["users"][0]["user"] = {"token": self.kubectl("create", "token", account, namespace=namespace).strip()}
        return str(yaml.safe_dump(config))

    def seen(self, kind: str, selector: str = "") -> Seen:
        """Starts to note the objects of this kind."""
        return Seen(self.environment, kind, selector)


def _urls(stores: Manifest) -> list[str]:
    """The URLs of a profile, for a pod that mounts its Secret."""
    return [with_credentials(stores[one], STORE_SECRET) for one in ("blob", "consensus")]


class Programs:
    """Runs the Python programs in programs/ in pods of the engine image, with the stores' credentials. Those that use Spark run in the image
    of sinks, and with the password of Kafka.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def start(
        self,
        program: str,
        *arguments: str,
        profile: str = "default",
        namespace: str = NAMESPACE,
        has_spark: bool = False,
    ) -> str:
        """Starts a program; returns the name of its Job. Its arguments are the two store URLs, then `arguments`."""
        stores = VALUES["storageProfiles"][profile]
        text = (HERE / "programs" / f"{program}.py").read_text()
        words = ["python3", "-c", text, *_urls(stores), *arguments]
        return self._start(program.replace("_", "-"), {"command": words}, stores["secretName"], namespace, has_spark)

    def start_cli(self, *arguments: str, profile: str = "default", namespace: str = NAMESPACE) -> str:
        """Starts the `persist` command line, the entry point of the image; returns the name of its Job."""
        stores = VALUES["storageProfiles"][profile]
        blob, consensus = _urls(stores)
        words = [*arguments, "--blob", blob, "--consensus", consensus]
        return self._start("persist-cli", {"args": words}, stores["secretName"], namespace)

    def finish(self, job: str, *, timeout_s: float = 180, namespace: str = NAMESPACE) -> str:
        """The output of a Job, once it succeeded. If it failed, the test fails with the output."""

        def probe() -> Manifest | None:
            status = self._cluster.status("job", job, namespace)
            return status if status.get("succeeded") or status.get("failed") else None

        status = self._cluster.wait(f"program {job}", probe, timeout_s=timeout_s, namespace=namespace)
        output = self._cluster.kubectl("logs", f"job/{job}", "--tail=-1", namespace=namespace)
        assert status is not None
        assert status.get("succeeded"), output[-4000:]
        return output

    def result(
        self,
        program: str,
        *arguments: str,
        profile: str = "default",
        timeout_s: float = 180,
        namespace: str = NAMESPACE,
        has_spark: bool = False,
    ) -> Manifest:
        """Runs a program to its end. The result is the last line of its output, as JSON."""
        output = self.finish(
            self.start(program, *arguments, profile=profile, namespace=namespace, has_spark=has_spark),
            timeout_s=timeout_s,
            namespace=namespace,
        )
        answer: Manifest = json.loads(output.strip().splitlines()[-1])
        return answer

    def _start(self, name: str, what: Manifest, secret: str, namespace: str, has_spark: bool = False) -> str:
        job = f"{name}-{uuid.uuid4().hex[:8]}"
        container: Manifest = {
            "name": "program",
            "image": VALUES["images"]["spark" if has_spark else "engine"],
            "imagePullPolicy": "IfNotPresent",
            **what,
            # For programs that use S3 without the engine.
            "env": [{"name": "AWS_SHARED_CREDENTIALS_FILE", "value": f"{STORE_SECRET}/aws-credentials"}],
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "store", "mountPath": STORE_SECRET, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }
        pod: Manifest = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "runAsGroup": 10001,
                "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "store", "secret": {"secretName": secret, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        if has_spark:
            container["volumeMounts"].append({"name": "kafka", "mountPath": KAFKA_SECRET, "readOnly": True})
            pod["volumes"].append({"name": "kafka", "secret": {"secretName": "kafka", "defaultMode": 0o440}})
        spec = {"backoffLimit": 0, "ttlSecondsAfterFinished": 1800, "template": {"spec": pod}}
        self._cluster.apply(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job}, "spec": spec}, namespace=namespace
        )
        return job


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster of `make cluster-up`, with the chart as installed by run.sh."""
    done = subprocess.run(
        ["bash", str(HERE / "cluster" / "cluster.sh"), "env"], capture_output=True, text=True, check=True
    )
    shell = subprocess.run(["bash", "-c", f"{done.stdout}\nenv -0"], capture_output=True, text=True, check=True)
    environment = dict(line.split("=", 1) for line in shell.stdout.split("\0") if "=" in line)
    found = Cluster({**os.environ, **environment})
    if (
        found.run(
            "kubectl", "--request-timeout=10s", "get", "crd", "persistshards.persistshard.io", check=False
        ).returncode
        != 0
    ):
        pytest.fail("no cluster with the chart installed: run `KEEP=1 make e2e` once, then pytest tests/e2e at will")
    return found


@pytest.fixture(scope="session")
def programs(cluster: Cluster) -> Programs:
    return Programs(cluster)


@pytest.fixture(scope="session")
def content() -> Any:
    """programs/content.py as a module: one function hashes the source here and the shard in the pod."""
    spec = importlib.util.spec_from_file_location("content", HERE / "programs" / "content.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source(name: str) -> pa.Table:
    """The expected contents of a shard: the example's file with the types that its shard declares, each row once."""
    shards = {one["metadata"]["name"]: one for one in yaml.safe_load_all((EXAMPLES / "shards.yaml").read_text())}
    declared = shards[name]["spec"]["schema"]
    schema = Schema.from_ddl(declared["key"], declared["value"])
    fields = {field.name: field.type for field in [*schema.key, *schema.val]}
    if name == "flights":
        table = pq.read_table(EXAMPLES / "data" / "flights.parquet")
    else:
        options = csv.ConvertOptions(column_types=fields, null_values=["NA"], strings_can_be_null=True)
        table = csv.read_csv(EXAMPLES / "data" / f"{name}.csv", convert_options=options)
    table = table.select(list(fields)).cast(pa.schema(list(fields.items())))
    return table.append_column("diff", pa.repeat(pa.scalar(1, pa.int64()), table.num_rows))


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder with the manifests and data of the examples."""
    return EXAMPLES


@pytest.fixture(scope="session")
def source() -> Callable[[str], pa.Table]:
    """The expected rows of each example, by its name, for hashing and comparison."""
    return _source


@pytest.fixture
def named(cluster: Cluster) -> Iterator[Callable[[str], str]]:
    """Fresh names for shards and sinks. Objects with these names are deleted after the test."""
    names: list[str] = []

    def name(stem: str) -> str:
        names.append(f"{stem}-{uuid.uuid4().hex[:6]}")
        return names[-1]

    yield name
    if names:
        cluster.delete("sparksinks.persistshard.io", *names)
        cluster.delete("persistshards.persistshard.io", *names)


def shard_manifest(name: str, *, key: str = "id BIGINT", value: str = "text STRING", **spec: Any) -> Manifest:
    """A PersistShard with a small schema, extended by `spec`."""
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "PersistShard",
        "metadata": {"name": name},
        "spec": {"schema": {"key": key, "value": value}, "retention": {"sinceLagSeconds": 0}, **spec},
    }


@pytest.fixture
def new_shard(cluster: Cluster, named: Callable[[str], str]) -> Callable[..., tuple[str, str]]:
    """Applies a PersistShard and waits until it is Ready. Returns its name and shard id."""

    def make(stem: str, **spec: Any) -> tuple[str, str]:
        name = named(stem)
        cluster.apply(shard_manifest(name, **spec))
        cluster.wait_condition("persistshard", name, "Ready")
        return name, cluster.status("persistshard", name)["shardId"]

    return make


@pytest.fixture
def new_shards(cluster: Cluster, named: Callable[[str], str]) -> Callable[..., dict[str, str]]:
    """Applies many PersistShards at once and waits until all are Ready. Returns the shard ids by name."""

    def make(stem: str, count: int, *, timeout_s: float = 180, **spec: Any) -> dict[str, str]:
        names = [named(stem) for _ in range(count)]
        cluster.apply(*(shard_manifest(name, **spec) for name in names))
        cluster.wait(
            f"{count} shards to be Ready",
            lambda: cluster.are(("persistshard", "Ready", "True"), *names),
            timeout_s=timeout_s,
        )
        return {
            one["metadata"]["name"]: one["status"]["shardId"]
            for one in cluster.items("persistshards")
            if one["metadata"]["name"] in names
        }

    return make


@pytest.fixture
def operator_is_there(cluster: Cluster) -> None:
    """The test begins with a running operator, whatever an earlier test did to it."""
    cluster.wait("a ready operator", cluster.operator_pod, timeout_s=180, namespace=OPERATOR_NAMESPACE)
