"""The records of what maintenance deleted. Each run writes its own, and later runs delete them after `maintenance.deletions_kept_ms`
(docs/adr/0026-deletions.md).

No version names a record. It names keys and holds no rows. A run that deletes nothing writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile

from persist_engine.base.versioned import SeqNo
from persist_engine.codec.deletions import KEYS_MAX, Cause, Deletions, decode_deletions, encode_deletions
from persist_engine.codec.keys import (
    DeletionsKey,
    blob_key,
    deletions_key,
    deletions_prefix,
    parse_deletions_key,
)
from persist_engine.model.ids import DeletionId
from persist_engine.shard.machine import Machine

#: The limit on expired records that one run deletes. A run writes fewer, so expired records do not pile up.
PRUNED_MAX = 256


class DeletionRecords:
    """Writes the records of one run. Retries storage errors. Not thread-safe."""

    def __init__(self, machine: Machine, cause: Cause) -> None:
        self._machine, self._cause = machine, cause
        self.last = ""
        """The partial key of the last record; "" when there is none."""

    def gone(self, partial_keys: Sequence[str], *, seqno: SeqNo, begun_ms: int) -> None:
        """Records that these blobs are gone, and that this run began to delete them at `begun_ms`. The record is durable when this returns.
        Only for a run that finds the same blobs again when it is repeated: if it is killed before this call, the repetition records them.
        """
        self._write(partial_keys, seqno, begun_ms=begun_ms, gone_ms=self._machine.env.now_ms())

    @contextmanager
    def intended(self, partial_keys: Sequence[str], *, seqno: SeqNo) -> Iterator[None]:
        """Records the intention to delete these blobs, runs the block, which deletes them, and then records that they are gone. If the
        block does not end, the intention stays: it is then unknown which of them were deleted.
        """
        begun_ms = self._machine.env.now_ms()
        intentions = self._write(partial_keys, seqno, begun_ms=begun_ms, gone_ms=None)
        yield
        self.gone(partial_keys, seqno=seqno, begun_ms=begun_ms)
        for key in intentions:
            self._delete(key)

    def prune(self) -> None:
        """Deletes some of the expired records, if this run wrote a record."""
        if not self.last:
            return
        machine = self._machine
        # A clock that is ahead must not cause an early deletion.
        now_ms = min(machine.env.now_ms(), machine.state.walltime_ms)

        def expired() -> list[DeletionsKey]:
            is_over = lambda one: one.expires_ms <= now_ms  # noqa: E731 - of this moment
            return list(islice(takewhile(is_over, _listed(machine)), PRUNED_MAX))

        for one in machine.retry.external("list records of deletions", expired, shard=machine.shard_id):
            self._delete(one.partial)

    def _write(self, partial_keys: Sequence[str], seqno: SeqNo, *, begun_ms: int, gone_ms: int | None) -> list[str]:
        """Writes the records and returns their partial keys. Writes none while records are switched off."""
        machine, written = self._machine, []
        kept_ms = machine.settings.maintenance.deletions_kept_ms
        for start in range(0, len(partial_keys) if kept_ms else 0, KEYS_MAX):
            now_ms = machine.env.now_ms()
            # A clock that is behind must not cause other processes to delete the record early.
            expires_ms = max(now_ms, machine.state.walltime_ms) + kept_ms
            record = Deletions(
                shard_id=machine.shard_id,
                cause=self._cause,
                seqno=seqno,
                hostname=machine.env.hostname(),
                begun_ms=begun_ms,
                gone_ms=gone_ms,
                keys=tuple(partial_keys[start : start + KEYS_MAX]),
            )
            self.last = deletions_key(expires_ms, DeletionId.written_at(now_ms, machine.env.random_bytes(10)))
            key, data = blob_key(machine.shard_id, self.last), encode_deletions(record)
            machine.retry.external("set record", partial(machine.blob.set, key, data), shard=machine.shard_id)
            written.append(self.last)
        return written

    def _delete(self, partial_key: str) -> None:
        machine = self._machine
        key = blob_key(machine.shard_id, partial_key)
        machine.retry.external("delete record", partial(machine.blob.delete, key), shard=machine.shard_id)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A record and its partial key."""

    key: str
    record: Deletions


def recorded(machine: Machine, *, since_ms: int = 0) -> list[Recorded]:
    """The records that were written at or after `since_ms`, in the order of their deletions. An intention lists only the blobs that none of
    the other records reports as gone. Retries storage errors. Raises CorruptData and Incompatible, which name the key.
    """
    list_all = lambda: list(_listed(machine))  # noqa: E731 - bound to this shard
    keys = machine.retry.external("list records of deletions", list_all, shard=machine.shard_id)
    found = list(_read(machine, (one for one in keys if one.record_id.written_ms >= since_ms)))
    intentions = [one for one in found if one.record.gone_ms is None]
    if intentions:
        gone = {key for one in found if one.record.gone_ms is not None for key in one.record.keys}
        left = [_without(one, gone) for one in intentions]
        found = [one for one in found if one.record.gone_ms is not None] + [one for one in left if one.record.keys]
    return sorted(found, key=lambda one: (one.record.begun_ms, one.key))


def _without(one: Recorded, gone: set[str]) -> Recorded:
    keys = tuple(key for key in one.record.keys if key not in gone)
    return replace(one, record=replace(one.record, keys=keys))


def _read(machine: Machine, keys: Iterable[DeletionsKey]) -> Iterator[Recorded]:
    for one in keys:
        key = blob_key(machine.shard_id, one.partial)
        data = machine.retry.external("get record", partial(machine.blob.get, key), shard=machine.shard_id)
        if data is not None:  # otherwise it expired meanwhile
            yield Recorded(one.partial, decode_deletions(data, key=key, shard_id=machine.shard_id))


def _listed(machine: Machine) -> Iterator[DeletionsKey]:
    """The keys of the records, in the order in which they expire. A storage error surfaces."""
    for info in machine.blob.list_prefix(deletions_prefix(machine.shard_id)):
        key = parse_deletions_key(info.key)
        if key is not None:
            yield key
