"""Observe: read everything on which a plan depends.

Live reads are the truth: an object that a live list does not contain does not exist. A routine observation of a shard reads less (`Sight`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persist_engine.base.env import Env
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import Owner

from persist_operator.api import names
from persist_operator.api.redact import redact
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import InlineLocation, Shard, StorageRefused, StoreLocation
from persist_operator.api.shard_status import ShardStatus
from persist_operator.api.sink import Sink
from persist_operator.api.sink_status import UNDER_WAY
from persist_operator.bridge import Bridge
from persist_operator.cluster.informed import Informed
from persist_operator.cluster.port import CONFIG_MAP, JOB, PERSIST_SHARD, POD, SPARK_SINK, ApiError, Cluster
from persist_operator.manifests.driver import COMPONENT as SINK_COMPONENT
from persist_operator.manifests.maintenance import COMPONENT as MAINTENANCE_COMPONENT
from persist_operator.plan import inspecting, ownership, podless
from persist_operator.plan.actions import InitialiseShard
from persist_operator.plan.keeping.reclaiming import is_reclaimed, owner_state
from persist_operator.plan.observed import (
    ActionFailure,
    Executors,
    NotInspected,
    NotOwned,
    OwnerState,
    Phase,
    Run,
    Seen,
    ShardObserved,
    ShardView,
    SinkObserved,
)
from persist_operator.plan.shard import is_to_be_asked
from persist_operator.settings import OperatorSettings
from persist_operator.steps import children
from persist_operator.steps.answers import Answers
from persist_operator.steps.namespaces import NamespaceLabels

_LOG_LINES = 20
_FORBIDDEN = 403
#: Reason of the Event by which Kubernetes reports that it could not create a pod of a Job.
_REFUSED_POD = "FailedCreate"
#: Limit on the Events of one Job. Kubernetes combines them before there are so many.
_EVENTS = 20
#: The form of a resource's name in Kubernetes.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


class Sight(enum.IntEnum):
    """How much of an observation is live. A greater sight may replace a smaller one."""

    REMEMBERED = 0
    """Copies of Kubernetes' objects, and the last answer of the stores. Enough for a plan that changes nothing."""
    ASKED = 1
    """Copies of Kubernetes' objects, but a live answer of the stores. Enough for a status, which is written only over the version that was
    read, and for changes of the shard, which are compare-and-sets.
    """
    LIVE = 2
    """Everything was read now. A plan that starts or stops a child needs it."""


@dataclass(frozen=True, slots=True)
class Sighted:
    """An observation of a shard, and its sight. `is_heard`: the stores push every commit to the shard, so few looks are needed."""

    observed: ShardObserved
    sight: Sight
    is_heard: bool = False


