"""Owners of shards, and the answers to an attempt to own one.

An owner is a resource of one operator. Its name is known before its shard; the registry of a store maps the owner to the shard.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from urllib.parse import quote, unquote

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId

_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Owner:
    """A resource. `operator_id` distinguishes operators that share a store. Prints as OPERATOR/NAMESPACE/NAME, quoted so that
    `parse` restores any text. Raises InvalidUsage for a field that is empty or not valid unicode.
    """

    operator_id: str
    namespace: str
    name: str

    def __post_init__(self) -> None:
        for field in astuple(self):
            try:
                field.encode()
            except UnicodeEncodeError:
                raise InvalidUsage(f"not an owner: {field!r} is not valid unicode") from None
        if not all(astuple(self)):
            raise InvalidUsage(f"not an owner: {self!r}, its operator, namespace and name must not be empty")

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Inverse of str(). Raises InvalidUsage for any other text."""
        fields = text.split("/")
        if len(fields) != _FIELDS:
            raise InvalidUsage(
                f"not an owner: {text[:200]!r}, expected OPERATOR/NAMESPACE/NAME, with / inside a field written as %2F"
            )
        return cls(*map(unquote, fields))

    def __str__(self) -> str:
        return "/".join(quote(field, safe="") for field in astuple(self))


@dataclass(frozen=True, slots=True)
class Adopted:
    """The owner owns the shard. `is_new` means that it did not own it before the call."""

    shard_id: ShardId
    is_new: bool


@dataclass(frozen=True, slots=True)
class OwnedElsewhere:
    """Another owner owns the shard. Nothing was changed."""

    shard_id: ShardId
    owner: Owner


@dataclass(frozen=True, slots=True)
class Unowned:
    """The shard exists without an owner. Adopting it requires an explicit request. Nothing was changed."""

    shard_id: ShardId


Adoption = Adopted | OwnedElsewhere | Unowned
