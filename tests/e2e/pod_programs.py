"""Programs that the end-to-end tests run in pods of the cluster, with the stores' credentials."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import yaml
from live_cluster import NAMESPACE, Cluster
from persist_engine.storage.addresses import with_credentials

HERE = Path(__file__).resolve().parent
#: Where programs mount the Secret of their namespace with the stores' credentials.
STORE_SECRET = "/var/run/secrets/persist/store"
#: Where pods mount the Secret with the password of Kafka.
KAFKA_SECRET = "/etc/kafka"
VALUES = yaml.safe_load((HERE / "values.yaml").read_text())
Manifest = dict[str, Any]


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
