"""A real Prometheus scrapes the operator of the live cluster and runs the chart's rules; a real Alertmanager gets what fires.

The causes of critical alerts are made on the cluster: a store that is cut off, a missed deadline, a sink that fails, a killed leader, no operator.
Only `for` is short, and the number of failures of a sink. `tests/operator/test_alerts_delivered.py` makes the cause of every critical alert.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from persist_kit.prometheus import (
    AlertmanagerServer,
    PrometheusServer,
    alertmanager_server,
    panel_queries,
    prometheus_server,
)
from shard_runs import ask, patch
from sink_manifests import airlines_sink, rate_input, sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1500), pytest.mark.usefixtures("operator_is_there")]

CHART = Path(__file__).resolve().parents[2] / "charts" / "persist-operator"
MONITORING = CHART / "files" / "monitoring"
NAMESPACE, SYSTEM, STORES = "persist-e2e", "persist-system", "persist-stores"
OPERATORS = "app.kubernetes.io/component=operator"
#: Queries whose series need a cause of their own: a Redis that fails, and what one test makes. All others are about a cluster that is well.
ERRORS = re.compile(r"consensus_calls_total{outcome!~")
RARE = re.compile(r"rollout_|spark_sink_(missing|extra)|canary|refusals")
#: Queries over errors of the blob store, whose cause tests/operator/test_scraped.py makes.
ELSEWHERE = re.compile(r"blob_calls_total{outcome!~")
FOR = "1s"
#: In queries, until the name of a sink takes its place.
SINK = "SINK"


def rules(cluster: Any) -> list[dict[str, Any]]:
    """The groups of the chart's PrometheusRule, as helm renders it."""
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    critical = [rule["alert"] for group in groups for rule in group["rules"] if rule["severity"] == "critical"]
    values = {"enabled": True, "for": dict.fromkeys(critical, FOR), "thresholds": {"sinkFailures": 1}}
    rendered = cluster.run(
        "helm",
        "template",
        "persist",
        str(CHART),
        "--kube-version=1.34.0",
        "--values=-",
        "--show-only=templates/prometheusrule.yaml",
        given=json.dumps({"prometheusRule": values}),
    )
    found: list[dict[str, Any]] = yaml.safe_load(rendered.stdout)["spec"]["groups"]
    return found


class Discovery:
    """Keeps a file with the operator's pods that run as targets of a Prometheus, which reaches them through a proxy of the API server. It
    stands for Prometheus' own discovery, which some builds leave out.
    """

    def __init__(self, proxy: str, file: Path) -> None:
        query = urllib.parse.urlencode({"labelSelector": OPERATORS})
        self._proxy, self._file = proxy, file
        self._url = f"http://{proxy}/api/v1/namespaces/{SYSTEM}/pods?{query}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> dict[str, Any]:
        """The scrape configuration that reads the file."""
        self._write([])
        self._thread.start()
        found = {"files": [str(self._file)], "refresh_interval": "1s"}
        return {"job_name": "persist-metrics", "honor_labels": True, "file_sd_configs": [found]}

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(OSError), urllib.request.urlopen(self._url, timeout=5) as answer:
                self._write([one for one in json.load(answer)["items"] if one["status"].get("phase") == "Running"])

    def _write(self, pods: list[dict[str, Any]]) -> None:
        targets = []
        for pod in pods:
            name = pod["metadata"]["name"]
            path = f"/api/v1/namespaces/{SYSTEM}/pods/{name}:8080/proxy/metrics"
            labels = {"namespace": SYSTEM, "pod": name, "instance": name, "__metrics_path__": path}
            targets.append({"targets": [self._proxy], "labels": labels})
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(targets))
        fresh.replace(self._file)


