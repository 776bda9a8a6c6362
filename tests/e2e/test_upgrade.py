"""An upgrade from an earlier version: its operator under the new definitions, then the new operator under a driver that goes on, and the fence.

`previous.sh` builds the earlier version's images and keeps its tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sink_manifests import numbers_stream

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1500), pytest.mark.usefixtures("operator_is_there")]

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = ROOT / "build" / "previous"
DEFINITIONS = ("persistshards.persistshard.io", "sparksinks.persistshard.io")
#: Two minors ahead of the code under test: it may read one minor ahead.
TOO_NEW = "0.3.0"


@pytest.fixture
def previous(cluster: Any) -> Iterator[None]:
    """The earlier operator runs with its definitions. Afterwards the operator and the definitions of this tree run."""
    if not (PREVIOUS / ".commit").is_file():
        pytest.fail(
            "no earlier version: run tests/e2e/previous.sh COMMIT and load its images, or `make e2e` with PREVIOUS=COMMIT"
        )
    images = ",".join(
        [
            "image.tag=previous",
            "images.engine=localhost/persist-engine:previous",
            "images.spark=localhost/persist-examples:previous",
        ]
    )
    cluster.helm(
        "upgrade",
        "--install",
        "persist-operator",
        str(PREVIOUS / "charts" / "persist-operator"),
        f"--values={PREVIOUS / 'tests' / 'e2e' / 'values.yaml'}",
        f"--set={images}",
        "--reset-values",
        "--wait",
        "--timeout=180s",
    )
    yield
    cluster.install()


def operator_image(cluster: Any) -> str:
    return str(cluster.operator_pod()["spec"]["containers"][0]["image"])


def batches(cluster: Any, driver: str) -> int:
    """How many batches with rows the driver has committed."""
    log = cluster.kubectl("logs", driver, "--tail=-1", check=False)
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return sum(line.get("event") == "batch" and line["rows"] > 0 for line in lines)


def goes_on(cluster: Any, driver: str, uid: str) -> None:
    """The same pod commits two more batches."""
    wanted = batches(cluster, driver) + 2
    cluster.wait("two more batches", lambda: batches(cluster, driver) >= wanted, timeout_s=300)
    assert cluster.get("pod", driver)["metadata"]["uid"] == uid


@pytest.mark.wish(14)
@pytest.mark.usefixtures("previous")
def test_wish_definitions_are_upgraded_first_then_the_operator_and_no_driver_is_restarted(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    assert operator_image(cluster).endswith(":previous")
    shard, _ = new_shard("upgrade", schema={"key": "id BIGINT", "value": "number BIGINT"})
    sink = named("upgrade")
    cluster.apply(numbers_stream(sink, shard))

    def running() -> dict[str, Any] | None:
        name = cluster.status("sparksink", sink).get("driver", {}).get("podName")
        pod = cluster.get("pod", name) if name else None
        return pod if pod is not None and pod["status"].get("phase") == "Running" else None

    pod = cluster.wait("a running driver", running, timeout_s=300)
    driver, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    assert pod["spec"]["containers"][0]["image"].endswith(":previous")
    goes_on(cluster, driver, uid)

    files = [f"--filename={path}" for path in sorted((ROOT / "crds").glob("*.yaml"))]
    cluster.kubectl("apply", "--server-side", "--force-conflicts", *files)
    assert operator_image(cluster).endswith(":previous")
    new_shard("under-new-definitions")
    seen = cluster.status("persistshard", shard)["frontiers"]["seqno"]
    cluster.wait(
        "a status of the earlier operator",
        lambda: cluster.status("persistshard", shard)["frontiers"]["seqno"] > seen,
        timeout_s=120,
    )
    goes_on(cluster, driver, uid)

    cluster.install()
    assert operator_image(cluster).endswith(":dev")
    later, _ = new_shard("under-the-new-operator")
    assert cluster.condition("persistshard", later, "Verified"), "a condition that the earlier operator did not have"
    goes_on(cluster, driver, uid)
    cluster.wait_condition("sparksink", sink, "Ready", timeout_s=120)
    assert cluster.status("sparksink", sink)["driver"]["podName"] == driver
    assert not cluster.status("sparksink", sink).get("rollout"), "the upgrade is no new revision"
    for name in DEFINITIONS:
        assert cluster.get("crd", name)["status"]["storedVersions"] == ["v1alpha1"]


def test_an_operator_refuses_the_state_of_a_newer_engine_and_says_so(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("newer")
    assert cluster.status("persistshard", shard)["engineVersion"] == "0.1.0"
    assert programs.result("write_as", shard_id, TOO_NEW) == {"version": TOO_NEW}
    found = cluster.wait_condition("persistshard", shard, "Stalled", reason="IncompatibleState")
    assert TOO_NEW in found["message"]
    assert "upgrade this code" in found["message"]
    assert cluster.condition("persistshard", shard, "Ready")["status"] == "False"
    job = programs.start("content", shard_id)
    cluster.wait(
        "a reader of this version to be refused", lambda: cluster.status("job", job).get("failed"), timeout_s=120
    )
    assert "upgrade this code" in cluster.kubectl("logs", f"job/{job}", "--tail=-1")
