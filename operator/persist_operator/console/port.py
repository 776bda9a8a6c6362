"""The port between the pages and the source of the resources: a state folder of this machine, or a cluster.

Owns the values for pages. A source only reads, except for `approve`. It registers nothing in a shard, so a look at a shard holds nothing.
Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names

Resource = Mapping[str, Any]
KindName = Literal["PersistShard", "SparkSink"]
#: The annotation that approves a plan; its value is the id of the plan.
APPROVE = f"{names.REQUEST_PREFIX}approve"
PLURALS: Mapping[KindName, str] = {"PersistShard": "persistshards", "SparkSink": "sparksinks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """A right of Kubernetes: a verb on a resource of an API group. `namespace` None: in all namespaces. `held` None: unknown."""

    verb: str
    group: str
    resource: str
    namespace: str | None
    held: bool | None = None

    def __str__(self) -> str:
        where = "in all namespaces" if self.namespace is None else f"in namespace {self.namespace}"
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''} {where}"


class Forbidden(InvalidUsage):
    """The viewer lacks rights. `rights` are all rights that the page needs."""

    def __init__(self, rights: Sequence[Right]) -> None:
        super().__init__(f"missing right: {', '.join(str(one) for one in rights if not one.held)}")
        self.rights = tuple(rights)


class Unavailable(InvalidUsage):
    """The source did not answer."""


class PlanChanged(InvalidUsage):
    """The plan to approve is no longer the plan of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The user at the browser. Without a name it is the user of this process."""

    name: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The extra fields that an authenticator adds to a user, for authorizers that use them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A shard in its stores: the rows of the engine's tables `batches`, `versions` and `holds`, oldest first.

    `versions` and `holds` are None when the log is too long to be read for a page; `omitted` has the explanation.
    """

    since: int | None
    upper: int | None
    batches: tuple[Resource, ...]
    versions: tuple[Resource, ...] | None
    holds: tuple[Resource, ...] | None
    omitted: str = ""


@dataclass(frozen=True, slots=True)
class Unseen:
    """The reason why there is no EngineView, in one sentence."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a resource. `count`: how often it happened."""

    time: str
    warning: bool
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Log:
    """The last lines of a run. Without a run, `text` is empty and `why` has the reason."""

    run: str
    text: str
    why: str = ""


class Source(Protocol):
    """The source of resources. Thread-safe. Calls raise Forbidden when `viewer` may not read, and Unavailable when the source does
    not answer.
    """

    @property
    def title(self) -> str:
        """The place of the resources, in a few words."""

    def every(self, kind: KindName, viewer: Viewer, namespace: str | None = None) -> list[Resource]:
        """All resources of a kind that `viewer` may read; with `namespace`, those in it, for which the right there suffices."""

    def get(self, kind: KindName, namespace: str, name: str, viewer: Viewer) -> Resource | None:
        """The resource; None when there is none."""

    def engine(self, shard: Resource) -> EngineView | Unseen:
        """The shard in its stores. Linearized, registers nothing. `shard` is a resource that `get` or `every` returned."""

    def events(self, resource: Resource, viewer: Viewer) -> list[Event] | Unseen:
        """The events of the resource, newest first."""

    def log(self, sink: Resource, viewer: Viewer) -> Log:
        """The last lines of the newest run of a sink. They contain no secrets, because the driver removes secrets from its output."""

    def running(self, shard: Resource) -> list[str]:
        """The names of maintenance runs that are under way, if the source knows them."""

    def may_approve(self, shard: Resource, viewer: Viewer) -> str:
        """Empty when `viewer` may approve the plan of this shard; otherwise the reason in one sentence."""

    def approve(self, namespace: str, name: str, plan_id: str, viewer: Viewer) -> None:
        """Approve this plan of the shard. Idempotent. Raises Forbidden, and PlanChanged when the shard no longer has this plan."""