@contextlib.contextmanager
def api_proxy(cluster: Any) -> Iterator[str]:
    command = ["kubectl", "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cluster.environment) as proxy:
        try:
            assert proxy.stdout is not None
            yield proxy.stdout.readline().strip().rpartition(" ")[2]
        finally:
            proxy.kill()


class Observed:
    """What the Prometheus and the Alertmanager say of the cluster."""

    def __init__(self, cluster: Any, prometheus: PrometheusServer, alertmanager: AlertmanagerServer) -> None:
        self.cluster, self.prometheus, self.alertmanager = cluster, prometheus, alertmanager

    def firing(self) -> set[tuple[str, str]]:
        """Alert and name of the resource, of those that the Alertmanager has."""
        labels = [one["labels"] for one in self.alertmanager.firing()]
        return {(one["alertname"], one.get("name", "")) for one in labels}

    def finds(self, expressions: dict[str, str], *, timeout_s: float) -> None:
        """Each of these queries has returned series."""
        left = self.prometheus.without_series(expressions, within_s=timeout_s)
        print(f"{len(expressions) - len(left)} of {len(expressions)} queries have returned series")
        assert not left, f"{left}\n{self.cluster.describe(NAMESPACE)}"

    def fires(self, *alerts: str, name: str = "", timeout_s: float = 180) -> None:
        wanted = {(one, name) for one in alerts}
        self.cluster.wait(
            f"{sorted(wanted)} at the Alertmanager", lambda: wanted <= self.firing(), timeout_s=timeout_s, every_s=0.3
        )
        print("fires", sorted(wanted))

    def ends(self, *alerts: str, name: str = "", timeout_s: float = 240) -> None:
        gone = {(one, name) for one in alerts}
        self.cluster.wait(
            f"the end of {sorted(gone)}", lambda: not gone & self.firing(), timeout_s=timeout_s, every_s=0.5
        )
        print("ends", sorted(gone))


@pytest.fixture(scope="module")
def observed(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    targets = tmp_path_factory.mktemp("observed") / "targets.json"
    with (
        api_proxy(cluster) as proxy,
        Discovery(proxy, targets) as job,
        alertmanager_server() as alertmanager,
        prometheus_server(
            {}, groups=rules(cluster), alertmanager=alertmanager.address, jobs=[job], every="1s"
        ) as prometheus,
    ):
        yield Observed(cluster, prometheus, alertmanager)


def queries(shard: str, *sinks: str) -> dict[str, str]:
    """Every query of the dashboards, by its name, over one of these sinks."""
    values = {"$namespace": NAMESPACE, "$shard": shard, "$sink": SINK, "$__rate_interval": "1m"}
    found = panel_queries(MONITORING / "dashboards", values)
    return {name: " or ".join(f"({text.replace(SINK, one)})" for one in sinks) for name, text in found.items()}


def stream(name: str, shard: str) -> dict[str, Any]:
    return sink(
        name,
        shard,
        mode="Streaming",
        input=rate_input(50, "select value as id, cast(value as string) as text from input"),
        commitIntervalSeconds=2,
        freshness={"targetSeconds": 60},
        envelope={"type": "Append"},
        spark={"executor": {"instances": 1}},
    )


def once(name: str, shard: str, file: str, **spec: Any) -> dict[str, Any]:
    """One run, and no other when it fails."""
    return airlines_sink(name, shard, file=file, restart={"backoffSeconds": 1, "maxConsecutiveFailures": 1}, **spec)


def test_every_query_of_the_dashboards_returns_series_from_an_operator_at_work(
    cluster: Any,
    observed: Observed,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    """A stream, a sink that ended well and one that failed, a reader that holds, and maintenance. Stores do not fail here."""
    shard, shard_id = new_shard(
        "seen",
        maintenance={"maxRewriteBytesPerDay": "10Gi"},
        compaction={"maxUncompactedBatches": 8},
        verify={"mode": "Full", "intervalSeconds": 3600},
        gc={"orphans": {"mode": "Report"}},
    )
    other, _ = new_shard("seen-other", key="carrier STRING", value="name STRING")
    programs.result("hold", shard_id, "seen")
    sinks = [named("seen") for _ in range(3)]
    running, done, failed = sinks
    cluster.apply(stream(running, shard), once(done, other, "airlines"), once(failed, other, "nothing"))
    cluster.wait(
        "a batch", lambda: cluster.status("sparksink", running).get("progress", {}).get("running"), timeout_s=400
    )
    cluster.kill(cluster.status("sparksink", running)["driver"]["podName"])  # a failure to be seen
    for verb in ("verify", "orphan-scan", "rollup", "compact", "gc"):
        ask(cluster, verb, shard)
    made = queries(shard, *sinks)
    later = (RARE, ERRORS, ELSEWHERE)
    wanted = {name: text for name, text in made.items() if not any(one.search(text) for one in later)}
    assert len(wanted) > 90
    observed.finds(wanted, timeout_s=500)


@pytest.fixture
def canary(cluster: Any) -> Iterator[None]:
    """The operator keeps a canary in its own namespace."""
    watched = "watch.namespaces={persist-e2e-other,persist-system}"
    allowed = "storageProfiles.default.allowedNamespaces.names={persist-e2e,persist-e2e-gone,persist-system}"
    more = f"canary.enabled=true,canary.intervalSeconds=10,{watched},{allowed}"
    cluster.install("--set", more)
    yield
    cluster.install()


@pytest.fixture
def no_jobs(cluster: Any) -> Iterator[Callable[[], None]]:
    """From the call on the API server refuses new Jobs."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-jobs"}}

    def forbid() -> None:
        cluster.apply({**quota, "spec": {"hard": {"count/jobs.batch": "0"}}})
        cluster.wait("a quota that counts", lambda: cluster.status("resourcequota", "no-jobs").get("hard"))

    yield forbid
    cluster.delete("resourcequota", "no-jobs")


@pytest.mark.usefixtures("canary")
def test_queries_about_differences_refusals_and_the_canary_return_series(
    cluster: Any,
    observed: Observed,
    no_jobs: Callable[[], None],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    """A sink that compares only, a stream with a revision that writes less, and a run that the API server refuses."""
    shard, _ = new_shard("rare")
    other, _ = new_shard("rare-other", key="carrier STRING", value="name STRING")
    sinks = running, compared = named("rare"), named("rare")
    manifest = stream(running, shard)
    rate = {"name": "rate-micro-batch", "options": {"rowsPerBatch": "10", "numPartitions": "1"}}
    sql = "select value as id, cast(value as string) as text from input"
    spec = {"input": {"type": "Format", "format": {**rate, "sql": sql}}, "rollout": {"strategy": "BlueGreen"}}
    manifest["spec"] |= spec
    cluster.apply(manifest, once(compared, other, "airlines", writeMode="ReadOnly"))
    cluster.wait_condition("sparksink", running, "Ready", timeout_s=400)
    patch(cluster, "sparksink", running, {"input": {"format": {"sql": f"{sql} where value % 2 = 0"}}})
    wanted = {name: text for name, text in queries(shard, *sinks).items() if RARE.search(text)}
    assert len(wanted) >= 8
    refused = {name: wanted.pop(name) for name, text in list(wanted.items()) if "refusals" in text}
    observed.finds(wanted, timeout_s=500)
    no_jobs()
    ask(cluster, "verify", shard)
    observed.finds(refused, timeout_s=200)


def leave_redis(cluster: Any) -> None:
    """Ends the connections to Redis, which survive a Service without endpoints."""
    leave = 'redis-cli -a "$REDIS_PASSWORD" --no-auth-warning shutdown nosave'
    cluster.kubectl("exec", "deployment/redis", "--", "sh", "-c", leave, namespace=STORES, check=False)


def test_a_store_that_is_cut_off_reaches_the_alertmanager_and_resolves(
    cluster: Any, observed: Observed, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, _ = new_shard("cut", storageProfile="cut")
    alerts = ("PersistShardStorageUnreachable", "PersistShardLongNotReady")
    observed.ends(*alerts, name=shard)
    with cluster.cut_off("redis-cut"):
        leave_redis(cluster)
        observed.fires(*alerts, name=shard)
        errors = {name: text for name, text in queries(shard, shard).items() if ERRORS.search(text)}
        assert len(errors) == 2
        observed.finds(errors, timeout_s=120)
    observed.ends(*alerts, name=shard)


def test_a_missed_deadline_reaches_the_alertmanager_and_resolves_when_the_plan_is_approved(
    cluster: Any, observed: Observed, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """What was retracted waits for an approval, for longer than the deadline of five minutes."""
    shard, shard_id = new_shard(
        "late", compaction={"deadlineSeconds": 300}, maintenance={"approval": "Required"}, gc={"intervalSeconds": 60}
    )
    programs.result("retract", shard_id, "a-person", "500")
    observed.fires("PersistShardDeletionDeadlineMissed", name=shard, timeout_s=450)
    patch(cluster, "persistshard", shard, {"maintenance": {"approval": "Automatic"}})
    observed.ends("PersistShardDeletionDeadlineMissed", name=shard, timeout_s=420)


def test_a_sink_that_fails_reaches_the_alertmanager_and_resolves_when_it_is_mended(
    cluster: Any, observed: Observed, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, _ = new_shard("fails", key="carrier STRING", value="name STRING")
    failing = named("fails")
    cluster.apply(once(failing, shard, "nothing"))
    observed.fires("SparkSinkCrashLooping", "SparkSinkStalled", name=failing, timeout_s=420)
    mended = {"input": {"format": {"options": {"path": "examples/flights/data/airlines.csv"}}}}
    patch(cluster, "sparksink", failing, mended)
    observed.ends("SparkSinkCrashLooping", "SparkSinkStalled", name=failing, timeout_s=420)
    cluster.wait_condition("sparksink", failing, "Ready", reason="Completed", timeout_s=420)


def test_a_killed_leader_and_no_operator_at_all_reach_the_alertmanager_and_resolve(
    cluster: Any, observed: Observed
) -> None:
    """The processes of the leader are killed in their container. Its Lease lasts, and so long nothing leads."""
    cluster.scale_operator(2)
    try:
        observed.ends("PersistOperatorNoLeader", "PersistOperatorDown")
        killed = cluster.leader()
        kill_all = "import os, signal; os.kill(-1, signal.SIGKILL)"
        cluster.kubectl("exec", killed, "--", "python3", "-c", kill_all, namespace=SYSTEM, check=False)
        observed.fires("PersistOperatorNoLeader")
        observed.ends("PersistOperatorNoLeader")
        cluster.scale_operator(0)
        observed.fires("PersistOperatorDown")
    finally:
        cluster.scale_operator(1)
    observed.ends("PersistOperatorDown", "PersistOperatorNoLeader")