class Observer:
    """Reads for plans. Thread-safe."""

    def __init__(
        self, cluster: Cluster, bridge: Bridge, settings: OperatorSettings, env: Env, informed: Informed | None = None
    ) -> None:
        self._cluster, self._bridge, self._settings, self._env = cluster, bridge, settings, env
        self._informed = informed or Informed()
        self._labels = NamespaceLabels(cluster, settings, env)
        self.answers = Answers(env, settings.loop)

    def shard(
        self,
        shard: Shard,
        failures: Mapping[str, ActionFailure],
        *,
        sight: Sight = Sight.LIVE,
        answer: Seen | None = None,
    ) -> Sighted:
        """The observation for the plan of a PersistShard, with this sight or a better one. The stores are asked only after the resource has
        a status, and last, so that their answer is the newest fact. They are not asked if `answer`, which they have just given, is passed.

        Claims the shard for the resource in the stores, unless another owner has it (plan.ownership).
        """
        if is_reclaimed(shard):
            runs, _ = self._runs(shard, Sight.LIVE)
            sinks, labels = self._sinks_of(shard), self._labels.of(shard)
            named = self._named(shard, labels)
            seen = ShardObserved(
                runs=tuple(runs),
                sinks=sinks,
                failures=failures,
                inspected=named.inspected,
                shard_id=named.shard_id,
                namespace_labels=labels,
            )
            return Sighted(seen, Sight.LIVE)
        if not is_to_be_asked(shard):
            labels = {} if shard.meta.deleting else self._labels.of(shard)
            return Sighted(ShardObserved(namespace_labels=labels), Sight.LIVE)
        runs, is_live = self._runs(shard, sight)
        sight = Sight.LIVE if is_live else min(sight, Sight.ASKED)
        labels = self._labels.of(shard)
        try:
            location = shard.location(self._settings, labels)
        except StorageRefused:
            # The plan meets the same refusal and shows it.
            return Sighted(ShardObserved(inspected=NotInspected(), namespace_labels=labels), sight)
        if isinstance(location, InlineLocation):
            return Sighted(self._answer_of_pods(shard, location, runs, failures), sight)
        answer, is_new = self._answer(shard, location, sight) if answer is None else (answer, True)
        observed = ShardObserved(
            runs=tuple(runs),
            failures=failures,
            inspected=answer.inspected,
            shard_id=answer.shard_id,
            namespace_labels=labels,
        )
        is_heard = isinstance(answer.inspected, Inspection) and self._bridge.hears(
            location, str(answer.inspected.shard_id)
        )
        return Sighted(observed, max(sight, Sight.ASKED) if is_new else sight, is_heard)

    def created(self, shard: Shard, action: InitialiseShard) -> Seen:
        """Create the shard as `action` says, and return the stores' answer after it: see Bridge.initialise."""
        name, claim = (shard.meta.namespace, shard.meta.name), ownership.claim_of(shard, self._settings)
        # The news of the creation itself is older than the question, so it must not cause a look.
        self.answers.begin(name)
        answer = self._bridge.initialise(action, looks=lambda: self.answers.begin(name))
        self.answers.keep(name, action.location, claim, answer)
        return answer

    def _named(self, shard: Shard, labels: Mapping[str, str]) -> Seen:
        """The shard of a resource that is being reclaimed and whose status has no shard, because it was restored without a status or the
        operator ended before it wrote one. Claims nothing. The answer is unknown if the stores must not be asked.
        """
        if shard.known.shard_id is not None or shard.spec.storage is not None:
            return Seen(inspected=NotInspected())
        try:
            location = shard.location(self._settings, labels)
        except StorageRefused:
            return Seen(inspected=NotInspected())
        return self._bridge.owned(location, ownership.claim_of(shard, self._settings))

    def _sinks_of(self, shard: Shard) -> tuple[str, ...]:
        """The SparkSinks that write or read the shard, including those that are being deleted, because their drivers may still run."""
        found = self._cluster.find(SPARK_SINK, shard.meta.namespace, {})
        return tuple(one["metadata"]["name"] for one in found if shard.meta.name in _shards_of(one["spec"]))

    def _runs(self, shard: Shard, sight: Sight) -> tuple[list[Run], bool]:
        """The runs of maintenance, and whether they were read live. Copies are enough while nothing is under way. Jobs and Pods come from
        two watches, so a run whose end is not on the status yet could lack its report.
        """
        uid = shard.meta.uid
        if sight is not Sight.LIVE and shard.spec.storage is None:
            jobs, pods = self._informed.children(JOB, uid), self._informed.children(POD, uid)
            if jobs is not None and pods is not None and _is_settled(shard.known, jobs):
                found = [children.maintenance_run(job, pods) for job in jobs]
                return [run for run in found if run is not None], False
        owned = {**_owned(uid), names.LABEL_COMPONENT: MAINTENANCE_COMPONENT}
        jobs = self._cluster.find(JOB, shard.meta.namespace, owned)
        pods = self._cluster.find(POD, shard.meta.namespace, owned) if jobs else []
        for one in (*jobs, *pods):
            self._informed.note(one)
        runs = [self._maintenance_run(shard, job, pods) for job in jobs]
        return [run for run in runs if run is not None], True

    def _answer(self, shard: Shard, location: StoreLocation, sight: Sight) -> tuple[Seen, bool]:
        """The stores' answer, and whether it is live."""
        name, claim = (shard.meta.namespace, shard.meta.name), ownership.claim_of(shard, self._settings)
        last = self.answers.last(name, location, claim) if sight is Sight.REMEMBERED else None
        if last is not None:
            current = self.answers.current(name, location, claim)
            if current is not None and self._bridge.hears(location, str(current.shard_id)):
                return current, False
        ear = self.answers.begin(name)
        answer = self._bridge.claim(
            shard,
            location,
            self._settings,
            owner_state=self._owner_state,
            ear=ear,
            known=None if last is None else last.seen,
        )
        self.answers.keep(name, location, claim, answer)
        return answer, True

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
            # A role from outside the chart may lack this right. The status then shows `NoPod` after a minute.
            return run
        return podless.with_refusal(run, children.refusal(job, events))

    def _answer_of_pods(
        self, shard: Shard, location: InlineLocation, every: Sequence[Run], failures: Mapping[str, ActionFailure]
    ) -> ShardObserved:
        """The observation of a shard on inline storage, from its pods' reports. The operator does not connect to these stores."""
        inspections = tuple(run for run in every if run.kind == "inspection")
        found = inspecting.answer(shard, inspections, location, now_ms=self._env.now_ms(), settings=self._settings)
        inspected = found.inspected
        if isinstance(inspected, NotOwned):
            inspected = ownership.with_owner_state(shard, inspected, self._settings, self._owner_state)
        return ShardObserved(
            runs=tuple(run for run in every if run.kind != "inspection"),
            inspections=inspections,
            failures={**failures, **found.failures},
            inspected=inspected,
            inspected_ms=found.at_ms,
            readers_left_out=found.left_out[0],
            writers_left_out=found.left_out[1],
            shard_id=found.shard_id,
            may_take_over=isinstance(inspected, NotOwned) and ownership.may_take_over(shard, inspected, self._settings),
        )

    def _owner_state(self, owner: Owner) -> OwnerState:
        """See plan.observed. The answer is Keeps, without a request, for a text that is not a valid name, because names of owners come from
        stores that others also write. It is also Keeps for a namespace that the operator may not read, because the operator ends no shard
        there.
        """
        if _NAME.fullmatch(owner.name) is None or _NAME.fullmatch(owner.namespace) is None:
            return "Keeps"
        try:
            found = self._cluster.get(PERSIST_SHARD, owner.namespace, owner.name)
        except ApiError as error:
            if error.status != _FORBIDDEN:
                raise
            return "Keeps"
        return owner_state(None if found is None else Shard.of(load_schemas().default(found)))

    def sink(self, sink: Sink, failures: Mapping[str, ActionFailure]) -> SinkObserved:
        """The observation for the plan of a SparkSink."""
        shard, labels = self._shard_of(sink, sink.spec.shard_name)
        owned = {**_owned(sink.meta.uid), names.LABEL_COMPONENT: SINK_COMPONENT}
        pods = self._cluster.find(POD, sink.meta.namespace, owned)
        known = {sink.known.driver.pod_name, sink.known.rollout.driver.pod_name}
        drivers = [
            pod
            for pod in pods
            if pod["metadata"]["labels"].get(names.LABEL_ROLE) == "driver"
            and (pod["metadata"]["name"] in known or children.is_numbered(pod))
        ]
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
        """The shard that the sink reads. Like the shard that it writes, it is in the sink's namespace."""
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
            return redact(self._cluster.logs(namespace, pod, container=names.DRIVER_CONTAINER, lines=_LOG_LINES))
        except ApiError:
            # The log only adds detail, and the kubelet that has it may be gone with the pod.
            return ""


