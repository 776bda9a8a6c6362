"""Database: the tables of a pair of stores, by name.

Owns the life of names (create, rename, drop) and the maintenance threads. table.py has what a table does; names.py has what names mean.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self, TypeAlias

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage, SchemaMismatch, ShardNotFound, Unavailable
from persist_engine.base.refusal import Bound
from persist_engine.client.arguments import expect_clock
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.ownership import Adopted
from persist_engine.model.queries import clock_of
from persist_engine.model.state import Clock
from persist_engine.rows.schema import Schema
from persist_engine.table.columns import Coerce, Columns, checked_coerce
from persist_engine.table.frames import Frame
from persist_engine.table.names import PYTHON, Hints, Named, left_by_drop, listed, new_owner, of_table, resolved
from persist_engine.table.schemas import Fields, declared, inferred
from persist_engine.table.table import Table
from persist_engine.table.times import DEFAULT, Span, retained

if TYPE_CHECKING:
    from persist_engine.client.write.handle import WriteHandle
    from persist_engine.work.background import BackgroundMaintenance, Upkeep

_log = logging.getLogger(__name__)
#: How long `Database.close` retries a store that is down. Most failures are brief.
LET_GO_S = 5.0
#: Opens a client. Raises NoStore for stores that do not exist, unless the argument says to make them.
OpenClient: TypeAlias = Callable[[bool], PersistClient]


class Database(Bound, elsewhere="in another process, connect again"):
    """The tables of a pair of stores. Thread-safe. A context manager that closes on exit. Made by `connect`.

    >>> db["orders"].name, "orders" in db, list(db)
    ('orders', True, ['orders'])
    """

    def __init__(
        self,
        client: PersistClient | OpenClient,
        location: Location | None = None,
        *,
        maintain: bool,
        owns_client: bool = False,
        hints: Hints = PYTHON,
    ) -> None:
        self._opener = client
        self._client: PersistClient | None = None
        self._is_maintained = maintain
        self.location = location
        """The location of the stores; None if unknown."""
        self._owns_client = owns_client
        self._hints = hints
        self._lock, self._opening = threading.Lock(), threading.RLock()
        self._tables: dict[ShardId, Table] = {}
        self._background: BackgroundMaintenance | None = None
        self._upkeeps: dict[ShardId, Upkeep | None] = {}
        self._is_closed = False
        if isinstance(client, PersistClient):
            self._take(client)

    @property
    def client(self) -> PersistClient:
        """The client of the same stores, for the handles below tables. Makes stores that do not exist yet.

        >>> db.client.inspect(orders.id).updates
        2
        """
        return self._open_client(create=True)

    def create(
        self,
        name: str,
        key: Fields | Sequence[str],
        value: Fields = "",
        *,
        like: Frame | pa.Schema | None = None,
        retain: Span | None = DEFAULT,
        bloom: Sequence[str] = (),
        coerce: Coerce | None = None,
        clock: Clock = "ms",
        exist_ok: bool = False,
    ) -> Table:
        """Creates a table without rows, NAME or NAMESPACE.NAME. Its columns are DDL (`key="id BIGINT"`, `value="name STRING, price
        DECIMAL(10,2)"`) or pyarrow schemas, or those of the frame or schema `like`; then `key` names the columns of the key. Instants in
        nanoseconds become microseconds only with `coerce`, as in writes.

        `retain` says how long times stay readable: a span, or None for only the newest; the default is 7 days. `bloom` names columns in
        which reads look for single values (`email = 'a@b.c'`): Bloom filters for them rule out most of the files. Raises InvalidUsage when
        the name is taken; with `exist_ok`, returns the table that has it if its columns are the same, and raises SchemaMismatch if not.
        Completes an interrupted call: a table that exists without Bloom filters gets them.

        `clock` says which times writes have: `ms`, milliseconds, or `counter`, 1, 2, 3 and so on. A table keeps its clock. With a counter,
        `retain` is a number of writes (the default is 1000), or None.

        >>> db.create("notes", key="id BIGINT", value="text STRING", retain="30 days")
        Table(notes: key id; id, text)
        """
        with of_table(str(name)):
            owner = new_owner(name)
            schema = self._schema(key, value, like, coerce)
            retain_ms = retained(retain, expect_clock(clock))
            filtered = self._filtered(bloom, schema)
            client = self._open_client(create=True)
            found = client.registered(owner)
            if found is not None and client.owner_of(found) == owner and _exists(client, found):
                return self._existing(Named(found, owner), schema, clock, filtered, exist_ok=exist_ok)
            if found is not None:
                client.free_name(owner)
            adopted = client.adopt(owner, None, ShardId.new())
            if not isinstance(adopted, Adopted):
                raise InvalidUsage(
                    f"the name leads to shard {adopted.shard_id}, which has another owner; use another name"
                )
            named = Named(adopted.shard_id, owner)
            client.initialise(adopted.shard_id, schema, retain_ms=retain_ms or 0, clock=clock)
            state = client.machine(adopted.shard_id).state
            if (state.retain_ms, clock_of(state)) != (retain_ms or None, clock):  # another call created it meanwhile
                return self._existing(named, schema, clock, filtered, exist_ok=exist_ok)
            if filtered:
                client.set_filtered(adopted.shard_id, filtered)
        return self._table(named)

    def table(self, name: str) -> Table:
        """The table to which `name` leads: NAME, NAMESPACE.NAME, OPERATOR.NAMESPACE.NAME, or the id of a shard. Tables of the Spark
        catalog and of operators have names here, too. Raises ShardNotFound, with near names.

        >>> db.table("orders").key
        ('id',)
        """
        client = self._open_client()
        try:
            named = resolved(client, name)
        except ShardNotFound as error:
            raise ShardNotFound(f"{error}; {self._hints.create(name)}", **error.detail) from error
        client.machine(named.shard_id)  # raises ShardNotFound for the id of a shard that does not exist
        return self._table(named)

    def __getitem__(self, name: str) -> Table:
        return self.table(name)

    def __contains__(self, name: object) -> bool:
        try:
            self.table(name)  # type: ignore[arg-type]  # raises InvalidUsage if it is not a text
        except InvalidUsage:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables())

    def tables(self, namespace: str | None = None) -> list[str]:
        """The names of all tables, or of the tables of a namespace. Lists all keys of the store.

        >>> db.tables()
        ['orders']
        """
        return [
            each.name
            for each in listed(self._open_client())
            if each.owner is not None and namespace in {None, each.owner.namespace}
        ]

    def rename(self, name: str, new: str) -> Table:
        """Gives a table another name. Its rows, its id and its readers stay. A repetition completes an interrupted call. Raises
        InvalidUsage when the new name is taken, and for a table that neither SQL nor Python created.

        >>> db.rename("orders", "shop.orders")
        Table(shop.orders: key id; id, name)
        """
        with of_table(str(name)):
            client, owner = self._open_client(), new_owner(new)
            named = self._ours(name, owner_after=new)
            assert named.owner is not None, "a table of SQL or Python has an owner"
            if named.owner == owner:
                return self._table(named)
            client.rename(named.shard_id, old=named.owner, new=owner)
        return self._table(Named(named.shard_id, owner))

    def drop(self, name: str, *, purge: bool = False, confirm: str | None = None) -> ShardId:
        """Removes the name. The rows stay, and the returned id leads to them (`db.table(id)`). Raises InvalidUsage for a table that neither
        SQL nor Python created, because only its owner may drop it.

        With `purge`, and the name repeated as `confirm`, deletes the rows for good, at every time. Raises FinalizationError, before
        anything is deleted, while a reader holds the table. Completes an interrupted call. A drop that has completed may be repeated with
        the id; its name leads nowhere any more, and raises ShardNotFound.

        >>> kept = db.drop("orders")
        >>> db.table(kept).count()
        2
        """
        with of_table(str(name)):
            client = self._open_client()
            if purge and confirm != name:
                raise InvalidUsage(
                    f"purge deletes the rows for good: repeat the name, as in drop({name!r}, purge=True, confirm={name!r})"
                )
            if not purge and confirm is not None:
                raise InvalidUsage("confirm is for purge=True alone; without it the rows stay")
            try:
                named = resolved(client, name)
            except ShardNotFound as error:
                if (left := self._left_by_drop(name, purge=purge)) is not None:
                    return left
                why = "it was never created, or was renamed, or a drop of it has completed and nothing is left to do"
                raise ShardNotFound(f"{error}: {why}", **error.detail) from error
            if named.owner is None:
                return self._dropped(named.shard_id, purge=purge)
            named = self._ours(name)
            self._table(named).close()  # otherwise the table's own reader would hold it
            if purge and _exists(client, named.shard_id):
                from persist_engine.client.closing import close_shard, finalize_shard

                if not client.is_finalized(named.shard_id):
                    close_shard(client, named.shard_id)
                finalize_shard(client, named.shard_id)
            client.disown(named.shard_id)
            self._forget(named.shard_id)
            return named.shard_id

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until the maintenance that writes left is done. Returns False when `timeout_s` passed first. Without maintenance threads,
        returns True at once.

        >>> db.drain(timeout_s=10)
        True
        """
        return self._background is None or self._background.drain(timeout_s)

    def close(self) -> None:
        """Expires all readers and writers, ends the threads (call `drain` first to wait for their work), and closes the connections that
        `connect` opened. Idempotent. Does not wait for a store that is down: after LET_GO_S, it logs what it could not expire; these leases
        lapse later.

        >>> db.close()
        """
        with self._opening, self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            tables = list(self._tables.values())
            self._tables.clear()
        try:
            self._let_go(tables)
        finally:
            if self._background is not None:
                self._background.close()
            if self._owns_client and self._client is not None:
                self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({self.location or self._client!r})"

    # -- private ------------------------------------------------------------------------------------------------------

    def _let_go(self, tables: Sequence[Table]) -> None:
        """Closes the tables. Retries for at most LET_GO_S, even if the settings allow more."""
        if not tables:
            return
        assert self._client is not None, "which opened them"
        with self._client.versions.retry.until(LET_GO_S, at_most=True):
            for table in tables:
                try:
                    table.close()
                except (
                    Unavailable
                ) as error:  # the writes are durable, and another error that is being raised matters more
                    _log.warning(
                        "table %s: its leases lapse by themselves: %s", table.name, error, extra={"shard": table.id}
                    )

    def _open_client(self, *, create: bool = False) -> PersistClient:
        """The client, which opens with the first call. Without `create`, raises NoStore while there are no stores."""
        with self._opening:
            if self._is_closed:
                raise InvalidUsage("the database was closed: connect again")
            client = self._client
            if client is None:
                assert not isinstance(self._opener, PersistClient), "a client is taken at once"
                client = self._opener(create)
                self._take(client)
            if create and self._owns_client:
                _ = client.store_id  # draws the id now, if the stores are new
            return client

    def _take(self, client: PersistClient) -> None:
        self._client = client
        self._background = client.background_maintenance() if self._is_maintained else None

    def _schema(
        self, key: Fields | Sequence[str], value: Fields, like: Frame | pa.Schema | None, coerce: Coerce | None
    ) -> Schema:
        if like is None:
            if not isinstance(key, str | pa.Schema):
                raise InvalidUsage(
                    "key must be DDL such as 'id BIGINT', or a pyarrow schema; names alone go with like=frame"
                )
            return declared(key, value)
        if isinstance(key, pa.Schema) or (not isinstance(value, str) or value):
            raise InvalidUsage("with like=, key names columns of the frame, and value is left out")
        return inferred(like, key, checked_coerce(coerce))

    def _filtered(self, bloom: Sequence[str], schema: Schema) -> tuple[str, ...]:
        """The engine's names of the columns with Bloom filters. Raises InvalidUsage."""
        columns = Columns(schema).placed(bloom, "bloom")
        if not columns:
            return ()
        from persist_engine.client.write.filtered import checked_filtered

        return checked_filtered(columns, schema)

    def _existing(
        self, named: Named, schema: Schema, clock: Clock, filtered: Sequence[str], *, exist_ok: bool
    ) -> Table:
        if not exist_ok:
            raise InvalidUsage(f"the name is taken: {self._hints.taken(named.name)}")
        if (difference := self._open_client().schema(named.shard_id).difference(schema)) is not None:
            raise SchemaMismatch(f"it exists with other columns: {difference}")
        if (found := clock_of(self._open_client().machine(named.shard_id).state)) != clock:
            raise InvalidUsage(f"it exists with the clock {found!r}, which a table keeps")
        if filtered and not self._open_client().machine(named.shard_id).filtered:
            self._open_client().set_filtered(named.shard_id, filtered)  # where its creation was interrupted
        return self._table(named)

    def _ours(self, name: str, *, owner_after: str | None = None) -> Named:
        """The table of a name that SQL or Python created. `owner_after` is the new name of a rename that may have been interrupted."""
        try:
            named = resolved(self._open_client(), name)
        except ShardNotFound:
            if owner_after is None:
                raise
            named = resolved(self._open_client(), owner_after)
            stale = self._open_client().registered(new_owner(name))
            if stale != named.shard_id:
                raise
            return Named(named.shard_id, new_owner(name))
        if not named.is_ours:
            owner = "no owner" if named.owner is None else f"the owner {named.owner}"
            raise InvalidUsage(f"it has {owner}, and only what SQL or Python created is renamed and dropped here")
        return named

    def _dropped(self, shard_id: ShardId, *, purge: bool) -> ShardId:
        """Repeats a drop of a shard that has no name. Raises InvalidUsage for a purge of rows that are still there, because only the name
        of a table shows that SQL or Python may delete them. Raises ShardNotFound.
        """
        client = self._open_client()
        client.machine(shard_id)  # raises ShardNotFound
        if purge and not client.is_finalized(shard_id):
            raise InvalidUsage(
                "it has no name, because a drop kept its rows or because it never had one; to delete them, call "
                f"`persist admin finalize {shard_id} --close --commit`"
            )
        return shard_id

    def _left_by_drop(self, name: str, *, purge: bool) -> ShardId | None:
        """Completes a drop of this name that was interrupted when the name led nowhere already. Returns its shard; None if there is none.

        SUBTLE: with `purge` only one that has purged the rows. Another one was to keep them, perhaps of an earlier table of this name.
        """
        client, done = self._open_client(), None
        for named in left_by_drop(client, name):
            if not purge or (_exists(client, named.shard_id) and client.is_finalized(named.shard_id)):
                client.disown(named.shard_id, only=named.owner)
                self._forget(named.shard_id)
                done = named.shard_id
        return done

    def _table(self, named: Named) -> Table:
        client = self._open_client()
        with self._lock:
            table = self._tables.get(named.shard_id)
            if table is None:
                table = self._tables[named.shard_id] = Table(client, named, self._maintain)
            table.renamed(named)
            return table

    def _forget(self, shard_id: ShardId) -> None:
        with self._lock:
            table = self._tables.pop(shard_id, None)
        if table is not None:
            table.close()

    def _maintain(self, shard_id: ShardId, writer: WriteHandle, due: Maintenance) -> None:
        """Gives the work that a write left to the threads. Other owners maintain their own shards."""
        if self._background is None or due.is_empty():
            return
        with self._lock:
            if shard_id not in self._upkeeps:
                table = self._tables.get(shard_id)
                is_ours = table is not None and (table.owner is None or table.owner.operator_id == "sql")
                self._upkeeps[shard_id] = self._background.of(writer.machine) if is_ours else None
            upkeep = self._upkeeps[shard_id]
        if upkeep is not None:
            upkeep.offer(due)


def _exists(client: PersistClient, shard_id: ShardId) -> bool:
    try:
        client.machine(shard_id)
    except ShardNotFound:
        return False
    return True
