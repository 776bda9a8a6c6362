"""The programs of `helm test`, as the chart renders them, against a server that answers like the API server, and what they find."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from persist_operator.api.schema_check import load_schemas
from persist_operator.handlers.probes import ProbeServer
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

Manifest = dict[str, Any]
LISTED: Manifest = {"watch": {"namespaces": ["blue"]}, "workload": {"namespaces": ["red"]}}


def program(manifests: list[Manifest], name: str) -> list[str]:
    """The command of a test's pod, for this machine."""
    (pod,) = [one for one in manifests if one["kind"] == "Pod" and one["metadata"]["name"].endswith(f"-test-{name}")]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    return [sys.executable, "-c", *container["args"]]


class Api(http.server.ThreadingHTTPServer):
    """Reviews rights by the roles of the chart, and judges resources by the CRDs."""

    def __init__(self, manifests: list[Manifest]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.roles: list[tuple[str | None, Manifest]] = [
            (role["metadata"].get("namespace"), rule)
            for binding in manifests
            if binding["kind"] in {"RoleBinding", "ClusterRoleBinding"}
            and binding["subjects"][0]["name"] == "persist-persist-operator"
            for role in manifests
            if role["kind"] in {"Role", "ClusterRole"}
            and role["metadata"]["name"] == binding["roleRef"]["name"]
            and role["metadata"].get("namespace") == binding["metadata"].get("namespace")
            for rule in role["rules"]
        ]
        self.asked = 0
        self.takes_all = False

    def allowed(self, asked: Manifest) -> bool:
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return any(
            namespace in {None, asked.get("namespace")}
            and asked.get("group", "") in rule["apiGroups"]
            and resource in rule["resources"]
            and asked["verb"] in rule["verbs"]
            and ("resourceNames" not in rule or asked.get("name") in rule["resourceNames"])
            for namespace, rule in self.roles
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer the-token"
        self.server.asked += 1
        if document["kind"] == "SelfSubjectAccessReview":
            code, answer = 201, {"status": {"allowed": self.server.allowed(document["spec"]["resourceAttributes"])}}
        else:
            assert self.path.endswith("?dryRun=All&fieldValidation=Strict")
            assert f"/namespaces/sys/{document['kind'].lower()}s?" in self.path
            found = [] if self.server.takes_all else load_schemas().check(load_schemas().default(document))
            code, answer = (422, {"message": str(found[0])}) if found else (201, document)
        raw = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Logs nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[list[Manifest]], Api]]:
    made: list[Api] = []

    def start(manifests: list[Manifest]) -> Api:
        made.append(Api(manifests))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return made[-1]

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def run(tmp_path: Any) -> Callable[[list[str], Api], subprocess.CompletedProcess[str]]:
    (tmp_path / "token").write_text("the-token\n")

    def call(command: list[str], server: Api) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "API_SERVER": f"http://127.0.0.1:{server.server_port}", "ACCOUNT": str(tmp_path)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return call


SHARED: Manifest = {"replicas": 3, "sharding": {"enabled": True}}


@pytest.mark.parametrize(
    "values", [{}, LISTED, {"watch": {"clusterWide": True}}, SHARED], ids=["none", "listed", "cluster", "shared"]
)
def test_the_account_has_the_rights_that_the_operator_uses(
    template: Callable[..., list[Manifest]], serve: Any, run: Any, values: Manifest
) -> None:
    manifests = template(values)
    server = serve(manifests)
    done = run(program(manifests, "rights"), server)
    assert done.returncode == 0, done.stderr
    assert server.asked > 30


def test_a_right_that_is_missing_or_too_much_is_named(
    template: Callable[..., list[Manifest]], serve: Any, run: Any
) -> None:
    manifests = template(LISTED)
    server = serve(manifests)
    server.roles = [
        (space, rule) for space, rule in server.roles if not (space == "blue" and "jobs" in rule["resources"])
    ]
    server.roles.append((None, {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}))
    done = run(program(manifests, "rights"), server)
    assert done.returncode == 1
    assert "the operator may not create batch/jobs in blue" in done.stderr
    assert "the operator may get secrets in sys, and must not" in done.stderr
    assert len(done.stderr.splitlines()) == 6


def test_samples_are_judged_without_being_created(
    template: Callable[..., list[Manifest]], serve: Any, run: Any
) -> None:
    manifests = template({})
    server = serve(manifests)
    command = program(manifests, "samples")
    assert run(command, server).returncode == 0
    assert server.asked == len(json.loads(command[-1])) == 3
    server.takes_all = True
    refused = run(command, server)
    assert "SparkSink helm-test-refused is not refused as invalid: 201" in refused.stderr
    command[-1] = command[-1].replace("Mirror", "Nonsense", 1)
    server.takes_all = False
    assert "SparkSink helm-test is refused: 422" in run(command, server).stderr


def test_the_account_of_the_samples_may_only_create_them(template: Callable[..., list[Manifest]]) -> None:
    manifests = template({})
    own = [one for one in manifests if one["metadata"]["name"].endswith("-test-samples")]
    assert sorted(one["kind"] for one in own) == ["Pod", "Role", "RoleBinding", "ServiceAccount"]
    assert all(one["metadata"]["annotations"]["helm.sh/hook"] == "test" for one in own)
    weights = {one["kind"]: int(one["metadata"]["annotations"]["helm.sh/hook-weight"]) for one in own}
    assert weights["Pod"] > max(weight for kind, weight in weights.items() if kind != "Pod")
    (role,) = [one for one in own if one["kind"] == "Role"]
    assert [rule["verbs"] for rule in role["rules"]] == [["create"]]
    assert not [
        one for one in template({"rbac": {"create": False}}) if one["metadata"]["name"].endswith("-test-samples")
    ]


def test_a_scrape_finds_the_operator(template: Callable[..., list[Manifest]]) -> None:
    registry = CollectorRegistry()
    server = ProbeServer(
        0, registry=registry, sick_of=lambda: None, waits_for=lambda: None, refresh=lambda: None, host="127.0.0.1"
    )
    server.start()
    try:
        command = [*program(template({}), "metrics")[:-1], f"http://127.0.0.1:{server.port}"]
        empty = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "no ['persist_operator_reconcile_total', 'persist_operator_leader']" in empty.stderr
        OperatorMetrics(registry)
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
    finally:
        server.stop()
