"""The console's source over a cluster: resources, events and logs from the API server, and the stores if the process knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from persist_operator.api import names
from persist_operator.api.shard import StoreLocation
from persist_operator.bridge import Bridge
from persist_operator.cluster.kube import is_segment
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK, ApiError, Kind
from persist_operator.cluster.viewing import ViewedCluster
from persist_operator.console.engine import engine_view
from persist_operator.console.port import (
    APPROVE,
    EngineView,
    Event,
    Forbidden,
    KindName,
    Log,
    PlanChanged,
    Resource,
    Right,
    Unavailable,
    Unseen,
    Viewer,
)
from persist_operator.console.rights import Rights, explained, listing_events, reading, reading_logs
from persist_operator.console.texts import block, number, text

#: Lines of a log, and events, on a page.
LOG_LINES, EVENTS_MAX = 200, 50
#: Events that are read for a page. The API server gives them in no order, and keeps them for an hour.
_EVENTS_READ = 500
KINDS: dict[KindName, Kind] = {"PersistShard": PERSIST_SHARD, "SparkSink": SPARK_SINK}
_NO_STORES = "This console has no access to the stores, so the page shows what the status says. With PERSIST_BLOB and PERSIST_CONSENSUS, "
_NO_STORES += "and their credentials, it also draws the spine and lists versions and all holds."


class ClusterSource:
    """See console.port.Source. `namespaces`: the namespaces to show; empty: all."""

    def __init__(
        self,
        cluster: ViewedCluster,
        rights: Rights,
        *,
        title: str,
        namespaces: Sequence[str] = (),
        stores: tuple[Bridge, StoreLocation] | None = None,
    ) -> None:
        self._cluster, self._rights, self._title = cluster, rights, title
        self._namespaces, self._stores = tuple(namespaces), stores

    @property
    def title(self) -> str:
        return self._title

    def every(self, kind: KindName, viewer: Viewer, namespace: str | None = None) -> list[Resource]:
        namespaces = self._namespaces if namespace is None else (namespace,)
        everywhere = reading(kind, "list", None)
        if not self._rights.precedes or self._rights.has(viewer, everywhere):
            return [one for scope in namespaces or (None,) for one in self._found(kind, scope, viewer)]
        if namespaces:
            allowed = [one for one in namespaces if self._rights.has(viewer, reading(kind, "list", one))]
            if not allowed:
                self._refuse(viewer, [reading(kind, "list", one) for one in namespaces])
            return [one for scope in allowed for one in self._found(kind, scope, viewer)]
        found = self._found(kind, None, viewer)
        places = {text(block(one, "metadata").get("namespace")) for one in found}
        shown = {place for place in places if self._rights.has(viewer, reading(kind, "list", place))}
        if not shown:
            # The refusal does not name the namespaces, so a viewer without rights there does not learn that they exist.
            self._refuse(viewer, [everywhere])
        return [one for one in found if block(one, "metadata").get("namespace") in shown]

    def get(self, kind: KindName, namespace: str, name: str, viewer: Viewer) -> Resource | None:
        if (self._namespaces and namespace not in self._namespaces) or not (is_segment(namespace) and is_segment(name)):
            return None
        needed = reading(kind, "get", namespace)
        if self._rights.precedes and not self._rights.has(viewer, needed):
            self._refuse(viewer, [needed])
        try:
            return self._cluster.get(KINDS[kind], namespace, name)
        except ApiError as error:
            self._fail(error, viewer, [needed])

    def engine(self, shard: Resource) -> EngineView | Unseen:
        return Unseen(_NO_STORES) if self._stores is None else engine_view(*self._stores, shard)

    def events(self, resource: Resource, viewer: Viewer) -> list[Event] | Unseen:
        metadata = block(resource, "metadata")
        namespace = text(metadata.get("namespace"))
        needed = listing_events(namespace)
        if self._rights.precedes and not self._rights.has(viewer, needed):
            return Unseen(_lacking(needed))
        try:
            found = self._cluster.events(namespace, text(metadata.get("uid")), limit=_EVENTS_READ)
        except ApiError as error:
            return Unseen(_lacking(needed) if error.status == 403 else f"Events could not be read: {error}.")
        return sorted((_event(one) for one in found), key=lambda one: one.time, reverse=True)[:EVENTS_MAX]

    def log(self, sink: Resource, viewer: Viewer) -> Log:
        namespace = text(block(sink, "metadata").get("namespace"))
        pod = text(block(sink, "status", "driver").get("podName"))
        if not pod:
            return Log("", "", "The sink has not run yet.")
        needed = reading_logs(namespace)
        if self._rights.precedes and not self._rights.has(viewer, needed):
            return Log(pod, "", _lacking(needed))
        try:
            lines = self._cluster.logs(namespace, pod, container=names.DRIVER_CONTAINER, lines=LOG_LINES)
        except ApiError as error:
            return Log(pod, "", _lacking(needed) if error.status == 403 else f"The log could not be read: {error}.")
        return Log(pod, lines, "" if lines else "The pod is gone, or has written nothing yet.")

    def running(self, shard: Resource) -> list[str]:
        blocks = block(shard, "status", "maintenance").values()
        started = [(text(block(one).get("jobName")), text(block(one).get("settledJob"))) for one in blocks]
        return [job for job, settled in started if job and job != settled]

    def may_approve(self, shard: Resource, viewer: Viewer) -> str:
        needed = reading("PersistShard", "patch", text(block(shard, "metadata").get("namespace")))
        if not block(shard, "status", "plan") or self._rights.has(viewer, needed):
            return ""
        return _lacking(needed)

    def approve(self, namespace: str, name: str, plan_id: str, viewer: Viewer) -> None:
        shard = self.get("PersistShard", namespace, name, viewer)
        if shard is None or block(shard, "status", "plan").get("id") != plan_id:
            raise PlanChanged(f"PersistShard {namespace}/{name} has no plan {plan_id} now: look at its page again")
        needed = reading("PersistShard", "patch", namespace)
        if self._rights.precedes and not self._rights.has(viewer, needed):
            self._refuse(viewer, [needed])
        try:
            # The patch has no version, because the value names the plan, so a newer plan is not approved.
            self._cluster.annotate(PERSIST_SHARD, namespace, name, APPROVE, plan_id)
        except ApiError as error:
            self._fail(error, viewer, [needed])

    def _found(self, kind: KindName, namespace: str | None, viewer: Viewer) -> list[Resource]:
        try:
            return list(self._cluster.find(KINDS[kind], namespace, {}))
        except ApiError as error:
            self._fail(error, viewer, [reading(one, "list", namespace) for one in KINDS])

    def _refuse(self, viewer: Viewer, needed: list[Right]) -> NoReturn:
        raise Forbidden(explained(self._rights, viewer, needed))

    def _fail(self, error: ApiError, viewer: Viewer, needed: list[Right]) -> NoReturn:
        """Raises Forbidden for a refusal of the kubeconfig's user. A refusal of the console's own rights is a fault of the installation."""
        if error.status == 403 and not self._rights.precedes:
            raise Forbidden(explained(self._rights, viewer, needed)) from error
        if error.status == 401:
            raise Unavailable(
                "The API server does not know this user: log in again, or choose another context."
            ) from error
        raise Unavailable(f"The API server did not answer as it should: {error}") from error


def _lacking(right: Right) -> str:
    return f"You lack the right: {right}."


def _event(event: Resource) -> Event:
    series = block(event, "series")
    time = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return Event(
        time=text(time or block(event, "metadata").get("creationTimestamp")),
        warning=event.get("type") == "Warning",
        reason=text(event.get("reason")),
        message=text(event.get("message") or event.get("note")),
        count=number(series.get("count") or event.get("count")) or 1,
    )
