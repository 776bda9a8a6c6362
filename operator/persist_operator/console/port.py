"""The port between the pages and where the resources are: a state folder of this machine, or a cluster.

Owns the values that pages are made of. A source only reads, but for `approve`. It registers nothing in a shard, so that a look at a shard
keeps nothing in it. Must not know HTTP.
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
    """A right of Kubernetes: a verb on a resource of an API group. `namespace` None: in all namespaces. `held` None: not known."""

    verb: str
    group: str
    resource: str
    namespace: str | None
    held: bool | None = None

    def __str__(self) -> str:
        where = "in all namespaces" if self.namespace is None else f"in namespace {self.namespace}"
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''} {where}"


class Forbidden(InvalidUsage):
    """The viewer lacks rights. `rights` are those that the page needs."""

    def __init__(self, rights: Sequence[Right]) -> None:
        super().__init__(f"missing right: {', '.join(str(one) for one in rights if not one.held)}")
        self.rights = tuple(rights)


class Unavailable(InvalidUsage):
    """The source did not answer."""


class PlanChanged(InvalidUsage):
    """The plan to approve is not the plan of the shard now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The user at the browser. Without a name it is the user of this process."""

    name: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """What an authenticator adds to a user, for authorizers that ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A shard as its stores have it: the rows of the engine's tables `batches`, `versions` and `holds`, oldest first.

    `versions` and `holds` are None when the log is too long to be read for a page; `omitted` says so.
    """

    since: int | None
    upper: int | None
    batches: tuple[Resource, ...]
    versions: tuple[Resource, ...] | None
    holds: tuple[Resource, ...] | None
    omitted: str = ""


@dataclass(frozen=True, slots=True)
class Unseen:
    """Why there is no EngineView: one sentence."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a resource. `count` is how often."""

    time: str
    warning: bool
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Log:
    """The last lines of a run. Without a run, `text` is empty and `why` says so."""

    run: str
    text: str
    why: str = ""


class Source(Protocol):
    """Where resources come from. Thread-safe. Calls raise Forbidden when `viewer` may not read, and Unavailable when nothing answers."""

    @property
    def title(self) -> str:
        """Where the resources are, in a few words."""

    def every(self, kind: KindName, viewer: Viewer) -> list[Resource]:
        """All resources of a kind that `viewer` may read."""

    def get(self, kind: KindName, namespace: str, name: str, viewer: Viewer) -> Resource | None:
        """The resource; None when there is none."""

    def engine(self, shard: Resource) -> EngineView | Unseen:
        """The shard in its stores. Linearized, registers nothing. `shard` is a resource that `get` or `every` returned."""

    def events(self, resource: Resource, viewer: Viewer) -> list[Event] | Unseen:
        """What happened to the resource, newest first."""

    def log(self, sink: Resource, viewer: Viewer) -> Log:
        """The last lines of the newest run of a sink. Never a secret: the driver removes them from its output."""

    def running(self, shard: Resource) -> list[str]:
        """The names of maintenance runs that are under way, as far as the source knows."""

    def may_approve(self, shard: Resource, viewer: Viewer) -> str:
        """Empty when `viewer` may approve the plan of this shard; otherwise one sentence that says why not."""

    def approve(self, namespace: str, name: str, plan_id: str, viewer: Viewer) -> None:
        """Request approval of this plan of the shard. Idempotent. Forbidden; PlanChanged when the shard has no such plan now."""
