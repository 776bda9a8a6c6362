"""SinceHandle: a durable hold on a shard's since that outlives processes, fenced by an opaque token."""

from __future__ import annotations

from persist_engine.base.errors import InvalidUsage
from persist_engine.client.arguments import expect
from persist_engine.model.commands import CriticalDowngraded, OpaqueMismatch
from persist_engine.model.frontier import Antichain, TimeLike, frontier_of
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.shard.machine import Machine


class SinceHandle:
    """A critical reader: the shard's since never passes this handle's since, and the hold never lapses. Thread-safe.

    Several processes may open the same id. A process that changes the opaque token fences out the others.
    """

    def __init__(self, machine: Machine, critical_id: CriticalReaderId, *, since: Antichain, opaque: bytes) -> None:
        self._machine = machine
        self._critical_id = critical_id
        self._since = since
        self._opaque = opaque
        self._downgraded_s: float | None = None  # monotonic, because the wall clock may be set back

    @property
    def shard_id(self) -> ShardId:
        """The id of the shard."""
        return self._machine.shard_id

    @property
    def critical_id(self) -> CriticalReaderId:
        """The id of the reader."""
        return self._critical_id

    @property
    def since(self) -> Antichain:
        """The hold as this handle last saw it."""
        return self._since

    @property
    def opaque(self) -> bytes:
        """The token as this handle last saw it."""
        return self._opaque

    def compare_and_downgrade_since(
        self, expected_opaque: bytes, new: tuple[bytes, TimeLike]
    ) -> CriticalDowngraded | OpaqueMismatch:
        """Sets (opaque, since) iff the opaque is the expected one. The since never goes back. Linearized.

        Returns OpaqueMismatch, with the token of the process that fenced this handle, when the opaque is another one. Takes
        effect exactly once, even when a store's answer is lost, provided that no two owners use the same token.
        """
        new_opaque, new_since = _checked(expected_opaque, new)
        answer, _ = self._machine.compare_and_downgrade_since(
            self._critical_id, expected_opaque=expected_opaque, new_opaque=new_opaque, new_since=new_since
        )
        self._since = answer.since
        if isinstance(answer, OpaqueMismatch):
            self._opaque = answer.opaque
        else:
            self._opaque = new_opaque
            self._downgraded_s = self._machine.env.monotonic_s()
        return answer

    def maybe_compare_and_downgrade_since(
        self, expected_opaque: bytes, new: tuple[bytes, TimeLike]
    ) -> CriticalDowngraded | OpaqueMismatch | None:
        """Like `compare_and_downgrade_since`, but returns None without a round trip when this handle moved its since less than
        `lease.critical_downgrade_interval_ms` ago. This is for callers in a loop.
        """
        _checked(expected_opaque, new)
        interval_s = self._machine.settings.lease.critical_downgrade_interval_ms / 1000
        if self._downgraded_s is not None and self._machine.env.monotonic_s() - self._downgraded_s < interval_s:
            return None
        return self.compare_and_downgrade_since(expected_opaque, new)

    def expire(self) -> bool:
        """Releases the hold for ever, for all processes. Returns whether it existed. The shard's since stays where it
        is.
        """
        existed, _ = self._machine.expire_critical_reader(self._critical_id)
        return existed


def _checked(expected_opaque: bytes, new: tuple[bytes, TimeLike]) -> tuple[bytes, Antichain]:
    """The new opaque and since. Raises InvalidUsage when an argument is invalid."""
    expect(expected_opaque, bytes, "expected_opaque", "bytes")
    wanted = "a tuple of the new opaque, bytes, and the new since"
    if len(expect(new, tuple, "new", wanted)) != 2:
        raise InvalidUsage(f"new must be {wanted}, not a tuple of {len(new)}")
    return expect(new[0], bytes, "the new opaque", "bytes"), frontier_of(new[1], "the new since")
