"""The live cluster of the end-to-end tests: kubectl and helm with deadlines, the operator's pod and figures, and the nodes."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPERATOR_NAMESPACE = "persist-system"
NAMESPACE = "persist-e2e"
STORES = "persist-stores"
RELEASE = "persist-operator"
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
        self, *command: str, given: str | None = None, timeout_s: float = 120, check: bool = True
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
        timeout_s: float = 120,
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

    def ready_operators(self) -> list[Manifest]:
        """The operator's pods that are ready and not terminating."""
        pods = self.items("pods", "app.kubernetes.io/component=operator", OPERATOR_NAMESPACE)
        alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        return [
            pod
            for pod in alive
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]

    def operator_pod(self) -> Manifest | None:
        """One of the operator's pods that is ready and not terminating."""
        return next(iter(self.ready_operators()), None)

    def operators(self) -> list[str]:
        """The names of the operator's pods."""
        pods = self.items("pods", "app.kubernetes.io/component=operator", OPERATOR_NAMESPACE)
        return [one["metadata"]["name"] for one in pods]

    def leader(self) -> str:
        """The operator's pod that holds the Lease; empty if there is none, and while the Lease still names a pod that is gone."""
        lease = self.get("lease", RELEASE, OPERATOR_NAMESPACE) or {}
        named = str((lease.get("spec") or {}).get("holderIdentity", "")).partition("_")[0]
        return named if named in self.operators() else ""

    def scale_operator(self, replicas: int) -> None:
        """Scales the operator. Returns when terminating pods are gone and all others are ready."""
        self.kubectl("scale", "deployment", RELEASE, f"--replicas={replicas}", namespace=OPERATOR_NAMESPACE)

        def settled() -> bool:
            return len(self.operators()) == len(self.ready_operators()) == replicas

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
