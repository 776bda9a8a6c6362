"""Start, stop and standby on a real cluster: a rollout, a drain and a crash of the leader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600), pytest.mark.usefixtures("operator_is_there")]

SYSTEM = "persist-system"


@pytest.fixture
def two(cluster: Any) -> Iterator[None]:
    """A leader and a standby, both ready."""
    cluster.scale_operator(2)
    yield
    cluster.scale_operator(1)


@pytest.mark.usefixtures("two")
def test_a_leader_that_is_deleted_gives_the_lease_up_and_the_standby_leads(cluster: Any) -> None:
    """The pod's grace period is 30 s. A leader that kept the Lease would be killed after it, and its Lease would expire 15 s later."""
    leader = cluster.wait("a leader", cluster.leader, namespace=SYSTEM)
    cluster.kubectl("delete", "pod", leader, "--wait=false", namespace=SYSTEM)
    led = cluster.wait(
        "the standby to lead",
        lambda: cluster.leader() not in {"", leader} and cluster.leader(),
        timeout_s=12,
        every_s=0.5,
        namespace=SYSTEM,
    )
    assert led != leader


def test_readiness_of_the_leader_says_what_it_waits_for(cluster: Any) -> None:
    pod = cluster.operator_pod()["metadata"]["name"]
    path = f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/readyz"
    assert cluster.kubectl("get", "--raw", path).strip() == "ok"
