"""Act: carry out the actions of a plan. Each is idempotent, because names are deterministic: 409 on a creation is success, and so is 404
on a deletion.
"""

from __future__ import annotations

from typing import Any, assert_never

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.api.resource import Meta
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import (
    BY_KIND,
    CONFIG_MAP,
    JOB,
    PERSIST_SHARD,
    POD,
    SECRET,
    SERVICE,
    ApiError,
    Cluster,
    Resource,
    Stops,
)
from persist_operator.manifests.driver import driver_manifests, promotion_manifest
from persist_operator.manifests.maintenance import maintenance_job
from persist_operator.manifests.spark_compaction import compaction_job, compaction_secret
from persist_operator.plan.actions import (
    Action,
    AdvanceSince,
    EvolveSchema,
    InitialiseShard,
    KeepFinalizer,
    PromoteDriver,
    StartDriver,
    StartInspection,
    StartMaintenance,
    StartReclaim,
    StopRun,
)
from persist_operator.plan.waiting.places import Place, PlaceKind
from persist_operator.settings import OperatorSettings
from persist_operator.steps import children
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.places import Places

_RPC_SECRET_BYTES = 32
_FORBIDDEN, _NOT_FOUND = 403, 404
#: Part of the API server's message when a role lacks a right. Quotas and admission policies also refuse with 403, but with other messages.
_NO_RIGHT = 'cannot create resource "pods"'


