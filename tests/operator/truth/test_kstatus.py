"""Every phase of both kinds, evaluated by kstatus itself: a wait (Flux, `kubectl wait`) lasts exactly as long as the resource is in
progress.
"""

import re
from pathlib import Path

import cel
import pytest
import yaml
from persist_operator.api import conditions
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK
from phases import BROKEN, CURRENT, FAILED, IN_PROGRESS, SHARDS, SINKS


def ready_reasons(resources):
    return {what: conditions.find(one["status"], "Ready")["reason"] for what, one in resources.items()}


def outside(resource):
    """The true outcome conditions, if they are not exactly one of Ready, Reconciling and Stalled. kstatus would have to guess then."""
    status = resource["status"]
    found = [one for one in ("Ready", "Reconciling", "Stalled") if conditions.is_true(status, one)]
    return found if len(found) != 1 else None


@pytest.mark.slow
def test_kstatus_computes_the_expected_status_in_every_phase(shards, sinks, broken, kstatus, kstatus_twin, refused):
    expected = {("shard", what): one for what, one in SHARDS.items()}
    expected |= {("sink", what): one for what, one in SINKS.items()}
    expected |= {(kind, what): one for kind in ("shard", "sink") for what, one in BROKEN.items()}
    resources = {("shard", what): one for what, one in shards.items()} | {
        ("sink", what): one for what, one in sinks.items()
    }
    resources |= broken
    assert resources.keys() == expected.keys()
    computed = dict(zip(resources, kstatus(resources.values()), strict=True))
    reasons = ready_reasons(resources)
    assert {what: (computed[what], reasons[what]) for what in resources} == expected
    assert {what: kstatus_twin(one) for what, one in resources.items()} == computed
    assert {what: found for what, one in resources.items() if (found := outside(one))} == {}
    fitting = {what: one for what, one in resources.items() if what != ("shard", "not found")}
    assert {what: errors for what, one in fitting.items() if (errors := refused(one, one["status"]))} == {}


def test_the_first_status_is_in_progress_because_none_counts_as_current(
    shard_resource, sink_resource, kstatus, house, keys
):
    """Under a definition that gives a new resource no status."""
    new = [
        {name: one for name, one in made.items() if name != "status"} for made in (shard_resource(), sink_resource())
    ]
    assert kstatus(new) == [CURRENT, CURRENT]
    requests = house.cluster.record()
    for key, kind, made in zip(keys, (PERSIST_SHARD, SPARK_SINK), new, strict=True):
        house.cluster.create(kind, made)
        house.look(key)
        first = next(one.arguments[3] for one in requests if one.verb == "apply_status")
        assert kstatus([{**made, "status": first}]) == [IN_PROGRESS]
        requests.clear()


def test_every_reason_of_ready_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    reasons = {reason for _, reason in [*SHARDS.values(), *SINKS.values(), *BROKEN.values()]}
    known = set(re.findall(r"\b[A-Z][A-Za-z]+\b", text))
    # The reason of a failed end is derived from the class of the failure.
    assert {one for one in reasons if one not in known} == set()


def expressions():
    """The health checks of the Kustomization that users copy, by kind."""
    text = (Path(__file__).parents[3] / "examples/gitops/flux/shards.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load(text)["spec"]["healthCheckExprs"]}


def by_expressions(resource):
    """As Flux evaluates them (fluxcd/pkg/runtime/cel): the first that is true, in this order; otherwise in progress."""
    context = {"status": resource["status"], "metadata": resource["metadata"]}
    checks = expressions()[resource["kind"]]
    order = {"inProgress": IN_PROGRESS, "failed": FAILED, "current": CURRENT}
    return next((status for name, status in order.items() if cel.evaluate(checks[name], context)), IN_PROGRESS)


def test_the_expressions_for_flux_agree_with_kstatus_in_every_phase(shards, sinks, broken, kstatus_twin):
    for resource in (*shards.values(), *sinks.values(), *broken.values()):
        if not resource["metadata"].get("deletionTimestamp"):
            assert by_expressions(resource) == kstatus_twin(resource), resource["status"]["conditions"]
    for resource in (shards["healthy"], sinks["completed"]):
        assert by_expressions({**resource, "status": {}}) == IN_PROGRESS
