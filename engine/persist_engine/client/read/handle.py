"""ReadHandle: a leased reader. It takes snapshots at a time, listens from a time, and meanwhile holds since and blobs.

This module owns the lease and its heartbeat. It knows nothing of how rows are merged (parts.consolidate) or how state is changed (shard).
Every snapshot pins its version until it is closed, so that none of its blobs can be collected.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial, reduce

import pyarrow as pa

from persist_engine.base.errors import Fenced, InvalidBounds, InvalidUsage, PersistError, Unavailable
from persist_engine.base.versioned import SeqNo
from persist_engine.client.arguments import expect, expect_count, expect_seconds
from persist_engine.client.expiring import Expiring
from persist_engine.client.read.change_splits import Shape
from persist_engine.client.read.changes import Changes
from persist_engine.client.read.leased import LeasedPart, PartLeases, Pin, Pins
from persist_engine.client.read.listen import Listen, Progress, Updates
from persist_engine.client.read.snapshot import SinceAhead, Snapshot
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain, TimeLike, frontier_of, time_of
from persist_engine.model.ids import LeasedReaderId, ShardId
from persist_engine.model.spine.trace import Trace
from persist_engine.parts.fetch import PartSource
from persist_engine.parts.selection import sampled
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate_text import Where, filter_of, predicate_of
from persist_engine.rows.projection import Projection
from persist_engine.rows.schema import Schema
from persist_engine.shard.machine import Machine
from persist_engine.shard.watch import once_after
from persist_engine.storage.blob import Blob
from persist_engine.work.heartbeat import Heartbeat

_log = logging.getLogger(__name__)
#: When a read has waited this long for a time to be written, it logs the reason (spec 9.19).
WAIT_LOG_S = 1.0
#: How long an interrupted registration waits for the end of its lease. A store that does not answer may be why it was interrupted.
LET_GO_S = 2.0


class ReadHandle(Expiring):
    """Reads one shard at times at or past `since`. Thread-safe. A context manager that expires the lease on exit.

    While the handle lives, the shard's since does not pass the handle's `since`, and no blob of an open snapshot or listener is deleted. It
    lives as long as there is a reference to it, to anything that it opened (and that is not closed), or to a part that it leased. After
    that it expires in the background, best-effort. If its process dies, it holds since and blobs until its lease lapses.
    """

    @classmethod
    def open(cls, machine: Machine, schema_id: int | None, *, purpose: str, lease_ms: int | None = None) -> ReadHandle:
        """Registers a leased reader (one commit) at the shard's since and starts its heartbeat. It shows rows under the schema `schema_id`
        (None: the newest one now), even when the shard's schema evolves later.
        """
        lease_ms = machine.settings.lease.reader_lease_ms if lease_ms is None else lease_ms
        expect_count(lease_ms, "lease_ms", least=0)
        reader_id = LeasedReaderId.from_bytes(machine.env.random_bytes(16))
        try:
            registered, _ = machine.register_leased_reader(reader_id, lease_ms=lease_ms, purpose=purpose)
            return cls(
                machine,
                machine.schema_id if schema_id is None else schema_id,
                reader_id=reader_id,
                since=registered.since,
                seqno=registered.seqno,
                lease_ms=lease_ms,
            )
        except (KeyboardInterrupt, SystemExit):
            _let_go(machine, reader_id)
            raise

    def __init__(
        self,
        machine: Machine,
        schema_id: int,
        *,
        reader_id: LeasedReaderId,
        since: Antichain,
        seqno: SeqNo,
        lease_ms: int,
    ) -> None:
        self._machine = machine
        self._schema_id = schema_id
        self._schema = Schema.from_pair(machine.state.schemas[schema_id])
        self.reader_id = reader_id
        self._lock = threading.Lock()
        self._downgrading = threading.Lock()
        self._listeners: weakref.WeakSet[Listen] = weakref.WeakSet()
        self._since = since
        self._hold = seqno
        self._pins = Pins()
        self._leases = PartLeases(reader_id)
        self._lease_ms = lease_ms
        self._downgraded_s = machine.env.monotonic_s()  # monotonic, because the wall clock may be set back
        self._expired = False
        self._pid = os.getpid()
        self.audited = sampled(machine.env, machine.settings.read.stats_audit_percent)
        """Decides, for every part that a read may skip by its statistics, whether to fetch it anyway."""
        self._heartbeat = Heartbeat(
            self._beat,
            give_up=partial(machine.expire_leased_reader, reader_id),
            interval_s=lease_ms / 2000,
            env=machine.env,
            what=f"reader {reader_id}",
            shard=machine.shard_id,
            metrics=machine.metrics,
        )

    @property
    def shard_id(self) -> ShardId:
        """The id of the shard."""
        return self._machine.shard_id

    @property
    def schema(self) -> Schema:
        """The key and value schema of the rows."""
        return self._schema

    @property
    def blob(self) -> Blob:
        """The blob store, which reading a split needs."""
        return self._machine.blob

    @property
    def since(self) -> Antichain:
        """The earliest time that this handle may still read; empty once the lease was lost."""
        with self._lock:
            return Antichain.empty() if self._heartbeat.is_lost else self._since

    def snapshot(
        self,
        as_of: TimeLike,
        *,
        where: Where | None = None,
        columns: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot | SinceAhead:
        """The contents at `as_of`: every update at or before that time, consolidated at that time.

        `where` keeps the rows that pass: a predicate of rows.predicate, its text in SQL (rows.predicate_text), or a list of (column,
        operator, value). Parts that have no such rows according to their statistics are not fetched. `columns` are the fields of key and
        val to show; distinct rows may then look alike. Raises InvalidUsage, which lists the columns, when one is unknown.

        Waits until the shard's upper is past `as_of`. Raises Unavailable when that takes longer than `timeout_s` (None: for ever). Returns
        SinceAhead when `as_of` can no longer be read. The snapshot protects its blobs from collection until it is closed.
        """
        time = self._time(as_of)
        expect_seconds(timeout_s, "timeout_s")
        bound = self._filter(where)
        projection = None if columns is None else Projection.of(columns, self._schema)
        found = self._batches_at(time, since=time, timeout_s=timeout_s)
        if isinstance(found, SinceAhead):
            return found
        pin, batches = found
        return Snapshot(
            source=source_of(self, "snapshot"),
            batches=batches,
            as_of=time,
            pin=pin,
            leases=self._leases,
            where=bound,
            projection=projection,
            audited=self.audited,
        )

    def changes(
        self,
        since: TimeLike | None,
        upto: TimeLike,
        *,
        shape: Shape = "updates",
        where: Where | None = None,
        columns: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> Changes | SinceAhead:
        """The changes after `since`, at or before `upto`: updates consolidated at their own times. With `shape` "rows", each change says
        what happened to its row. `where` and `columns` are as in `snapshot`.

        The contents at `since` plus the updates are the contents at `upto`. With `since` None, the changes start at this handle's since,
        the earliest readable time: first the contents at that time, then the changes after it. Their sum is the contents at `upto`. Waits
        as `snapshot` does. Returns SinceAhead when the times right after `since` are no longer distinguishable from it, or when `upto` is
        before this handle's since. Raises InvalidBounds when `upto` is before `since`.
        """
        last = self._time(upto, "upto")
        expect_seconds(timeout_s, "timeout_s")
        after = -1 if since is None else self._time(since, "since")
        if last < after:
            raise InvalidBounds(f"changes up to {last} were requested after {after}", lower=after, upper=last)
        own = self.since.time
        earliest = 0 if since is not None or own is None else own  # the fetch below raises for a lost lease
        if last < earliest:
            return SinceAhead(since=Antichain.of(earliest), as_of=last)
        bound = self._filter(where)
        projection = None if columns is None else Projection.of(columns, self._schema)
        found = self._batches_at(last, since=max(after, earliest), timeout_s=timeout_s)
        if isinstance(found, SinceAhead):
            return found
        pin, batches = found
        return Changes(
            source=source_of(self, "changes"),
            batches=batches,
            after=after,
            upto=last,
            since=earliest,
            shape=shape,
            pin=pin,
            where=bound,
            projection=projection,
            audited=self.audited,
        )

    def whole(self) -> tuple[Snapshot, Antichain]:
        """Every update before the upper of the newest known version, as of this handle's since, and that upper. Makes no round trip and
        does not wait. Unlike `snapshot`, it also works when the upper is not past since, so that no time can be read.
        """
        self.check_open()
        since = self.since
        pin = self.pin()
        trace = self._machine.state.trace
        as_of = DATA_TIME_MAX if since.time is None else min(since.time, DATA_TIME_MAX)
        batches = tuple(trace.batches())
        snapshot = Snapshot(
            source=source_of(self, "listen"), batches=batches, as_of=as_of, pin=pin, leases=self._leases
        )
        return snapshot, trace.upper

    def listen(self, as_of: TimeLike, *, where: Where | None = None) -> Listen | SinceAhead:
        """Everything after `as_of` that passes `where` (see `snapshot`), as it is appended. Returns an iterator of Updates and Progress
        that ends only when the shard is closed.

        Moves this handle's since to `as_of`, and further as the iterator is consumed. Among several listeners the slowest decides. The
        shard's since follows where neither its retention nor another reader holds it; earlier times are then no longer readable.
        """
        time = self._time(as_of)
        bound = self._filter(where)
        listen = Listen(self, self._machine, source_of(self, "listen"), as_of=time, leases=self._leases, where=bound)
        with self._lock:
            if not self._since.less_equal(time):
                return SinceAhead(since=self._since, as_of=time)
            self._listeners.add(listen)
        self.downgrade_since(Antichain.of(time))
        return listen

    def subscribe(
        self, as_of: TimeLike, *, where: Where | None = None, timeout_s: float | None = None
    ) -> Iterator[Updates | Progress] | SinceAhead:
        """Yields the contents at `as_of`, then Progress to the time after it, then everything after `as_of`, without gap or overlap. Yields
        only rows that pass `where` (see `snapshot`). Moves since as `listen` does.
        """
        snapshot = self.snapshot(as_of, where=where, timeout_s=timeout_s)
        if isinstance(snapshot, SinceAhead):
            return snapshot
        listen = self.listen(as_of, where=where)
        if isinstance(listen, SinceAhead):
            snapshot.close()
            return listen
        return _snapshot_then(snapshot, listen)

    def fetch(self, part: LeasedPart) -> pa.Table:
        """Fetches the rows of a part that a snapshot or a listener of any reader leased. See `LeasedPart.fetch`, which needs no reader."""
        expect(part, LeasedPart, "part", "a LeasedPart")
        return pa.concat_tables(
            [
                self._schema.updates_schema.empty_table(),
                *part.fetch(self.blob, retry=self._machine.retry, metrics=self._machine.metrics),
            ]
        )

    def return_part(self, part: LeasedPart) -> bool:
        """Returns a part that any process consumed, so that its blobs need not be kept for it. Returns False when it was returned before.
        Raises InvalidUsage for a part of another reader.
        """
        return self._leases.give_back(expect(part, LeasedPart, "part", "a LeasedPart"))

    @property
    def leased_parts(self) -> int:
        """The number of parts that were leased and not yet returned."""
        return self._leases.count

    def downgrade_since(self, since: TimeLike) -> Antichain:
        """Releases the times before `since` (one commit). Returns the handle's since afterwards, which never goes back. Idempotent. Does
        not go past what open listeners of this handle still need, as long as they are referenced.

        Blobs that only older versions name are released too, except those of open snapshots. The times are released even when the call
        fails: after Unavailable the commit may have happened, and times before `since` are no longer guaranteed.
        """
        self.check_open()
        since = frontier_of(since, "since")
        with self._lock:  # a listener takes this lock when it begins
            since = reduce(Antichain.meet, (listener.needs for listener in self._listeners), since)
            self._since = self._since.join(since)
        held = self._downgrade(since)
        self.check_open()
        with self._lock:
            self._since = self._since.join(held)
            self._downgraded_s = self._machine.env.monotonic_s()
            return self._since

    def maybe_downgrade_since(self, since: TimeLike) -> None:
        """Like `downgrade_since`, but at most once in a quarter of the lease. This is for callers that progress with every append."""
        since = frontier_of(since, "since")
        with self._lock:
            due = (self._machine.env.monotonic_s() - self._downgraded_s) * 1000 >= self._lease_ms // 4
        if due and not self._expired:
            self.downgrade_since(since)

    def expire(self) -> None:
        """Releases the lease (one commit). Open snapshots and listeners lose their blobs. In a forked child, which does not own the lease,
        it makes no commit. Idempotent.
        """
        with self._lock:
            if self._expired:
                return
            self._expired = True
        self._machine.metrics.count("lease_dropped_parts", self._leases.count)
        if self._pid != os.getpid():  # in a forked child, the lease belongs to the parent
            return
        self._heartbeat.stop()
        self._machine.expire_leased_reader(self.reader_id)

    def abandon(self) -> None:
        """Stops renewing the lease without releasing it, so that it lapses later. This is for a process that passes its reads to other
        processes and then ends. Idempotent.
        """
        self._heartbeat.stop()

    def check_open(self) -> None:
        """Raises InvalidUsage when this handle was expired. Raises Fenced when, as far as this process knows, its lease lapsed or another
        process ended its hold: its `since` is then empty, although the shard's is not.
        """
        if self._expired:
            raise InvalidUsage(f"reader {self.reader_id} of shard {self._machine.shard_id} was expired by its owner")
        if self._heartbeat.is_lost or self._is_gone():
            self._machine.metrics.count("lease_timeout_read")
            raise Fenced(
                f"the lease of reader {self.reader_id} on shard {self._machine.shard_id} ran out, or its hold was ended: open a new reader"
            )

    def _is_gone(self) -> bool:
        """Whether the newest known state lacks the reader. False for a closed shard: it has no readers, and its own since is empty."""
        state = self._machine.state
        return self.reader_id not in state.leased_readers and not state.trace.since.is_empty()

    def pin(self) -> Pin:
        """Holds the blobs of the current version."""
        return self._pins.hold_current(lambda: self._machine.state.seqno, holder=self)

    def pin_when(self, is_due: Callable[[Trace], bool], *, timeout_s: float | None) -> Pin | None:
        """Waits until `is_due` is true of the newest known version, then holds the blobs of the current one. Returns None when `timeout_s`
        passed first. Once the condition is true of a version, it must be true of all later versions.

        SUBTLE: nothing is held during the wait, which may be endless, so heartbeats release one version after the other (spec 20.9). The
        caller must therefore not read the version that the wait saw, because it may be released before the pin. It must check again under
        the pin. It then finds the held version or a later one, because a process's knowledge never goes back. No heartbeat releases these
        versions before the pin is released (see `Pins.hold_current`).
        """
        machine = self._machine

        def look() -> bool | None:
            return is_due(machine.state.trace) or None

        if not look() and not machine.wait(look, timeout_s):
            return None
        return self.pin()

    def __repr__(self) -> str:
        return f"ReadHandle({self.reader_id} of {self._machine.shard_id}, since {self.since})"

    def _beat(self) -> bool:
        """Renews the lease and releases the versions that none of this handle's snapshots or listeners needs. A handle that stays open but
        reads nothing must not hold back collection for ever (spec 20, bug 9).
        """
        with self._lock:
            since = self._since
        held = self._downgrade(since, is_heartbeat=True)
        # A reader that released all times may still be reading. For it, the answer is empty whether it exists or not, so do not rely on it.
        return since.is_empty() or not held.is_empty()

    def _downgrade(self, since: Antichain, *, is_heartbeat: bool = False) -> Antichain:
        """Renews the lease and releases times before `since` and versions that this handle does not pin. Returns the reader's since. Calls
        take turns: the second attempt of one call must not request versions that another call released meanwhile.
        """
        with self._downgrading:
            # Snapshots pin the cached version or a later one, so one that begins during this commit is safe.
            outstanding = self._pins.oldest(self._machine.state.seqno)
            answer, _ = self._machine.downgrade_since(
                self.reader_id, outstanding_seqno=outstanding, new_since=since, is_heartbeat=is_heartbeat
            )
        return answer.since

    def _batches_at(
        self, time: int, *, since: int, timeout_s: float | None
    ) -> tuple[Pin, tuple[HollowBatch, ...]] | SinceAhead:
        """The batches, and their pin, that hold all updates at or before `time`. Returns SinceAhead unless times from `since` on are
        readable.
        """
        own, at = self.since, Antichain.of(time)
        if not own.less_equal(since):
            return SinceAhead(since=own, as_of=since)
        is_long = once_after(WAIT_LOG_S, self._machine.env)

        def is_due(trace: Trace) -> bool:
            if at < trace.upper or not trace.since <= at:
                return True
            if is_long():
                text, shard_id = "read of shard %s at %s waits: the upper is still %s", self._machine.shard_id
                _log.info(text, shard_id, at, trace.upper, extra={"shard": shard_id})
            return False

        pin = self.pin_when(is_due, timeout_s=timeout_s)
        if pin is None:
            upper = self._machine.state.trace.upper
            raise Unavailable(
                f"shard {self._machine.shard_id} is not written at {time}: upper is still {upper} after {timeout_s} s",
                as_of=time,
                upper=upper,
            )
        answer = self._machine.snapshot_batches(at, timeout_s=0)
        shard_since = self._machine.state.trace.since
        if isinstance(answer, tuple) and shard_since.less_equal(since):
            return pin, answer
        pin.release()
        return SinceAhead(since=shard_since, as_of=since)

    def _filter(self, where: Where | None) -> Filter | None:
        if where is None:
            return None
        if isinstance(where, str):
            return filter_of(where, self._schema)
        return Filter(predicate_of(where), self._schema)  # made by code, which names key or val in each column

    def _time(self, given: TimeLike, name: str = "as_of") -> int:
        self.check_open()
        time = time_of(given, name)
        if not 0 <= time <= DATA_TIME_MAX:
            raise InvalidUsage(f"{name} must be a time in [0, {DATA_TIME_MAX}], not {given}")
        return time


def source_of(reader: ReadHandle, path: str) -> PartSource:
    """The source from which `reader` reads parts, for the purpose `path`. A missing blob raises Fenced if the lease ended. The source does
    not keep the handle alive.
    """
    machine = reader._machine
    return PartSource(
        machine.shard_id,
        machine.blob,
        reader._schema,
        machine.retry,
        machine.metrics,
        reader._schema_id,
        path,
        on_missing=partial(_check_held, machine, reader.reader_id),
    )


def _check_held(machine: Machine, reader_id: LeasedReaderId) -> None:
    """Raises Fenced when the newest state lacks the reader: collections may then have deleted what it reads, and no data is lost. It does
    not refer to the handle, because a snapshot must not keep one alive.
    """
    state = machine.refresh()
    if reader_id not in state.leased_readers and not state.trace.since.is_empty():
        raise Fenced(
            f"the lease of reader {reader_id} on shard {machine.shard_id} ran out, or its hold was ended: open a new reader"
        )


def _snapshot_then(snapshot: Snapshot, listen: Listen) -> Iterator[Updates | Progress]:
    with closing(listen):
        with snapshot:
            for batch in snapshot.to_batches():
                yield Updates(pa.Table.from_batches([batch]))
        after = Antichain.of(snapshot.as_of + 1)
        yield Progress(after)
        yield from (event for event in listen if isinstance(event, Updates) or after < event.frontier)


def _let_go(machine: Machine, reader_id: LeasedReaderId) -> None:
    """Expires a reader whose registration was interrupted, and may have happened. Waits at most LET_GO_S for that."""

    def expire() -> None:
        with suppress(PersistError):
            machine.refresh()  # the known state lacks the reader, so expiring it would change nothing
            machine.expire_leased_reader(reader_id)

    thread = threading.Thread(target=expire, name="let-go", daemon=True)
    thread.start()
    thread.join(LET_GO_S)