class Actor:
    """Carries out actions. Thread-safe. Raises ApiError, and the exceptions of the bridge and of `manifests`."""

    def __init__(
        self,
        cluster: Cluster,
        bridge: Bridge,
        settings: OperatorSettings,
        env: Env,
        metrics: OperatorMetrics,
        *,
        stops: Stops | None = None,
    ) -> None:
        """Without `stops`, drivers are stopped only by the deletion of their pods."""
        self._stops = stops
        self._cluster, self._bridge, self._settings, self._env, self._metrics = cluster, bridge, settings, env, metrics
        self._places = Places(cluster, settings, env)

    def act(self, action: Action, meta: Meta) -> bool:
        """Carry out an action for the resource `meta`. Returns True when this call started or stopped a run. Returns False when an earlier
        call did, and for actions that start or stop no run. Raises Queued while the limits of the installation leave no place for a start.
        """
        if isinstance(action, StartMaintenance | StartInspection | StartReclaim | StartDriver):
            return self._start(action, meta)
        match action:
            case InitialiseShard():
                self._bridge.initialise(action)
            case EvolveSchema():
                self._bridge.evolve(action)
            case AdvanceSince():
                self._bridge.advance_since(action)
            case KeepFinalizer():
                self._keep_finalizer(action, meta)
            case PromoteDriver():
                self._create(promotion_manifest(action, meta), meta)
            case StopRun():
                return self._stop(action, meta)
            case _:
                assert_never(action)
        return False

    def _start(self, action: StartMaintenance | StartInspection | StartReclaim | StartDriver, meta: Meta) -> bool:
        """Take a place and start the child. Gives the place back after an error, unless the child may exist because an answer was lost."""
        place = _place(action, meta)
        self._places.enter(place)
        try:
            return (
                self._start_driver(action, meta) if isinstance(action, StartDriver) else self._start_job(action, meta)
            )
        except Exception as error:
            if not (isinstance(error, ApiError) and (error.status == 0 or error.status >= 500)):
                self._places.leave(place)
            raise

    def _start_job(self, action: StartMaintenance | StartInspection | StartReclaim, meta: Meta) -> bool:
        if isinstance(action, StartMaintenance) and action.runner == "Spark":
            # The Secret comes first, because an operator may not create it in a namespace in which Spark may not run.
            self._create(compaction_secret(action, meta, self._env.random_bytes(_RPC_SECRET_BYTES)), meta)
            job = compaction_job(action, meta, self._settings)
        else:
            job = maintenance_job(action, meta, self._settings)
        if isinstance(action, StartMaintenance) and action.ended_driver is not None:
            self._delete_secret(names.rpc_secret_name(action.ended_driver, meta.uid), meta)
        self._try_pod(job)
        started = self._create(job, meta)
        if started:
            other = "reclaim" if isinstance(action, StartReclaim) else "inspection"
            kind = action.kind if isinstance(action, StartMaintenance) else other
            self._metrics.jobs_started.labels(type=kind).inc()
        return started

    def _delete_secret(self, name: str, meta: Meta) -> None:
        """Delete the Secret of a compaction on Spark that has ended. Where Spark may no longer run, the operator has no right to, and the
        Secret stays as long as the resource: it opens nothing any more, and a compaction in a pod must not wait for it.
        """
        try:
            self._cluster.delete(SECRET, meta.namespace, name)
        except ApiError as error:
            if error.status != _FORBIDDEN:
                raise

    def _keep_finalizer(self, action: KeepFinalizer, meta: Meta) -> None:
        """Set or remove the finalizer of the stored resource, if it is still this one."""
        found = self._cluster.get(PERSIST_SHARD, meta.namespace, meta.name)
        if found is None or found["metadata"].get("uid") != meta.uid:
            return
        have = list(found["metadata"].get("finalizers") or ())
        want = [one for one in have if one != names.FINALIZER] + [names.FINALIZER] * action.present
        if set(want) != set(have):
            version = found["metadata"]["resourceVersion"]
            self._cluster.set_finalizers(PERSIST_SHARD, meta.namespace, meta.name, want, version=version)

    def _try_pod(self, job: Resource) -> None:
        """Raises ApiError when the API server would refuse the pod of a Job that does not exist yet. Kubernetes creates the pod later, and
        only Events of the Job would show the refusal. A policy sees the operator as the client, so a policy that lets only controllers
        create pods must also admit the operator. If the operator has no right to create pods (where no sinks run), this check finds
        nothing.
        """
        head, template = job["metadata"], job["spec"]["template"]
        metadata = {
            **template["metadata"],
            "namespace": head["namespace"],
            "name": head["name"],
            "ownerReferences": [_job_reference(head)],
        }
        pod = {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": metadata, "spec": template["spec"]}
        try:
            self._cluster.try_create(POD, pod)
        except ApiError as error:
            is_ours = error.status == _FORBIDDEN and _NO_RIGHT in str(error)
            # A webhook such as Kueue's looks for the Job of the pod, which does not exist yet. A missing namespace refuses the Job itself.
            is_early = error.status == _NOT_FOUND
            # When the Job exists, its own pod may have used up the quota.
            if not is_ours and not is_early and self._cluster.get(JOB, head["namespace"], head["name"]) is None:
                raise

    def _start_driver(self, action: StartDriver, meta: Meta) -> bool:
        secret = self._env.random_bytes(_RPC_SECRET_BYTES)
        digest = None if self._stops is None else self._stops.digest(meta.uid, action.name)
        manifests = driver_manifests(action, meta, self._settings, rpc_secret=secret, stop_digest=digest)
        started = False
        for manifest in manifests:
            created = self._create(manifest, meta)
            started = started or (created and manifest["kind"] == POD.kind)
        if started:
            self._metrics.jobs_started.labels(type="driver").inc()
        return started

    def _create(self, manifest: Resource, meta: Meta) -> bool:
        """Create the object. Returns False when it already existed. Raises ApiError while an object of this name belongs to another
        resource.

        SUBTLE: the name contains the name of the resource, not its uid. A resource that is deleted and created again finds the objects of
        its predecessor until they are collected. With the old ConfigMap, the new driver would execute the old run.
        """
        kind, head = BY_KIND[manifest["kind"]], manifest["metadata"]
        if self._cluster.create(kind, manifest):
            return True
        if kind is SECRET:
            # The name contains the uid of the resource, and the operator may not read Secrets.
            return False
        found = self._cluster.get(kind, head["namespace"], head["name"])
        if found is None or (found["metadata"].get("labels") or {}).get(names.LABEL_OWNER_UID) != meta.uid:
            raise ApiError(
                f"{kind.kind} {head['namespace']}/{head['name']} does not belong to this {meta.name} (uid {meta.uid}): waiting until "
                "it is gone; Kubernetes collects the objects of a deleted resource; delete any other object by hand",
                status=409,
            )
        return False

    def _stop(self, action: StopRun, meta: Meta) -> bool:
        if action.kind != "driver":
            return self._cluster.delete(JOB, meta.namespace, action.name)
        if action.asks and self._ends_by_itself(action.name, meta):
            return True
        stopped = self._cluster.delete(POD, meta.namespace, action.name, grace_seconds=action.grace_seconds)
        self._cluster.delete(CONFIG_MAP, meta.namespace, names.promotion_name(action.name))
        self._cluster.delete(SERVICE, meta.namespace, action.name)
        self._cluster.delete(SECRET, meta.namespace, names.rpc_secret_name(action.name, meta.uid))
        self._cluster.delete(CONFIG_MAP, meta.namespace, action.name)
        return stopped

    def _ends_by_itself(self, name: str, meta: Meta) -> bool:
        """Ask the driver to stop. Returns whether it accepted. Everything else leads to its deletion, also a pod that cannot be read."""
        try:
            pod = self._cluster.get(POD, meta.namespace, name)
        except ApiError:
            return False
        if pod is None or (pod["metadata"].get("labels") or {}).get(names.LABEL_OWNER_UID) != meta.uid:
            return False
        address = children.stop_address(pod)
        return bool(address and self._stops and self._stops.ask(*address, uid=meta.uid, pod=name))


def _place(action: StartMaintenance | StartInspection | StartReclaim | StartDriver, meta: Meta) -> Place:
    kind: PlaceKind = "inspection" if isinstance(action, StartInspection) else "maintenance"
    return Place(
        namespace=meta.namespace,
        name=action.name,
        kind="driver" if isinstance(action, StartDriver) else kind,
        store=names.store_label(action.location.consensus),
        due_ms=None if isinstance(action, StartInspection | StartReclaim) else action.due_ms,
        debt_bytes=action.debt_bytes if isinstance(action, StartMaintenance) else 0,
        priority=action.spec.spark.queue_priority if isinstance(action, StartDriver) else action.queue_priority,
    )


def _job_reference(head: Resource) -> dict[str, Any]:
    """The owner reference that the pod of a Job will have, for policies that refuse pods without an owner. The Job has no uid before its
    creation, so the reference uses the uid of the Job's own owner.
    """
    (owner,) = head["ownerReferences"]
    return {**owner, "apiVersion": JOB.api_version, "kind": JOB.kind, "name": head["name"]}
