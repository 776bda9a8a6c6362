"""Leased parts: single parts of a read that other threads, processes or machines fetch, while the reader that leased them keeps their blobs
(spec 15.6).

This module owns the record of outstanding parts. A part is a value that can be sent as bytes; its lease stays with the reader.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import RetrySettings
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.batch import decode_batch, encode_batch
from persist_engine.codec.damage import UNDECODABLE
from persist_engine.model.batch import HollowBatch, HollowPart, Part, RunMeta
from persist_engine.model.frontier import Description
from persist_engine.model.ids import LeasedReaderId, ShardId
from persist_engine.parts.fetch import ChangesFilter, ListenFilter, Matching, PartSource, RowFilter, SnapshotFilter
from persist_engine.parts.selection import Selection, Skipped, audit
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import Predicate, from_json, to_json
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob

#: The format of `LeasedPart.to_bytes`. It passes between processes of one release and is never durable.
PART_FORMAT = 3

Rows = SnapshotFilter | ListenFilter | ChangesFilter
"""The filter that selects the rows of a part which belong to its read."""
_ROWS: dict[str, type[Rows]] = {"snapshot": SnapshotFilter, "listen": ListenFilter, "changes": ChangesFilter}


@dataclass(frozen=True, slots=True)
class LeasedPart:
    """One part to fetch, and the selection of its rows that belong to the read. `fetch` needs only the blob store.

    `number` identifies it to `reader_id`, the reader that keeps its blobs until the part is returned there. In the process that leased it,
    the part keeps that reader alive; in another process (sent as bytes, or pickled) it does not.
    """

    reader_id: LeasedReaderId
    number: int
    shard_id: ShardId
    schema: Schema
    schema_id: int | None
    desc: Description
    part: Part
    rows: Rows
    where: Predicate | None
    is_audit: bool = False
    """The read skips this part by its statistics. Fetching it gives no rows, and checks the statistics."""
    holder: object = field(default=None, compare=False, repr=False)

    @property
    def bytes_estimate(self) -> int:
        """The bytes that `fetch` reads."""
        return self.part.hollow_bytes

    def fetch(self, blob: Blob, *, retry: Retry | None = None, metrics: Metrics | None = None) -> Iterator[pa.Table]:
        """The rows of the part (key, val, time, diff) that belong to the read, as non-empty tables of bounded size. They are not
        consolidated with the rows of other parts, and not necessarily in order.

        `retry` retries storage errors (default: for ever). Raises MissingBlob when the part was returned or its reader expired, and its
        blobs were collected. Raises CorruptData, which names the key. Raises InvariantViolated when an audit finds a row.
        """
        source = part_source(self.shard_id, self.schema, self.schema_id, blob, retry, metrics=metrics)
        where = None if self.where is None else Filter(self.where, self.schema)
        row_filter: RowFilter = self.rows if where is None else Matching(self.rows, where)
        if self.is_audit:
            assert isinstance(self.part, HollowPart), "inline parts are not skipped for an audit"
            audit(source, Skipped(self.desc, self.part), row_filter, where)
            return
        for table in source.decode(source.get(self.part, self.desc), self.part, self.desc):
            wanted = row_filter.apply(table)
            if wanted.num_rows:
                yield wanted

    def to_bytes(self) -> bytes:
        """Everything that a remote reader needs except the blob store; inverse of `from_bytes`. The bytes are for transport, not
        storage.
        """
        kind = next(name for name, rows in _ROWS.items() if isinstance(self.rows, rows))
        alone = HollowBatch(self.desc, self.part.rows, (self.part,), (), (RunMeta(),))
        value = {
            "format": PART_FORMAT,
            "reader_id": self.reader_id,
            "number": self.number,
            "shard_id": self.shard_id,
            "key": self.schema.key_ddl,
            "val": self.schema.val_ddl,
            "schema_id": self.schema_id,
            "part": base64.b64encode(encode_batch(alone)).decode(),
            "rows": [kind, *(getattr(self.rows, name) for name in self.rows.__slots__)],
            "where": None if self.where is None else to_json(self.where),
            "is_audit": self.is_audit,
        }
        return json.dumps(value).encode()

    def __reduce__(self) -> tuple[Callable[[bytes], LeasedPart], tuple[bytes]]:
        return LeasedPart.from_bytes, (self.to_bytes(),)

    @classmethod
    def from_bytes(cls, data: bytes) -> LeasedPart:
        """Inverse of `to_bytes`. Raises Incompatible for another format, and CorruptData for any other bytes."""
        with decoding_transport("leased part"):
            value: dict[str, Any] = json.loads(data)
            if value["format"] != PART_FORMAT:
                raise Incompatible(f"leased part of format {value['format']}, this code reads {PART_FORMAT}")
            alone = decode_batch(base64.b64decode(value["part"]))
            (part,) = alone.part_list()
            kind, *times = value["rows"]
            return cls(
                LeasedReaderId(value["reader_id"]),
                int(value["number"]),
                ShardId(value["shard_id"]),
                Schema.from_ddl(value["key"], value["val"]),
                value["schema_id"],
                alone.desc,
                part,
                _ROWS[kind](*map(int, times)),
                None if value["where"] is None else from_json(value["where"]),
                bool(value["is_audit"]),
            )


@contextmanager
def decoding_transport(what: str) -> Iterator[None]:
    """Turns errors from bytes that the encoder of this module did not make into CorruptData, which names `what`."""
    try:
        yield
    except UNDECODABLE as error:
        raise CorruptData(f"{what} does not decode: {error}", key=what) from error


def part_source(
    shard_id: ShardId,
    schema: Schema,
    schema_id: int | None,
    blob: Blob,
    retry: Retry | None,
    *,
    metrics: Metrics | None = None,
) -> PartSource:
    """A PartSource for a process that has only the blob store. Without `retry`, the source retries for ever."""
    metrics = metrics or NoMetrics()
    retry = retry or Retry(SystemEnv(), RetrySettings(), metrics)
    return PartSource(shard_id, blob, schema, retry, metrics, schema_id, path="fetch")


class Pin:
    """Holds the blobs that one version of a shard names, until `release` or until it is garbage-collected. Thread-safe."""

    def __init__(self, pins: Pins, seqno: SeqNo, holder: object) -> None:
        self._pins = pins
        self.seqno = seqno
        """The held version."""
        self.holder = holder
        """The reader with the lease on which the pin depends. It lives as long as its pins are held."""
        self._held = threading.Lock()
        self._held.acquire()

    def again(self) -> Pin:
        """Another hold of the same version, for the reader's own records. It does not keep the reader alive. Raises InvalidUsage when this
        one was released.
        """
        if not self._held.locked():
            raise _not_held(self.seqno)
        return self._pins.hold(self.seqno)

    def release(self) -> None:
        """Releases the hold. Idempotent."""
        try:
            self._held.release()
        except RuntimeError:  # already released
            return
        self._pins.let_go(self.seqno)
        self.holder = None

    def __del__(self) -> None:
        self.release()


class Pins:
    """The versions that one reader holds, with the number of pins of each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[SeqNo] = Counter()
        # Python's garbage collector also releases pins, in a thread that may hold any lock. So `let_go` must not take a lock.
        self._let_go: deque[SeqNo] = deque()

    def hold(self, seqno: SeqNo) -> Pin:
        """Holds `seqno`, which must already be held, once more. Raises InvalidUsage when its last hold was released and `oldest` was called
        since. The state may have released it by then, and would refuse every heartbeat of a reader that requests it again.
        """
        with self._lock:
            if not self._held[seqno]:
                raise _not_held(seqno)
            self._held[seqno] += 1
        return Pin(self, seqno, holder=None)

    def hold_current(self, newest: Callable[[], SeqNo], *, holder: object) -> Pin:
        """Holds the version that `newest` returns. Calls `newest` under the lock; otherwise `oldest` could release that version before it
        is held. The pin keeps `holder` alive.
        """
        with self._lock:
            seqno = newest()
            self._held[seqno] += 1
        return Pin(self, seqno, holder)

    def let_go(self, seqno: SeqNo) -> None:
        """Removes one hold of `seqno`."""
        self._let_go.append(seqno)

    def oldest(self, default: SeqNo) -> SeqNo:
        """The oldest held version, or `default`."""
        with self._lock:
            while self._let_go:
                self._held[self._let_go.popleft()] -= 1
            self._held = +self._held
            return min(self._held, default=default)


