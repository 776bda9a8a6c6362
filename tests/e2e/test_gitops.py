"""Flux reconciles examples/gitops: it waits for shards and sinks, undoes an edit, shares no field with the operator, and prunes without a hang.
It installs the operator, and upgrades and removes it, from the chart in a registry.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

ROOT = Path(__file__).resolve().parents[2]
GITOPS = ROOT / "examples" / "gitops"
CONTROLLERS = Path.home() / ".cache" / "persist-operator" / "flux"
FLUX, SYSTEM = "flux-system", "persist-system"
RELEASE = "persist-operator"
GIT = "http://git.flux-system.svc/cgi-bin/git"
#: No run falls due while the test runs: the example's input does not exist here.
NEVER = "0 0 29 2 *"
REGISTRY = "registry.flux-system.svc:5000"
#: The namespace that stands for the example's.
TEAM = "persist-e2e"
#: The name of the example's resources here. Those of examples/flights have the example's, and a shard keeps its schema.
NAME = "departures"
PLUGIN = str(Path(sys.executable).parent / "kubectl-persist")
REQUEST = "persistshard.io/request-verify"
DEFINITIONS = ("persistshards.persistshard.io", "sparksinks.persistshard.io")


class Fleet:
    """The repository of the example and the objects by which Flux follows it."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.files = {f"crds/{path.name}": path.read_text() for path in (ROOT / "crds").glob("*.yaml")} | {
            f"shards/{path.name}": path.read_text()
            .replace("namespace: team", f"namespace: {TEAM}")
            .replace("name: flights", f"name: {NAME}")
            .replace("15 * * * *", NEVER)
            for path in (GITOPS / "shards").glob("*.yaml")
        }

    def commit(self) -> str:
        """The repository then holds `files` and nothing else, and no history. Returns the revision."""
        lines = [b"commit refs/heads/main\ncommitter e2e <e2e@localhost> now\ndata 1\n.\ndeleteall\n"]
        for path, text in self.files.items():
            raw = text.encode()
            lines.append(f"M 100644 inline {path}\ndata {len(raw)}\n".encode() + raw + b"\n")
        git = ("exec", "--stdin", "deployment/git", "--container", "git", "--", "git", "-C", "/srv/team/fleet")
        stream = b"".join(lines).decode()
        self.cluster.kubectl(
            *git, "fast-import", "--quiet", "--force", "--date-format=now", namespace=FLUX, given=stream
        )
        return str(self.cluster.kubectl(*git, "rev-parse", "refs/heads/main", namespace=FLUX)).strip()

    def follow(self) -> None:
        """Applies the files of examples/gitops/flux, all but those about the chart."""
        documents = [
            text
            for name in ("source", "definitions", "shards")
            for text in (GITOPS / "flux" / f"{name}.yaml").read_text().split("\n---\n")
            if "kind: OCIRepository" not in text
        ]
        text = "\n---\n".join(documents).replace("https://git.example.com", GIT)
        self.cluster.kubectl("apply", "--filename", "-", namespace=FLUX, given=text)

    def ask(self, kind: str, name: str) -> str:
        """Requests a reconcile, as `flux reconcile` does. Returns the request."""
        token = uuid.uuid4().hex
        self.cluster.kubectl(
            "annotate", "--overwrite", kind, name, f"reconcile.fluxcd.io/requestedAt={token}", namespace=FLUX
        )
        return token

    def reconcile(self, revision: str) -> None:
        """Flux has fetched the revision and applied it. It may wait still for what it applied."""
        for kind, name in (("gitrepository", "fleet"), ("kustomization", "persist-shards")):
            token = self.ask(kind, name)

            def handled(kind: str = kind, name: str = name, token: str = token) -> bool:
                status = self.cluster.status(kind, name, FLUX)
                seen = status.get("artifact", {}).get("revision") or status.get("lastAttemptedRevision") or ""
                return status.get("lastHandledReconcileAt") == token and seen.endswith(revision)

            self.cluster.wait(f"{kind} {name} at {revision}", handled, timeout_s=120, namespace=FLUX)

    def ready(self, name: str = "persist-shards", status: str = "True", *, timeout_s: float = 240) -> dict[str, Any]:
        found = self.cluster.wait_condition("kustomization", name, "Ready", status, timeout_s=timeout_s, namespace=FLUX)
        return dict(found)

    def remove(self) -> None:
        """Deletes the Kustomizations, and waits until their finalizers have let them go."""
        for kind, names in (
            ("kustomization", ("persist-shards", "persist-definitions")),
            ("gitrepository", ("fleet",)),
        ):
            self.cluster.delete(kind, *names, namespace=FLUX)


