"""Observe: read everything that a plan depends on. All reads are live, so an object that a list does not contain does not exist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.api.redact import redact
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import InlineLocation, Shard, StorageRefused
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import CONFIG_MAP, JOB, PERSIST_SHARD, POD, ApiError, Cluster
from persist_operator.manifests.driver import COMPONENT as SINK_COMPONENT
from persist_operator.manifests.maintenance import COMPONENT as MAINTENANCE_COMPONENT
from persist_operator.plan import inspecting, ownership, podless
from persist_operator.plan.observed import (
    ActionFailure,
    Executors,
    NotInspected,
    NotOwned,
    Phase,
    Run,
    ShardObserved,
    ShardView,
    SinkObserved,
)
from persist_operator.plan.shard import is_to_be_asked
from persist_operator.settings import OperatorSettings
from persist_operator.steps import children
from persist_operator.steps.namespaces import NamespaceLabels

_LOG_LINES = 20
_FORBIDDEN = 403
#: Reason of the Event by which Kubernetes reports that it could not create a pod of a Job.
_REFUSED_POD = "FailedCreate"
#: Limit on the Events of one Job. Kubernetes combines them before there are so many.
_EVENTS = 20
#: The form of a resource's name in Kubernetes.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


class Observer:
    """Reads for plans. Thread-safe."""

    def __init__(self, cluster: Cluster, bridge: Bridge, settings: OperatorSettings, env: Env) -> None:
        self._cluster, self._bridge, self._settings, self._env = cluster, bridge, settings, env
        self._labels = NamespaceLabels(cluster, settings, env)

    def shard(self, shard: Shard, failures: Mapping[str, ActionFailure]) -> ShardObserved:
        """The observation for the plan of a PersistShard. The stores are asked only after the resource has a status, and last, so that
        their answer is the newest fact.

        Claims the shard for the resource in the stores, unless another owner has it (plan.ownership).
        """
        if not is_to_be_asked(shard):
            if shard.meta.deleting:
                return ShardObserved()
            return ShardObserved(namespace_labels=self._labels.of(shard))
        owned = {**_owned(shard.meta.uid), names.LABEL_COMPONENT: MAINTENANCE_COMPONENT}
        jobs = self._cluster.find(JOB, shard.meta.namespace, owned)
        pods = self._cluster.find(POD, shard.meta.namespace, owned) if jobs else []
        runs = [self._maintenance_run(shard, job, pods) for job in jobs]
        labels = self._labels.of(shard)
        try:
            location = shard.location(self._settings, labels)
        except StorageRefused:
            # The plan meets the same refusal and shows it.
            return ShardObserved(inspected=NotInspected(), namespace_labels=labels)
        if isinstance(location, InlineLocation):
            return self._answer_of_pods(shard, location, runs, failures)
        answer = self._bridge.claim(
            shard, location, self._settings, is_gone=lambda name: self._is_gone(shard.meta.namespace, name)
        )
        return ShardObserved(
            runs=tuple(run for run in runs if run is not None),
            failures=failures,
            inspected=answer.inspected,
            shard_id=answer.shard_id,
            namespace_labels=labels,
        )

    def _maintenance_run(self, shard: Shard, job: children.Resource, pods: Sequence[children.Resource]) -> Run | None:
        """The run of a Job, with the refusal of its pod from the Job's Events."""
        run = children.maintenance_run(job, pods)
        if run is None or not podless.needs_events(run, shard.known, self._env.now_ms()):
            return run
        head = job["metadata"]
        try:
            events = self._cluster.events_about(head["namespace"], head["uid"], reason=_REFUSED_POD, limit=_EVENTS)
        except ApiError as error:
            if error.status != _FORBIDDEN:
                raise
            # A role that does not come from the chart may lack this right. The status then shows `NoPod` after a minute.
            return run
        return podless.with_refusal(run, children.refusal(job, events))

    def _answer_of_pods(
        self, shard: Shard, location: InlineLocation, runs: Sequence[Run | None], failures: Mapping[str, ActionFailure]
    ) -> ShardObserved:
        """The observation of a shard on inline storage, from the reports of its pods. The operator does not connect to these stores."""
        every = [run for run in runs if run is not None]
        inspections = tuple(run for run in every if run.kind == "inspection")
        found = inspecting.answer(shard, inspections, location, now_ms=self._env.now_ms(), settings=self._settings)
        return ShardObserved(
            runs=tuple(run for run in every if run.kind != "inspection"),
            inspections=inspections,
            failures={**failures, **found.failures},
            inspected=found.inspected,
            inspected_ms=found.at_ms,
            readers_left_out=found.left_out[0],
            writers_left_out=found.left_out[1],
            shard_id=found.shard_id,
            may_take_over=isinstance(found.inspected, NotOwned)
            and ownership.may_take_over(
                shard,
                found.inspected,
                self._settings,
                is_gone=lambda name: self._is_gone(shard.meta.namespace, name),
            ),
        )

    def _is_gone(self, namespace: str, name: str) -> bool:
        """Whether there is no such PersistShard, or it is being deleted. False for a text that is not a valid name, without a request:
        names of owners come from stores, where others write too.
        """
        if _NAME.fullmatch(name) is None:
            return False
        found = self._cluster.get(PERSIST_SHARD, namespace, name)
        return found is None or bool(found["metadata"].get("deletionTimestamp"))

    def sink(self, sink: Sink, failures: Mapping[str, ActionFailure]) -> SinkObserved:
        """The observation for the plan of a SparkSink."""
        shard, labels = self._shard_of(sink, sink.spec.shard_name)
        owned = {**_owned(sink.meta.uid), names.LABEL_COMPONENT: SINK_COMPONENT}
        pods = self._cluster.find(POD, sink.meta.namespace, owned)
        drivers = [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == "driver"]
        workers = [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == "executor"]
        runs = [children.driver_run(pod) for pod in drivers]
        unrecorded = {run.name for run in runs if run.phase is Phase.FAILED and _is_news(sink, run)}
        runs = [
            children.driver_run(pod, log_tail=self._log_tail(sink.meta.namespace, run.name))
            if run.name in unrecorded
            else run
            for pod, run in zip(drivers, runs, strict=True)
        ]
        newest = max((run.attempt for run in runs if run.name != sink.known.rollout.driver.pod_name), default=0)
        return SinkObserved(
            leftovers=self._leftovers(sink, owned, runs),
            shard=ShardView.of(sink.spec.shard_name, shard, self._settings, labels),
            input=self._input(sink),
            runs=tuple(runs),
            executors=children.executors(workers, newest) if newest else Executors(),
            failures=failures,
        )

    def _input(self, sink: Sink) -> ShardView | None:
        """The shard that the sink reads, in the sink's own namespace like the one that it writes."""
        name = sink.spec.input_shard
        if name is None:
            return None
        shard, labels = self._shard_of(sink, name)
        is_stream = sink.spec.mode == "Streaming"
        return ShardView.of_input(name, shard, self._settings, labels, is_stream=is_stream)

    def _shard_of(self, sink: Sink, name: str) -> tuple[Shard | None, Mapping[str, str]]:
        found = self._cluster.get(PERSIST_SHARD, sink.meta.namespace, name)
        shard = None if found is None else Shard.of(load_schemas().default(found))
        return shard, {} if shard is None else self._labels.of(shard)

    def _leftovers(self, sink: Sink, owned: Mapping[str, str], runs: list[Run]) -> tuple[str, ...]:
        """Names of attempts that have a ConfigMap but no driver. The ConfigMap is created first and removed last."""
        if sink.known.is_under_way:
            return ()
        found = self._cluster.find(CONFIG_MAP, sink.meta.namespace, {**owned, names.LABEL_ROLE: "driver"})
        return tuple(sorted({one["metadata"]["name"] for one in found} - {run.name for run in runs}))

    def _log_tail(self, namespace: str, pod: str) -> str:
        try:
            return redact(self._cluster.logs(namespace, pod, lines=_LOG_LINES))
        except ApiError:
            # The log only adds detail, and the kubelet that has it may be gone with the pod.
            return ""


def _owned(uid: str) -> dict[str, str]:
    return {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_OWNER_UID: uid}


def _is_news(sink: Sink, run: Run) -> bool:
    """Whether the plan will record the failure of `run`. The status already has those of earlier attempts."""
    status = sink.known
    known = {status.driver.pod_name, status.rollout.driver.pod_name}
    newest = run.name in known or run.attempt > max(status.attempt or 0, status.rollout.attempt or 0)
    return newest and status.last_failure.pod_name != run.name