class PartLeases:
    """The outstanding parts of one reader, each with its own pin. Thread-safe."""

    def __init__(self, reader_id: LeasedReaderId) -> None:
        self._reader_id = reader_id
        self._lock = threading.Lock()
        self._out: dict[int, Pin] = {}
        self._next = 0

    def lease_all(
        self, pin: Pin, source: PartSource, selection: Selection, *, rows: Rows, where: Filter | None
    ) -> list[LeasedPart]:
        """Leases the parts of `selection` and the skipped parts that it audits. All belong to batches of the version of `pin`. Each is held
        until `give_back`.
        """
        read = [(batch.desc, part, False) for batch in selection.batches for part in batch.part_list()]
        audits = [(skipped.desc, skipped.part, True) for skipped in selection.audits]
        parts: list[LeasedPart] = []
        try:
            for desc, part, is_audit in [*read, *audits]:
                parts.append(self._lease(pin, source, desc, part, rows=rows, where=where, is_audit=is_audit))
        except BaseException:  # the caller does not receive these parts, so nothing else would return them
            for leased in parts:
                self.give_back(leased)
            raise
        return parts

    def _lease(
        self,
        pin: Pin,
        source: PartSource,
        desc: Description,
        part: Part,
        *,
        rows: Rows,
        where: Filter | None,
        is_audit: bool,
    ) -> LeasedPart:
        holder, own = pin.holder, pin.again()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._out[number] = own
        return LeasedPart(
            reader_id=self._reader_id,
            number=number,
            shard_id=source.shard_id,
            schema=source.schema,
            schema_id=source.schema_id,
            desc=desc,
            part=part,
            rows=rows,
            where=None if where is None else where.predicate,
            is_audit=is_audit,
            holder=holder,
        )

    def give_back(self, part: LeasedPart) -> bool:
        """Releases the blobs of a part. Returns False when it was returned before. Raises InvalidUsage for a part of another reader."""
        if part.reader_id != self._reader_id:
            raise InvalidUsage(f"part {part.number} was leased by reader {part.reader_id}, not by {self._reader_id}")
        with self._lock:
            pin = self._out.pop(part.number, None)
        if pin is not None:
            pin.release()
        return pin is not None

    @property
    def count(self) -> int:
        """The number of outstanding parts."""
        with self._lock:
            return len(self._out)


def _not_held(seqno: SeqNo) -> InvalidUsage:
    return InvalidUsage(f"version {seqno} is no longer held")