@pytest.fixture(scope="module")
def flux(cluster: Any) -> Iterator[None]:
    """Flux runs in its namespace. Afterwards nothing of it is left."""
    crds = [str(CONTROLLERS / f"{one}-controller.crds.yaml") for one in ("source", "kustomize", "helm")]
    cluster.kubectl("apply", "--server-side", *(f"--filename={path}" for path in crds), timeout_s=120)
    installed = str(Path(__file__).with_name("flux") / "flux.yaml")
    cluster.kubectl("apply", f"--filename={installed}", namespace=FLUX)
    for name in ("git", "registry", "source-controller", "kustomize-controller", "helm-controller"):
        cluster.kubectl("rollout", "status", f"deployment/{name}", "--timeout=120s", namespace=FLUX, timeout_s=130)
    yield
    cluster.kubectl("delete", f"--filename={installed}", "--timeout=120s", namespace=FLUX, timeout_s=130)
    cluster.kubectl("delete", *(f"--filename={path}" for path in crds), "--timeout=120s", timeout_s=130)
    labels = [f"kustomize.toolkit.fluxcd.io/{one}-" for one in ("name", "namespace")]
    cluster.kubectl("label", "crd", *DEFINITIONS, *labels)
    cluster.kubectl("annotate", "crd", *DEFINITIONS, "kustomize.toolkit.fluxcd.io/prune-")


@pytest.fixture
def fleet(cluster: Any, flux: None) -> Iterator[Fleet]:
    """A repository with the files of the example, which Flux does not follow yet."""
    made = Fleet(cluster)
    made.commit()
    yield made
    made.remove()
    cluster.delete("sparksinks.persistshard.io", NAME)
    cluster.delete("persistshards.persistshard.io", NAME, "broken")


