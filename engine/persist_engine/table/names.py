"""Names of tables in the registry of a store.

A table that Python creates has the owner `sql/NAMESPACE/NAME`, like a table that CREATE TABLE of the Spark catalog creates. So Python and
Spark find, and drop, each other's tables, and a name is taken in both or in neither. `orders` stands for `default.orders`, because an owner
has a namespace, and `default` is Spark's default namespace. Tables of other owners, such as the resources of an operator, are found by
their names, too. Their owners create, rename and delete them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage, InvariantViolated, PersistError, ShardNotFound
from persist_engine.base.secrets import shown_url
from persist_engine.client.client import PersistClient
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Owner
from persist_engine.work.registry import Registry

#: The operator of tables that SQL and Python create.
OPERATOR = "sql"
NAMESPACE = "default"
#: The limit on the length of a name, because a key of the log holds it, quoted. It is more than other databases allow.
_CHARS_MAX = 255
_ADDRESS = "://"


@dataclass(frozen=True, slots=True)
class Named:
    """A shard, and its owner if it has one."""

    shard_id: ShardId
    owner: Owner | None

    @property
    def is_ours(self) -> bool:
        """Whether SQL or Python created the shard, so that they may rename and drop it."""
        return self.owner is not None and self.owner.operator_id == OPERATOR

    @property
    def name(self) -> str:
        """The shortest text that always leads to the shard: NAME, NAMESPACE.NAME, OPERATOR.NAMESPACE.NAME, or its id if it has no owner."""
        return self.shard_id if self.owner is None else shown(self.owner)


@dataclass(frozen=True, slots=True)
class Hints:
    """Texts with which errors say what to do next, in Python or as commands."""

    create: Callable[[str], str]
    """How to create a table if the name leads to none."""
    taken: Callable[[str], str]
    """What to do if the name leads to a table already."""


PYTHON = Hints(
    create=lambda name: f"create it with `db.create({name!r}, key=..., value=...)`",
    taken=lambda name: f"open it with db.table({name!r}), or create it with exist_ok=True",
)


def shown(owner: Owner) -> str:
    """See `Named.name`. If that text would not lead back to the owner, it is OPERATOR/NAMESPACE/NAME, quoted. This is so for a name with a
    dot, a name that is the id of a shard, and other names that only SQL allows.
    """
    fields: tuple[str, ...] = (owner.operator_id, owner.namespace, owner.name)
    if owner.operator_id == OPERATOR:
        fields = fields[2:] if owner.namespace == NAMESPACE else fields[1:]
    text = ".".join(fields)
    is_found = len(text) <= _CHARS_MAX and all(map(_is_field, fields)) and _as_id(text) is None
    return text if is_found else str(owner)


def new_owner(name: str) -> Owner:
    """The owner of a table to create as NAME or NAMESPACE.NAME. Raises InvalidUsage for other texts, and for the id of a shard."""
    fields = _fields(name)
    if len(fields) > 2:
        raise InvalidUsage(
            f"table {name}: create it as NAME or NAMESPACE.NAME; {fields[0]} would be its operator, and that is {OPERATOR}"
        )
    return Owner(OPERATOR, NAMESPACE if len(fields) == 1 else fields[0], fields[-1])


def resolved(client: PersistClient, name: str) -> Named:
    """The shard to which `name` leads: the shard with this id; the table NAME or NAMESPACE.NAME that SQL or Python created; else the only
    shard that a resource of this name owns. Raises ShardNotFound, with near names. Raises InvalidUsage, with all of them, when several
    shards have the name.
    """
    if not isinstance(name, str):
        raise InvalidUsage(f"the name of a table is a text, not {name!r}")
    _refuse_address(name)
    if (shard_id := _as_id(name)) is not None:
        return Named(shard_id, client.owner_of(shard_id))
    if "/" not in name:
        fields = _fields(name)
        owner = Owner(*fields) if len(fields) == 3 else new_owner(name)
        found = client.registered(owner)
        if found is not None and client.owner_of(found) == owner:
            return Named(found, owner)
    try:
        found = client.shard_named(name)
    except ShardNotFound as error:
        text = str(error).replace("no shard of this store is named", "there is no table")
        raise ShardNotFound(text, **error.detail) from error
    return Named(found, client.owner_of(found))


def listed(client: PersistClient) -> list[Named]:
    """Every shard that has a name, by name. Lists all keys of the store."""
    owned = (Named(shard_id, owner) for owner, shard_id in client.names() if client.owner_of(shard_id) == owner)
    return sorted(owned, key=lambda each: (not each.is_ours, each.name))


def left_by_drop(client: PersistClient, name: str) -> list[Named]:
    """The shards of a name that leads nowhere, each of which a drop that was interrupted left without its name. Lists all keys."""
    try:
        owner = new_owner(name)
    except InvalidUsage:  # a table is not created as this
        return []
    registry = Registry(client.versions.consensus, client.versions.retry)
    return [Named(shard_id, owner) for shard_id in registry.left_by(owner)]


@contextmanager
def of_table(name: str) -> Iterator[None]:
    """A context that puts the table's name before the text of errors that a caller can correct. Their types stay."""
    try:
        yield
    except (InvalidUsage, InvariantViolated) as error:
        raise _named(error, name) from error


def _named(error: PersistError, name: str) -> PersistError:
    prefix = f"table {name if _ADDRESS not in name else shown_url(name)}: "
    if str(error).startswith(("table ", "there is no table")):
        return error
    named = type(error)(prefix + str(error), kind=error.kind, **error.detail)
    named.__suppress_context__ = True
    return named


def _as_id(name: str) -> ShardId | None:
    try:
        return ShardId(name)
    except InvalidUsage:
        return None


def _refuse_address(name: str) -> None:
    """Raises InvalidUsage if `name` is the address of a store, which is a mistake. The message does not show a password."""
    if _ADDRESS in name:
        raise InvalidUsage(f"{shown_url(name)} is an address of a store, and no name of a table: give it to `connect`")


def _fields(name: str) -> list[str]:
    if not isinstance(name, str):
        raise InvalidUsage(f"the name of a table is a text, not a {type(name).__name__}")
    _refuse_address(name)
    fields = name.split(".")
    if len(fields) > 3 or len(name) > _CHARS_MAX or not all(map(_is_field, fields)):
        raise InvalidUsage(
            f"{name[:_CHARS_MAX]!r} is no name of a table: it is NAME or NAMESPACE.NAME, printable and without /"
        )
    if _as_id(name) is not None:
        raise InvalidUsage(f"{name} is the id of a shard, and no name")
    return fields


def _is_field(text: str) -> bool:
    """Whether `text` may be one of the fields of a name that dots separate."""
    return bool(text) and text == text.strip() and text.isprintable() and "." not in text and "/" not in text