def _shards_of(spec: Mapping[str, Any]) -> set[Any]:
    """The names of the shards that a sink of this spec writes and reads."""
    read = ((spec.get("input") or {}).get("shard") or {}).get("name")
    return {(spec.get("shardRef") or {}).get("name"), read}


def _is_settled(status: ShardStatus, jobs: Sequence[children.Resource]) -> bool:
    """Whether nothing is under way: every run on the status has ended, and the status has the end of every Job."""
    blocks = (status.maintenance or {}).values()
    if any(block.job_name not in {None, block.settled_job} for block in blocks):
        return False
    ended = {block.settled_job for block in blocks} | {one.id for one in status.history or ()}
    return all(job["metadata"]["name"] in ended for job in jobs)


def _owned(uid: str) -> dict[str, str]:
    return {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_OWNER_UID: uid}


def _is_news(sink: Sink, run: Run) -> bool:
    """Whether the plan will record the failure of `run`. The status already has the failures of earlier attempts. If the stop of
    a driver was planned, its end is no failure.
    """
    status = sink.known
    known = {one.pod_name for one in (status.driver, status.rollout.driver) if one.phase in UNDER_WAY}
    newest = run.name in known or run.attempt > max(status.attempt or 0, status.rollout.attempt or 0)
    return newest and status.last_failure.pod_name != run.name
