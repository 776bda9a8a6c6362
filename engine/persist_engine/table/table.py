"""Table: one named collection of rows, in the shape that users of deltalake and pyiceberg know.

It is a thin layer over the handles of `client`, which can do the same. It owns no thread, and holds nothing while nothing is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.base.wording import dated
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.ownership import Owner
from persist_engine.model.queries import clock_of, written_upper
from persist_engine.rows.schema import Schema
from persist_engine.shard.schemas import SchemaIncompatible
from persist_engine.table.columns import Coerce, Columns, checked_coerce
from persist_engine.table.frames import Frame
from persist_engine.table.names import Named, of_table
from persist_engine.table.notes.commit_info import CommitInfo, noted
from persist_engine.table.notes.transactions import Txn
from persist_engine.table.pictures.info import TableInfo, clock_in_words
from persist_engine.table.readable import Readable
from persist_engine.table.readers import PURPOSE, SharedReader, can_let_since_go
from persist_engine.table.schemas import Fields, altered
from persist_engine.table.times import NEVER, Span, Time, readable, retained, retained_in_words, time_of_clock

# Code that reads rows, writes, walks the log or repairs is imported at its first use, so that a process loads only what it uses.
if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from persist_engine.client.read.handle import ReadHandle
    from persist_engine.client.write.handle import WriteHandle
    from persist_engine.table.feed import ChangeFeed
    from persist_engine.table.filters import Where
    from persist_engine.table.pictures.listing import Listing
    from persist_engine.table.pictures.timeline import Timeline
    from persist_engine.table.scan import Scan
    from persist_engine.table.writing import TableWriter, Written
    from persist_engine.work.audit.finding import Verification
    from persist_engine.work.outcome import Outcome


class Table(Readable, elsewhere="in another process, connect again and take the table by its name"):
    """A table of a `Database`. Thread-safe. Two objects of one table see the same rows.

    Rows have the columns of the key and of the value side by side. A key may have several rows: `append` adds rows as they come, `upsert`
    leaves one. Every write is one commit at a time of its own, later than all writes before it: the wall clock in milliseconds, or one more
    than the last write (see `Database.create`). InvalidUsage (SchemaMismatch for columns and types) means that nothing was written.

    >>> orders.upsert([{"id": 1, "name": "eva"}]), orders.scan("name LIKE 'e%'").to_pylist()  # doctest: +ELLIPSIS
    (Written(at ..., inserted=1, deleted=1), [{'id': 1, 'name': 'eva'}])
    """

    def __init__(
        self, client: PersistClient, named: Named, on_maintenance: Callable[[ShardId, WriteHandle, Maintenance], None]
    ) -> None:
        self._client, self._named = client, named
        self._machine = client.machine(named.shard_id)
        self._env = client.versions.env
        self._reader = SharedReader(self._open_reader, self._machine)
        self._on_maintenance = on_maintenance
        self._opening = threading.Lock()
        self._opened_writer: TableWriter | None = None

    @property
    def name(self) -> str:
        """The text that leads to the table in its database.

        >>> orders.name
        'orders'
        """
        return self._named.name

    @property
    def id(self) -> ShardId:
        """The id of its shard, which all commands and the handles of `PersistClient` accept.

        >>> db.table(orders.id) is orders
        True
        """
        return self._named.shard_id

    @property
    def owner(self) -> Owner | None:
        """The resource that owns the shard.

        >>> str(orders.owner)
        'sql/default/orders'
        """
        return self._named.owner

    @property
    def schema(self) -> pa.Schema:
        """Its columns, those of the key first.

        >>> orders.schema.names
        ['id', 'name']
        """
        return self._columns.arrow

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the key.

        >>> orders.key
        ('id',)
        """
        return self._columns.key

    @property
    def last_time(self) -> int | None:
        """The time of the last write, for `expected` and `at`; None when nothing was written, or the table is closed. Linearized.

        >>> orders.last_time == orders.scan().time
        True
        """
        return _last_time(written_upper(self._machine.refresh()))

    # -- writing ------------------------------------------------------------------------------------------------------

    def append(
        self,
        rows: Frame,
        *,
        coerce: Coerce | None = None,
        txn: Txn | None = None,
        commit_info: CommitInfo | None = None,
    ) -> Written:
        """Adds rows, also rows that exist already. A stream is staged batch by batch and becomes visible as a whole. Retries lost races.

        Columns are matched by name. Values are converted to the table's types where nothing is lost: numbers that fit, instants of coarser
        units, text of any layout. Nanoseconds, as in pandas' times, are refused, here and in the other writes, unless `coerce` is "us" or,
        to cut digits off, "truncate". In pandas' columns NaN is null. With `txn` the write happens once: see notes/transactions.py.

        `commit_info`, here and in the other writes, is metadata that `history` shows: names with texts or numbers, up to 4 KiB as JSON. A
        call that writes nothing does not store it.

        >>> orders.append([{"id": 3, "name": "eve"}], commit_info={"load": 7}).inserted
        1
        """
        with of_table(self.name):
            return self._writer.append(rows, coerce=checked_coerce(coerce), notes=noted("append", txn, commit_info))

    def upsert(
        self,
        rows: Frame,
        *,
        order_by: str | None = None,
        coerce: Coerce | None = None,
        txn: Txn | None = None,
        commit_info: CommitInfo | None = None,
    ) -> Written:
        """Makes each row the only row of its key. Other keys stay. Rows that exist already cost no update. Lost races are retried.

        If a key has several rows, the row with the greatest value in the column `order_by` wins; null is the least. The column may be one
        of the table or an additional one. Raises InvalidUsage, and writes nothing, when different rows of a key share the greatest value,
        or when there is no `order_by`. All rows are in memory: a stream with more than 1 GiB of them is refused.

        >>> done = orders.upsert([{"id": 2, "name": "lena"}, {"id": 3, "name": "eve"}])
        >>> done.inserted, done.deleted
        (2, 1)
        """
        with of_table(self.name):
            notes = noted("upsert", txn, commit_info)
            return self._writer.upsert(rows, order_by=order_by, coerce=checked_coerce(coerce), notes=notes)

    def delete(self, where: Where, *, txn: Txn | None = None, commit_info: CommitInfo | None = None) -> Written:
        """Removes the rows that fulfil a condition (see filters.py). Lost races are retried. To remove all rows, overwrite with none.

        >>> orders.delete("name LIKE 'a%'").deleted
        1
        """
        from persist_engine.table.filters import Condition

        if where is None:
            raise InvalidUsage(f"table {self.name}: delete needs a condition; to remove all rows, overwrite([])")
        with of_table(self.name):
            self._machine.refresh()  # another process may have added the column
            return self._writer.delete(Condition.of(where, self._columns), notes=noted("delete", txn, commit_info))

    def overwrite(
        self,
        rows: Frame,
        *,
        expected: Time | None = "any",
        coerce: Coerce | None = None,
        txn: Txn | None = None,
        commit_info: CommitInfo | None = None,
    ) -> Written:
        """Makes `rows` the contents. Writes only the difference, so rows that stay cost nothing. Memory is bounded, also for a stream.
        Raises InvalidUsage for an iterator that gives no table, as one that was used up does; an empty table removes all rows.

        `expected` is the time of the contents that the caller saw (`last_time`, `Scan.time`; None if nothing was written). Raises Conflict
        when the table was written since. Without `expected`, the last overwrite wins.

        >>> orders.overwrite([{"id": 1, "name": "ada"}], expected=orders.last_time).deleted
        1
        """
        with of_table(self.name):
            time = None if expected == "any" else NEVER if expected is None else self._moment(expected, "expected")
            notes = noted("overwrite", txn, commit_info)
            return self._writer.overwrite(rows, coerce=checked_coerce(coerce), notes=notes, expected=time)

    # -- reading ------------------------------------------------------------------------------------------------------

    def scan(
        self,
        where: Where | None = None,
        columns: Sequence[str] | None = None,
        *,
        at: Time | None = None,
        limit: int | None = None,
        nested: bool = False,
    ) -> Scan:
        """The rows that fulfil `where`, with these columns, in the order of their keys; only the first `limit` of them, if given. They are
        the rows now, including everything acknowledged before the call, or those `at` a time. With `nested`, every form of the scan has the
        structs `key` and `val` instead of columns side by side.

        >>> orders.scan("id > 1", ["name"]).to_pylist()
        [{'name': 'lin'}]
        """
        from persist_engine.table.filters import Condition
        from persist_engine.table.scan import Scan, checked_limit

        with of_table(self.name):
            upper = written_upper(self._machine.refresh())
            now = self._columns
            time: int | None = upper.newest_complete if upper.newest_complete >= 0 else None
            if at is not None:
                time = readable(self._moment(at, "at"), upper, now_ms=self._now_of(upper), name="at")
            return Scan(
                self.name,
                lambda: self._reader.lent_with(now.schema),
                now,
                time=time,
                condition=Condition.of(where, now),
                shown=now.chosen(columns),
                limit=None if limit is None else checked_limit(self.name, limit),
                nested=nested,
            )

    def to_dataset(self) -> ds.Dataset:
        """The files of the table as a dataset of pyarrow, for engines that plan over files. It has the columns `key`, `val`, `time` and
        `diff`: `dataset.to_table(columns={"id": ds.field("key", "id")})`. Raises InvalidUsage while the files hold more than the newest
        rows; call `optimize()` first. See dataset.py for how long the files stay.

        >>> orders.to_dataset().count_rows()
        2
        """
        from persist_engine.table.dataset import dataset_of

        with of_table(self.name):
            return dataset_of(self._machine)

    def changes(
        self, since: Time, *, upto: Time | None = None, follow: bool = False, where: Where | None = None
    ) -> ChangeFeed:
        """The changes after `since`, up to and including `upto`, or up to now: see ChangeFeed. The text `start` means from the earliest
        readable time on, beginning with its rows. With `follow`, the feed continues with what is written from now on.

        `where` keeps changes of rows that fulfil it: an update that makes a row fail it is a delete. It is no expression of pyarrow.

        >>> [change.kind for change in orders.changes("start", where="id = 1")]
        ['insert']
        """
        from persist_engine.table.feed import ChangeFeed
        from persist_engine.table.filters import Condition

        with of_table(self.name):
            if follow and upto is not None:
                raise InvalidUsage("changes: a feed that follows has no upto")
            upper = written_upper(self._machine.refresh())
            columns = self._columns
            condition = Condition.of(where, columns)
            if condition.expression is not None:
                raise InvalidUsage(
                    "changes: where must be SQL text or tuples; an expression of pyarrow sees one row, not a change"
                )
            now_ms = self._now_of(upper)
            after = None if since == "start" else self._moment(since, "since")
            if after is not None:
                newest = readable(after, upper, now_ms=now_ms, name="since")
                after = after if newest is None else newest  # None: nothing was written, so every write comes after
            last = None if upto is None else readable(self._moment(upto, "upto"), upper, now_ms=now_ms, name="upto")
            if after is not None and last is not None and last < after:
                raise InvalidUsage(f"changes: upto {dated(last)} is before since {dated(after)}")
        return ChangeFeed(
            self.name,
            lambda: self._open_reader(columns.schema),
            self._machine,
            columns,
            since=after,
            upto=last,
            follow=follow,
            where=condition.predicate,
        )

    # -- looking after it ---------------------------------------------------------------------------------------------

    def describe(self) -> TableInfo:
        """The table in numbers and words. Reads no rows.

        >>> orders.describe().updates
        2
        """
        seen = self._client.inspect(self.id)
        columns, state = self._columns, self._machine.state
        newest, clock = _last_time(written_upper(state)), clock_of(state)
        return TableInfo(
            name=self.name,
            id=str(self.id),
            owner=None if self.owner is None else str(self.owner),
            key=columns.schema.key_ddl,
            value=columns.schema.val_ddl,
            clock=clock_in_words(clock, newest),
            retain=retained_in_words(seen.retain_ms, clock),
            bloom=", ".join(name for name, place in columns.places.items() if place in self._machine.filtered),
            since=seen.since,
            last_write=newest,
            updates=seen.updates,
            parts=seen.parts,
            bytes=seen.data_bytes,
            batches=seen.batches,
            version=seen.seqno,
            holds=len(seen.readers),
        )

    def history(self, limit: int | None = None) -> Listing:
        """The versions that changed rows, schema or retention, newest first, as far back as the log goes: see notes/history.py.

        >>> orders.history(1).column("operation").to_pylist()
        ['append']
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidUsage(f"table {self.name}: limit must be a whole number from 1 on, or None, not {limit!r}")
        from persist_engine.table.notes.history import history_of
        from persist_engine.table.pictures.listing import Listing

        return Listing(f"history of {self.name}", history_of(self._machine, limit), times=("time",))

    def timeline(self) -> Timeline:
        """A picture for notebooks: the writes that the log still shows, and which times can be read. `timeline().svg` is its text.

        >>> [write.updates for write in orders.timeline().writes]
        [2]
        """
        from persist_engine.table.notes.history import history_of
        from persist_engine.table.pictures.timeline import Timeline, Write

        with of_table(self.name):
            rows = history_of(self._machine, None).select(["time", "updates"]).to_pylist()
            rows = [row for row in rows if row["time"] is not None and row["updates"]]
            writes = tuple(Write(row["time"], row["updates"]) for row in rows)
            return Timeline(self.name, self._machine.state.trace.since.time or 0, self.last_time, writes)

    def optimize(self, *, on_read: Callable[[int, int], None] | None = None) -> list[Outcome]:
        """Merges small parts until one batch is left, and merges the times that `retain` has passed. Rows stay the same at every readable
        time. Safe beside writers and readers. For a table with `retain=None` that SQL or Python created, this merges all times before the
        last write, except those that readers hold. If there is nothing to merge, it makes one read of the log and changes nothing.
        `on_read` receives the bytes of each part that was read, and the bytes of all parts to read.

        >>> [done.ending.value for done in orders.optimize()]
        ['Succeeded']
        """
        from persist_engine.work.repair.force import force_compaction, plan_compaction

        state, min_version = self._machine.refresh(), self._machine.settings.compaction.claim_min_version
        is_since_due = can_let_since_go(state, is_ours=self._named.is_ours)
        if not is_since_due and not plan_compaction(state, full=True, min_version=min_version):
            return []
        self._let_go()  # an unused reader would keep times distinct that `retain` has passed
        self._writer.let_since_go(is_ours=self._named.is_ours)
        return force_compaction(self._machine, full=True, on_read=on_read)

    def vacuum(self) -> list[Outcome]:
        """Deletes what no reader can reach any more: replaced parts and old versions. Never deletes what a readable time needs.

        >>> any(done.failed for done in orders.vacuum())
        False
        """
        from persist_engine.work.repair.force import force_gc

        self._let_go()  # an unused reader would hold old versions
        return force_gc(self._machine)

    def verify(self) -> Verification:
        """Checks every version, part and row. `is_corrupt` says whether anything is wrong, and `findings` say what.

        >>> orders.verify().is_corrupt
        False
        """
        from persist_engine.work.audit.verify import verify_shard

        return verify_shard(self._machine)

    def holds(self) -> Listing:
        """The readers, the writers and the retention that hold times and old versions, one in each row.

        >>> sorted(set(orders.holds().column("kind").to_pylist()))
        ['retention', 'writer']
        """
        from persist_engine.table.pictures.listing import Listing

        return Listing(f"holds of {self.name}", self._client.metadata(self.id, "holds"), times=("since",))

    def alter(
        self,
        *,
        add: Fields | None = None,
        widen: Mapping[str, str] | None = None,
        retain: Span | None = None,
        bloom: Sequence[str] | None = None,
    ) -> None:
        """Adds columns to the value, which are null in existing rows (`add="note STRING"`). Widens numbers of the value
        (`widen={"amount": "BIGINT"}`). Sets how long times stay readable (`retain="30 days"`, or "none"). Sets the columns for which new
        files have Bloom filters (`bloom=["email"]`, or `[]`); old files get them when a compaction replaces them. Raises SchemaMismatch if
        the schema cannot change like this. All arguments are checked before the first commit, so a refused call changes nothing.

        >>> orders.alter(add="note STRING", retain="30 days")
        >>> orders.schema.names
        ['id', 'name', 'note']
        """
        with of_table(self.name):
            self._machine.refresh()
            known = self._machine.schema
            wanted = altered(known, add=add, widen=widen)
            filtered = None if bloom is None else Columns(wanted).placed(bloom, "bloom")
            kept = None if retain is None else retained(retain, clock_of(self._machine.state))
            answer = None if wanted == known else self._client.evolve_schema(self.id, wanted)
            if isinstance(answer, SchemaIncompatible):
                if answer.current == known:
                    raise SchemaMismatch(answer.meaning)
                self.alter(add=add, widen=widen)  # another process evolved the schema first
            if filtered is not None:
                self._client.set_filtered(self.id, filtered)
            if retain is not None:
                self._client.set_retention(self.id, kept)

    def renamed(self, named: Named) -> None:
        """Records the new name of its shard. The handles stay."""
        self._named = named

    def close(self) -> None:
        """Expires its reader and its writer; calls under way fail. The table may be used again. Idempotent.

        >>> orders.close()
        >>> orders.count()
        2
        """
        self._reader.close()
        if self._opened_writer is not None:
            self._opened_writer.close()

    def __repr__(self) -> str:
        return f"Table({self.name}: key {', '.join(self.key)}; {', '.join(self.schema.names)})"

    def _let_go(self) -> None:
        """Expires handles that hold times or versions, unless they are in use."""
        self._reader.let_go()
        if self._opened_writer is not None:
            self._opened_writer.let_go()

    @property
    def _writer(self) -> TableWriter:
        from persist_engine.table.writing import TableWriter

        with self._opening:
            if self._opened_writer is None:
                shard_id, offer = self.id, self._on_maintenance
                self._opened_writer = TableWriter(
                    self._client, shard_id, self._reader, lambda writer, due: offer(shard_id, writer, due)
                )
            return self._opened_writer

    @property
    def _columns(self) -> Columns:
        return Columns(self._machine.schema)

    def _moment(self, given: Time, name: str) -> int:
        return time_of_clock(given, clock_of(self._machine.state), now_ms=self._env.now_ms(), name=name)

    def _now_of(self, upper: Antichain) -> int:
        """The last time that is not in the future."""
        return self._env.now_ms() if clock_of(self._machine.state) == "ms" else max(0, upper.newest_complete)

    def _open_reader(self, schema: Schema | None = None) -> ReadHandle:
        """Opens a reader with the newest schema, or with a schema that the table had."""
        return self._client.open_leased_reader(self.id, schema, purpose=PURPOSE)


def _last_time(upper: Antichain) -> int | None:
    return None if upper.is_empty() or upper.time == 0 else upper.newest_complete