def leaves(fields: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The paths of a managed field set. A dot stands for the presence of its parent, which no manager's value contradicts."""
    for name, below in fields.items():
        if below:
            yield from leaves(below, f"{path}/{name}")
        elif name != ".":
            yield f"{path}/{name}"


def shared_fields(resource: Mapping[str, Any]) -> dict[str, set[str]]:
    """The fields that two managers own."""
    owners: dict[str, set[str]] = {}
    for entry in resource["metadata"]["managedFields"]:
        for path in leaves(entry["fieldsV1"]):
            owners.setdefault(path, set()).add(entry["manager"])
    assert any(path.startswith("/f:spec") for path in owners), "managedFields without a spec"
    assert any(path.startswith("/f:status") for path in owners), "managedFields without a status"
    return {path: managers for path, managers in owners.items() if len(managers) > 1}


def applied(resource: Mapping[str, Any]) -> tuple[int, list[Any]]:
    """What changes when Flux changes a resource: its generation, and what Flux owns of it and since when."""
    entries = resource["metadata"]["managedFields"]
    mine = [entry for entry in entries if entry["manager"] == "kustomize-controller"]
    assert mine, "Flux owns fields"
    return resource["metadata"]["generation"], mine


def both(cluster: Any) -> list[dict[str, Any]]:
    shown = ("get", "--show-managed-fields", "--output=json")
    return [yaml.safe_load(cluster.kubectl(*shown, kind, NAME)) for kind in ("persistshard", "sparksink")]


@pytest.mark.wish(5)
def test_wish_flux_is_ready_when_all_shards_and_sinks_are_and_fails_at_once_for_one_that_is_stalled(
    cluster: Any, fleet: Fleet
) -> None:
    """While no operator runs the resources have no status, and Flux waits. A stalled one ends its wait long before the time-out."""
    cluster.scale_operator(0)
    try:
        fleet.follow()

        def waits() -> bool:
            waiting = cluster.condition("kustomization", "persist-shards", "Reconciling", FLUX)
            return "health check" in waiting.get("message", "")

        cluster.wait("Flux to wait for health", waits, timeout_s=180, every_s=0.5, namespace=FLUX)
        assert all("conditions" not in one.get("status", {}) for one in both(cluster))
    finally:
        cluster.scale_operator(1)
    became = fleet.ready()["lastTransitionTime"]
    for one in both(cluster):
        (ready,) = [found for found in one["status"]["conditions"] if found["type"] == "Ready"]
        assert (ready["status"], one["status"]["observedGeneration"]) == ("True", one["metadata"]["generation"])
        assert became >= ready["lastTransitionTime"], "Flux was Ready before the resource"

    listed = yaml.safe_load(fleet.files["shards/kustomization.yaml"])
    listed["resources"].append("broken.yaml")
    fleet.files["shards/kustomization.yaml"] = yaml.safe_dump(listed)
    broken = {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "PersistShard",
        "metadata": {"name": "broken"},
        "spec": {"schema": {"key": "id BIGINT"}, "storageProfile": "unknown"},
    }
    fleet.files["shards/broken.yaml"] = yaml.safe_dump(broken)
    fleet.reconcile(fleet.commit())
    failed = fleet.ready(status="False", timeout_s=60)
    assert failed["reason"] == "HealthCheckFailed"
    assert "broken" in failed["message"]


@pytest.mark.wish(11)
def test_wish_gitops_undoes_what_kubectl_wrote_keeps_requests_and_no_field_has_two_managers(
    cluster: Any, fleet: Fleet
) -> None:
    """A sync that finds nothing to change writes nothing. `kubectl` stands for its own commands and `kubectl persist suspend`."""
    revision = fleet.commit()
    fleet.follow()
    fleet.ready()
    assert [shared_fields(one) for one in both(cluster)] == [{}, {}]
    before = [applied(one) for one in both(cluster)]
    cluster.run(PLUGIN, "verify", NAME, "-n", TEAM, "--wait", timeout_s=240)
    fleet.reconcile(revision)
    fleet.ready()
    assert [applied(one) for one in both(cluster)] == before, "neither a status nor a request is drift"
    assert [shared_fields(one) for one in both(cluster)] == [{}, {}]
    assert REQUEST in both(cluster)[0]["metadata"]["annotations"]

    declared, defaulted = both(cluster)[1]["spec"]["schedule"]["cron"], both(cluster)[0]["spec"]["compaction"]
    with pytest.MonkeyPatch.context() as changed:
        editor = "sed -i 's/maxUncompactedBatches: .*/maxUncompactedBatches: 3/'"
        changed.setitem(cluster.environment, "KUBE_EDITOR", editor)
        cluster.kubectl("edit", "persistshard", NAME)
    cron = json.dumps({"spec": {"schedule": {"cron": "1 1 1 1 *"}}})
    cluster.kubectl("patch", "sparksink", NAME, "--type=merge", f"--patch={cron}")
    cluster.run(PLUGIN, "suspend", f"sparksink/{NAME}", "-n", TEAM)
    shard, sink = both(cluster)
    assert shard["spec"]["compaction"]["maxUncompactedBatches"] == 3
    assert (sink["spec"]["schedule"]["cron"], sink["spec"]["suspend"]) == ("1 1 1 1 *", True)
    fleet.reconcile(revision)
    fleet.ready()
    shard, sink = both(cluster)
    assert shard["spec"]["compaction"] == defaulted, "what Git does not name is undone, too"
    assert sink["spec"]["schedule"]["cron"] == declared
    assert not sink["spec"].get("suspend")
    assert REQUEST in shard["metadata"]["annotations"], "of a manager that is not kubectl"
    assert [shared_fields(one) for one in both(cluster)] == [{}, {}]


def test_what_leaves_the_repository_is_deleted_and_nothing_hangs(cluster: Any, fleet: Fleet) -> None:
    """First the sink leaves, then the Kustomizations are deleted. The definitions stay, and the same name finds its data again."""
    fleet.follow()
    fleet.ready()
    shard_id = cluster.status("persistshard", NAME)["shardId"]
    whole = fleet.files["shards/flights.yaml"]
    fleet.files["shards/flights.yaml"] = whole.split("\n---\n")[0] + "\n"
    fleet.reconcile(fleet.commit())
    fleet.ready()
    cluster.wait("the sink to go", lambda: cluster.get("sparksink", NAME) is None, timeout_s=60)
    assert cluster.get("persistshard", NAME) is not None

    fleet.remove()
    cluster.wait("the shard to go", lambda: cluster.get("persistshard", NAME) is None, timeout_s=60)
    for name in DEFINITIONS:
        assert cluster.get("crd", name) is not None

    fleet.files["shards/flights.yaml"] = whole
    fleet.commit()
    fleet.follow()
    fleet.ready()
    assert cluster.status("persistshard", NAME)["shardId"] == shard_id


class Chart:
    """The chart in the registry of the cluster, and the objects of the example by which Flux installs it."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def push(self, version: str) -> None:
        self.cluster.run(
            "helm",
            "package",
            str(ROOT / "charts" / "persist-operator"),
            f"--version={version}",
            f"--destination={self.folder}",
        )
        with self.cluster.forwarded("service/registry", 5000, FLUX) as port:
            archive = str(self.folder / f"persist-operator-{version}.tgz")
            self.cluster.run("helm", "push", archive, f"oci://127.0.0.1:{port}/charts", "--plain-http")

    def follow(self, **values: Any) -> None:
        """Applies the two objects. Stores and images are those of the tests; what else the example says of the release stays."""
        (source,) = [one for one in self._documents("source") if one["kind"] == "OCIRepository"]
        (release,) = self._documents("operator")
        source["spec"] |= {"url": source["spec"]["url"].replace("registry.example.com", REGISTRY), "insecure": True}
        installed = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text())
        release["spec"]["values"] |= {**installed, **values}
        self.cluster.apply(source, release, namespace=FLUX)

    def released(self, version: str, reason: str) -> dict[str, Any]:
        """The newest release, once it is this version of the chart and Ready for this reason."""

        def probe() -> dict[str, Any] | None:
            status = self.cluster.status("helmrelease", RELEASE, FLUX)
            ready = self.cluster.condition("helmrelease", RELEASE, "Ready", FLUX)
            newest: dict[str, Any] = next(iter(status.get("history", [])), {})
            done = (ready.get("status"), ready.get("reason")) == ("True", reason)
            return newest if done and newest.get("chartVersion", "").partition("+")[0] == version else None

        found: dict[str, Any] = self.cluster.wait(
            f"{reason} of {version}", probe, timeout_s=300, every_s=0.5, namespace=FLUX
        )
        return found

    def remove(self) -> None:
        """Deletes the objects, and waits until the finalizer has uninstalled the release."""
        self.cluster.delete("helmrelease", RELEASE, namespace=FLUX, timeout_s=180)
        self.cluster.delete("ocirepository", RELEASE, namespace=FLUX)

    @staticmethod
    def _documents(name: str) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all((GITOPS / "flux" / f"{name}.yaml").read_text()))


@pytest.fixture
def chart(cluster: Any, flux: None, tmp_path: Path) -> Iterator[Chart]:
    """Afterwards the operator is installed as before, without Flux."""
    made = Chart(cluster, tmp_path)
    yield made
    made.remove()
    cluster.install()


def revisions(cluster: Any) -> list[int]:
    return [one["revision"] for one in json.loads(cluster.helm("history", RELEASE, "--output=json"))]


def test_flux_takes_over_upgrades_repairs_removes_and_installs_the_operator_from_the_registry(
    cluster: Any, fleet: Fleet, chart: Chart, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("chart")
    before = revisions(cluster)[-1]
    chart.push("0.1.1")
    chart.follow()
    assert chart.released("0.1.1", "UpgradeSucceeded")["version"] == before + 1
    assert revisions(cluster)[-1] == before + 1, "helm sees the release that Flux took over"

    chart.push("0.1.2")
    fleet.ask("ocirepository", RELEASE)
    chart.released("0.1.2", "UpgradeSucceeded")
    cluster.wait("an operator", cluster.operator_pod, timeout_s=120, namespace=SYSTEM)
    cluster.wait_condition("persistshard", shard, "Ready")

    cluster.kubectl("scale", "deployment", RELEASE, "--replicas=0", namespace=SYSTEM)
    cluster.wait(
        "no operator",
        lambda: not cluster.items("pods", "app.kubernetes.io/component=operator", SYSTEM),
        timeout_s=90,
        namespace=SYSTEM,
    )
    fleet.ask("helmrelease", RELEASE)
    cluster.wait("the operator to be back", cluster.operator_pod, timeout_s=120, namespace=SYSTEM)
    assert revisions(cluster)[-1] == before + 2, "what was edited by hand is undone without a new release"

    chart.remove()
    assert not cluster.items("deployments", "app.kubernetes.io/name=persist-operator", SYSTEM)
    assert cluster.get("persistshard", shard) is not None
    chart.follow()
    chart.released("0.1.2", "InstallSucceeded")
    later, _ = new_shard("chart-later")
    assert cluster.status("persistshard", shard)["shardId"] == shard_id
    assert "Succeeded" in cluster.helm("test", RELEASE, "--timeout", "120s")


def test_values_that_the_chart_refuses_fail_the_release_and_leave_the_operator_alone(
    cluster: Any, chart: Chart
) -> None:
    chart.push("0.1.3")
    chart.follow()
    chart.released("0.1.3", "UpgradeSucceeded")
    running = cluster.operator_pod()["metadata"]["uid"]
    chart.follow(loop={"inspectSeconds": "often"})
    failed = cluster.wait_condition("helmrelease", RELEASE, "Ready", "False", timeout_s=120, namespace=FLUX)
    assert "inspectSeconds" in failed["message"]
    assert cluster.operator_pod()["metadata"]["uid"] == running
