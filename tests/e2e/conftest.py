"""The cluster of the end-to-end tests, which run.sh creates and fills.

Without a cluster the tests fail with the command that creates it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import yaml
from persist_engine.rows.schema import Schema
from persist_kit.neighbours import neighbours

live_cluster, pod_programs, *_ = neighbours(
    __file__, "live_cluster", "pod_programs", "sink_manifests", "shard_runs", "kafka_streams"
)

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples" / "flights"
OPERATOR_NAMESPACE = "persist-system"
Manifest = dict[str, Any]
Cluster, Programs = live_cluster.Cluster, pod_programs.Programs


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


@pytest.fixture
def unelected(cluster: Cluster) -> Iterator[None]:
    """Operators without leader election: as many as run act at once."""
    cluster.install("--set", "leaderElection.enabled=false")
    yield
    cluster.install()
    cluster.scale_operator(1)
