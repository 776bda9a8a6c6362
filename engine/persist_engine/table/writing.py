"""The writes of one table: turns a frame into updates, chooses their time, and tries again when another writer was faster.

Appends stage their rows once and move them to a later time after a lost race. Every other write is a correction: it reads the newest
contents, stages what must change, and commits if nothing was written since. Otherwise it follows what was written (corrections.py). This
module knows no names, and no forms of frames beyond tables_of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import AmbiguousAppend, Conflict, InvalidUsage, InvariantViolated, SchemaMismatch
from persist_engine.base.wording import dated
from persist_engine.client.client import PersistClient
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.snapshot import SinceAhead, Snapshot
from persist_engine.client.write.batch import Batch
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import Upserted, UpsertHandle
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.queries import clock_time, written_upper
from persist_engine.rows.updates import consolidate
from persist_engine.table.columns import Coerce, Columns
from persist_engine.table.corrections import Correction, LeftRows, Plan, correction, corrections, retracted
from persist_engine.table.filters import Condition
from persist_engine.table.frames import Frame, evolved, fitted, held, streamed, table_of, tables_of
from persist_engine.table.keys import KeySet, one_per_key
from persist_engine.table.notes.commit_info import Notes
from persist_engine.table.notes.transactions import Ticket, Txn, ticket_of
from persist_engine.table.readers import PURPOSE, Shared, SharedReader, can_let_since_go
from persist_engine.table.times import when

#: The limit on attempts. A writer that loses this many races in a row would lose further ones: there are too many writers for corrections.
ATTEMPTS_MAX = 200
#: The first upserts, this many, read the rows that they replace. Later ones read the value of every key once and keep all in memory, until
#: the table is idle.
READ_UPSERTS = 1
#: The first overwrites, this many, read the contents that they replace. Later ones keep the rows that they leave, until the table is idle.
READ_OVERWRITES = 1
#: With more updates than this, the values of all keys would take too much memory, about 100 bytes each.
STATE_UPDATES_MAX = 3_000_000
#: A frame up to this size is compared with the contents in memory. A larger frame, or a stream, is staged in the store first.
COMPARED_BYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Written:
    """What a write did. `time` is when the rows changed; None when nothing had to be written. `is_repeat` means that the transaction was
    committed before, and nothing was done now. Prints its time with the date.

    >>> orders.delete("id = 1")  # doctest: +ELLIPSIS
    Written(at ... (...Z), inserted=0, deleted=1)
    """

    time: int | None
    inserted: int = 0
    deleted: int = 0
    is_repeat: bool = False

    def __repr__(self) -> str:
        if self.is_repeat:
            return "Written(nothing, the transaction was committed before)"
        at = "nothing" if self.time is None else f"at {dated(self.time)}"
        return f"Written({at}, inserted={self.inserted}, deleted={self.deleted})"


class _Basis(NamedTuple):
    """The basis of one attempt of a correction: the contents before `upper`, and the time to write at."""

    writer: WriteHandle
    reader: ReadHandle
    upper: Antichain
    time: int
    columns: Columns


class TableWriter:
    """Writes to one shard. Thread-safe: corrections take turns, and so do the commits of appends."""

    def __init__(
        self,
        client: PersistClient,
        shard_id: ShardId,
        reader: SharedReader,
        on_maintenance: Callable[[WriteHandle, Maintenance], None],
    ) -> None:
        self._client, self._shard_id, self._reader = client, shard_id, reader
        self._machine = client.machine(shard_id)
        self._on_maintenance = on_maintenance
        self._env = client.versions.env
        self._turn = threading.RLock()
        self._opening = threading.Lock()
        self._writer: WriteHandle | None = None
        self._upsert = Shared(
            self._open_upsert, lambda handle: handle.schema_id != self._machine.schema_id, self._machine
        )
        self._left = Shared(lambda: LeftRows(shard_id), lambda _: False, self._machine)
        self._upserts, self._overwrites, self._has_several = 0, 0, False

    def append(self, frame: Frame, *, notes: Notes, coerce: Coerce | None = None) -> Written:
        """Adds the rows of a frame."""
        ticket = self._ticket(notes.txn)
        if ticket is not None and ticket.is_repeat:
            return Written(None, is_repeat=True)
        writer, columns, tables = fitted(frame, self._current(), self._newer, coerce)
        lower = writer.shared_upper()
        time, rows = self._time_at(lower), 0
        with writer.builder(lower) as builder:
            for table in tables:
                structs = columns.structs(table)
                rows += structs.num_rows
                if structs.num_rows:
                    builder.add(columns.updates(structs, time=time))
            batch = builder.finish(Antichain.of(time + 1))
        if not rows and ticket is None:
            writer.discard(batch)
            return Written(None)
        with self._turn, _discarded_when_refused(lambda: writer.discard(batch)):
            return self._landed(writer, batch, Written(time, inserted=rows), ticket, notes.info)

    def upsert(self, frame: Frame, *, order_by: str | None, notes: Notes, coerce: Coerce | None = None) -> Written:
        """Makes each row of a frame the only row of its key."""
        self._machine.fetch_recent_upper()  # this also fetches the newest schema, which a correction needs
        columns = self._current()[1]
        table = table_of(frame, columns.arrow) if streamed(frame) is None else held(frame, columns.arrow)
        order = None
        if order_by is not None:
            if order_by not in table.column_names and table.num_rows:
                raise InvalidUsage(
                    f"order_by: there is no column {order_by}; the rows have {', '.join(table.column_names)}"
                )
            order = table.column(order_by) if table.num_rows else None
        structs = columns.structs(columns.fitted(table, besides=() if order_by is None else (order_by,), coerce=coerce))
        rows = one_per_key(structs, order, order_by=order_by)
        if not rows.num_rows:
            return self._corrected(
                Plan(lambda *_: (), lambda batch, _: pa.Table.from_batches([batch.slice(0, 0)])),
                notes=notes,
                columns=columns,
            )
        with self._turn:
            done = self._upserted(rows, columns, notes)
            return self._replaced(rows, columns, notes) if done is None else done

    def delete(self, condition: Condition, *, notes: Notes) -> Written:
        """Removes the rows that fulfil a condition."""

        def touched(batch: pa.RecordBatch, at: Columns) -> pa.Table:
            rows = pa.Table.from_batches([batch])
            if condition.expression is None:
                return rows
            return rows.filter(condition.mask(pa.Table.from_batches([at.side_by_side(batch)])))

        def updates(snapshot: Snapshot, at: Columns, time: int) -> Iterator[pa.Table]:
            for batch in snapshot.to_batches():
                yield retracted(touched(batch, at), time)

        return self._corrected(Plan(updates, touched, condition.predicate), notes=notes)

    def overwrite(self, frame: Frame, *, notes: Notes, expected: int | None, coerce: Coerce | None = None) -> Written:
        """Makes the rows of a frame the contents, by writing the difference."""
        if (ticket := self._ticket(notes.txn)) is not None and ticket.is_repeat:
            return Written(None, is_repeat=True)
        self._machine.fetch_recent_upper()  # as in `upsert`
        writer, columns = self._current()
        stream = streamed(frame)
        frame = table_of(frame, columns.arrow) if stream is None else stream
        if stream is None and frame.nbytes <= COMPARED_BYTES_MAX:
            return self._overwritten(columns.structs(columns.fitted(frame, coerce=coerce)), columns, notes, expected)
        lower = writer.shared_upper()
        staged_at, is_given = self._time_at(lower), False
        with writer.builder(lower) as builder:
            for table in tables_of(frame, columns.arrow):
                is_given = True
                structs = columns.structs(columns.fitted(table, coerce=coerce))
                if structs.num_rows:
                    builder.add(columns.updates(structs, time=staged_at))
            if not is_given:
                raise InvalidUsage(
                    f"the {type(frame).__name__} gave no table, so overwrite would remove all rows: it may have been read before; "
                    "to remove all rows, pass an empty table"
                )
            desired = builder.finish(Antichain.of(staged_at + 1))

        def updates(snapshot: Snapshot, _at: Columns, time: int) -> Iterator[pa.Table]:
            return snapshot.corrections([desired.hollow], time=time)

        try:
            return self._corrected(Plan(updates), notes=notes, expected=expected, columns=columns, not_before=staged_at)
        finally:
            writer.discard(desired)

    def let_since_go(self, *, is_ours: bool) -> None:
        """Makes since follow the retention, as far as other readers allow. Since moves with an append, so this appends no rows. If SQL or
        Python created the table (`is_ours`) and it has no retention, moves since to the last write, because nothing else would.
        """
        state = self._machine.refresh()
        if not can_let_since_go(state, is_ours=is_ours):
            return
        upper = state.trace.upper
        if state.retain_ms is not None:
            assert upper.time is not None, "a closed table has no since to move"
            self._raise_upper(self._current()[0], upper, upper.time)
        else:
            with self._client.open_leased_reader(self._shard_id, purpose=PURPOSE) as reader:
                reader.downgrade_since(Antichain.of(upper.newest_complete))

    def let_go(self) -> None:
        """Expires handles that hold times or versions, unless they are in use."""
        self._upsert.let_go()

    def close(self) -> None:
        """Expires its handles. Writes under way fail. Idempotent."""
        self._upsert.close()
        self._left.close()
        with self._opening:
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.expire()

    def _overwritten(self, rows: pa.Table, columns: Columns, notes: Notes, expected: int | None) -> Written:
        """Overwrites with rows in memory."""
        desired = consolidate(columns.updates(rows, time=0))
        self._overwrites += 1
        if self._overwrites <= READ_OVERWRITES:
            return self._made(desired, columns, notes, expected, None)
        with self._left.lent() as left:
            return self._made(desired, columns, notes, expected, left)

    def _made(
        self, desired: pa.Table, columns: Columns, notes: Notes, expected: int | None, left: LeftRows | None
    ) -> Written:
        """Makes `desired` the contents. Reads the old contents, unless `left` has them."""

        def updates(snapshot: Snapshot, _at: Columns, time: int) -> Iterable[pa.Table]:
            known = None if left is None else left.at(snapshot.as_of, desired.schema)
            if known is not None:
                return [correction(known, desired, time=time)]
            if snapshot.bytes_estimate > COMPARED_BYTES_MAX // 4:  # because Parquet is smaller than rows in memory
                return corrections(snapshot, desired, time=time)
            return [correction(snapshot.to_table(), desired, time=time)]

        written = self._corrected(Plan(updates), notes=notes, expected=expected, columns=columns)
        if left is not None and written.time is not None:
            left.keep(written.time, desired)
        return written

    # -- upserts ------------------------------------------------------------------------------------------------------

    def _upserted(self, rows: pa.Table, columns: Columns, notes: Notes) -> Written | None:
        """Upserts through a handle that has the value of every key, so that nothing is read. Returns None, and does nothing, when that
        would cost more than it saves, or when some key has several rows, which such a handle cannot hold.
        """
        updates = self._machine.state.trace.sizes.rows
        self._upserts += 1
        if self._upserts <= READ_UPSERTS or self._has_several or updates > STATE_UPDATES_MAX:
            return None
        try:
            with self._upsert.lent() as handle:
                while True:
                    ticket = self._ticket(notes.txn)
                    if ticket is not None and ticket.is_repeat:
                        return Written(None, is_repeat=True)
                    if columns.schema != self._machine.schema:
                        return None
                    done = handle.upsert(
                        rows,
                        progress=None if ticket is None else ticket.progress,
                        expected_progress=None if ticket is None else ticket.expected,
                        commit_info=notes.info,
                    )
                    if isinstance(done, Upserted):
                        self._on_maintenance(self._current()[0], done.maintenance)
                        time = done.upper.newest_complete if done.inserted or done.retracted else None
                        return Written(time, done.inserted, done.retracted)
        except AmbiguousAppend:
            raise
        except InvariantViolated:
            self._has_several = True
            self._upsert.close()
            return None
        except SchemaMismatch:
            return None  # The schema evolved meanwhile, and nothing was written. `_replaced` raises the error.

    def _replaced(self, rows: pa.Table, columns: Columns, notes: Notes) -> Written:
        """Upserts by reading the rows with the same keys."""
        keys = KeySet(rows, columns.schema, np.frombuffer(self._env.random_bytes(32), np.uint64))

        def updates(snapshot: Snapshot, at: Columns, time: int) -> Iterator[pa.Table]:
            found = [keys.candidates(pa.Table.from_batches([batch])) for batch in snapshot.to_batches()]
            old = keys.among(pa.concat_tables([at.schema.updates_schema.empty_table(), *found]))
            yield consolidate(pa.concat_tables([retracted(old, time), at.updates(rows, time=time)]))

        def touched(batch: pa.RecordBatch, _at: Columns) -> pa.Table:
            return keys.among(keys.candidates(pa.Table.from_batches([batch])))

        return self._corrected(Plan(updates, touched, keys.predicate), notes=notes, columns=columns)

    # -- committing ---------------------------------------------------------------------------------------------------

    def _landed(
        self, writer: WriteHandle, batch: Batch, written: Written, ticket: Ticket | None, info: bytes | None
    ) -> Written:
        """Commits the batch of an append, at a later time if other writers come first."""
        upper, time = writer.shared_upper(), written.time
        assert time is not None
        for _ in range(ATTEMPTS_MAX):
            if not upper.less_equal(time):
                time = self._time_at(upper)
                batch.rewrite_times(Antichain.of(time), Antichain.of(time + 1))
            outcome = _committed(writer, [batch], upper, time, ticket=ticket, info=info)
            match outcome:
                case Appended(maintenance=maintenance):
                    self._on_maintenance(writer, maintenance)
                    return Written(time if written.inserted else None, inserted=written.inserted)
                case UpperMismatch(current=current):
                    upper = current
                case ProgressMismatch():
                    assert ticket is not None
                    ticket = self._ticket(ticket.txn)
                    if ticket is None or ticket.is_repeat:
                        writer.discard(batch)
                        return Written(None, is_repeat=True)
        writer.discard(batch)
        raise _lost()

    def _corrected(
        self,
        plan: Plan,
        *,
        notes: Notes,
        columns: Columns | None = None,
        expected: int | None = None,
        not_before: int = 0,
    ) -> Written:
        """Commits the correction of the newest contents by `plan`. Raises SchemaMismatch when the schema is no longer that of `columns`,
        to which the caller's rows were fitted.
        """
        with self._turn:
            for _ in range(ATTEMPTS_MAX):
                ticket = self._ticket(notes.txn)
                if ticket is not None and ticket.is_repeat:
                    return Written(None, is_repeat=True)
                writer, now = self._current()
                if columns is not None and columns.schema != now.schema:
                    raise evolved()
                upper = writer.fetch_recent_upper()
                current = written_upper(self._machine.state).newest_complete
                if expected is not None and current != expected:
                    said = f"the table was last written {when(current)}, and not {when(expected)}"
                    raise Conflict(
                        f"{said}; nothing was written now: read it again", expected=expected, current=current
                    )
                with self._reader.lent() as reader:
                    if reader.schema != now.schema:
                        continue
                    basis = _Basis(writer, reader, upper, max(not_before, self._time_at(upper)), now)
                    written = self._correct(basis, plan, ticket, notes.info, follows=expected is None)
                if written is not None:
                    return written
        raise _lost()

    def _correct(
        self, basis: _Basis, plan: Plan, ticket: Ticket | None, info: bytes | None, *, follows: bool
    ) -> Written | None:
        """Stages one correction and commits it. With `follows`, it follows the other writers after a lost race. Returns None when it must
        begin anew, because the contents had to be made readable first, or because it cannot follow.
        """
        writer, reader, upper, time, columns = basis
        if upper.time == 0:
            self._raise_upper(writer, upper, 1)
            return None
        snapshot = reader.snapshot(upper.newest_complete, where=plan.where)
        if isinstance(snapshot, SinceAhead):
            # SUBTLE: since may be at or past upper, where no time is readable. An append without rows moves upper past it.
            since = snapshot.since.time
            if since is None or upper.less_equal(since) is False:
                raise InvalidUsage("the contents can no longer be read, so they cannot be corrected")
            self._raise_upper(writer, upper, since + 1)
            return None
        with snapshot:
            correction = Correction(writer, upper=upper, time=time, plan=plan.updates(snapshot, columns, time))
        for _ in range(ATTEMPTS_MAX):
            if not any(correction.sums) and ticket is None:
                correction.discard()
                return Written(None)
            if writer.schema_id != self._machine.schema_id:
                break  # Under an older schema a retraction may match no row: see `check_newest_schema`.
            with _discarded_when_refused(correction.discard):
                outcome = _committed(
                    writer, correction.batches, correction.upper, correction.time, ticket=ticket, info=info
                )
            match outcome:
                case Appended(maintenance=maintenance):
                    self._on_maintenance(writer, maintenance)
                    inserted, deleted = correction.sums
                    return Written(correction.time if inserted or deleted else None, inserted, deleted)
                case UpperMismatch(current=current) if follows and self._machine.schema == reader.schema:
                    with _discarded_when_refused(correction.discard):
                        later = max(correction.time, self._time_at(current))
                        if correction.follow(
                            reader,
                            current,
                            later,
                            where=plan.where,
                            touched=lambda rows: plan.touched(rows, columns),
                        ):
                            continue
            break
        correction.discard()
        return None

    def _newer(self, columns: Columns) -> tuple[WriteHandle, Columns] | None:
        """Like `_current`, if another process has made a newer schema than that of `columns`; otherwise None."""
        self._machine.refresh()
        return None if self._machine.schema == columns.schema else self._current()

    def _raise_upper(self, writer: WriteHandle, upper: Antichain, to: int) -> None:
        """Completes the times before `to`, unless another writer has moved the upper."""
        outcome = writer.compare_and_append([], expected_upper=upper, new_upper=Antichain.of(to))
        if isinstance(outcome, Appended):
            self._on_maintenance(writer, outcome.maintenance)

    def _open_upsert(self) -> UpsertHandle:
        return open_upsert(self._client, self._shard_id, self._machine.schema, purpose=PURPOSE)

    def _current(self) -> tuple[WriteHandle, Columns]:
        """A writer with the newest schema that this process knows."""
        with self._opening:
            writer = self._writer
            if writer is None or writer.schema_id != self._machine.schema_id:
                if writer is not None:
                    writer.expire()
                writer = self._writer = self._client.open_writer(self._shard_id, self._machine.schema, purpose=PURPOSE)
            return writer, Columns(writer.schema)

    def _time_at(self, upper: Antichain) -> int:
        """The time to write at: the time that the clock of the table shows, but past every time that was written."""
        if upper.time is None:
            raise InvalidUsage("the table is closed and takes no more rows")
        time = max(clock_time(self._machine.state, self._env.now_ms()), upper.time)
        if time >= DATA_TIME_MAX:
            raise InvalidUsage(f"the upper {upper.time} of the table leaves no time to write at")
        return time

    def _ticket(self, txn: Txn | None) -> Ticket | None:
        return None if txn is None else ticket_of(txn, lambda name: self._client.progress(self._shard_id, name))


def _committed(
    writer: WriteHandle,
    batches: Sequence[Batch],
    upper: Antichain,
    time: int,
    *,
    ticket: Ticket | None,
    info: bytes | None,
) -> AppendOutcome:
    """Makes one attempt to append the batches, which have the time `time`, with the number of the transaction and the metadata."""
    return writer.compare_and_append_batch(
        batches,
        expected_upper=upper,
        new_upper=Antichain.of(time + 1),
        progress=None if ticket is None else ticket.progress,
        expected_progress=None if ticket is None else ticket.expected,
        commit_info=info,
    )


@contextmanager
def _discarded_when_refused(discard: Callable[[], None]) -> Iterator[None]:
    """Calls `discard` after InvalidUsage, when nothing was committed. After other errors the outcome may be unknown, so the blobs must
    stay.
    """
    try:
        yield
    except InvalidUsage:
        discard()
        raise


def _lost() -> Conflict:
    return Conflict(
        f"other writers won {ATTEMPTS_MAX} attempts in a row; nothing was written: write less often, or from one process"
    )
