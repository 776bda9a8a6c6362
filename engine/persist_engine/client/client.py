"""PersistClient: opens handles on the shards of one location, which share their connections and state.

This module owns the connections to the stores and one Applier per shard, so that a process holds one copy of a shard's state, however many
handles exist. It knows nothing of what the handles do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import ForkedLog, ShardNotFound
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.refusal import Bound
from persist_engine.base.retry import OnWait, Retry
from persist_engine.base.settings import Settings
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.client.arguments import (
    expect,
    expect_clock,
    expect_codecs,
    expect_count,
    expect_first_hold,
    expect_schema,
    expect_seconds,
    expect_shard,
    expect_text,
    unexpected,
)
from persist_engine.client.location import Location
from persist_engine.model.commands import RetentionSet, SchemaEvolved
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, ShardId, StoreId
from persist_engine.model.ownership import Adoption, Owner
from persist_engine.model.queries import clock_of, is_finalized
from persist_engine.model.state import Clock, CodecNames, FirstHold, SourceProgress
from persist_engine.rows.schema import CODECS, Schema
from persist_engine.shard.applier import Applier
from persist_engine.shard.machine import Machine
from persist_engine.shard.opening import open_store
from persist_engine.shard.schemas import SchemaIncompatible, evolve_schema, schema_id_of
from persist_engine.shard.versions import StateVersions, check_codecs
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.notify import Listener, NoPush, Push
from persist_engine.storage.open import open_blob, open_consensus, open_push
from persist_engine.work.identity import identify
from persist_engine.work.registry import Registry

# Modules of handles are imported when a handle is opened, so that a process which only reads does not load code for writing.
if TYPE_CHECKING:
    import pyarrow as pa

    from persist_engine.client.read.handle import ReadHandle
    from persist_engine.client.since import SinceHandle
    from persist_engine.client.write.handle import WriteHandle
    from persist_engine.model.inspection import Inspection
    from persist_engine.work.audit.uncollected import Uncollected
    from persist_engine.work.background import BackgroundMaintenance, CompactionSwitch

#: The number of states that are kept without a handle, so that a caller which visits many shards in turn does not read a rollup each time.
_IDLE_STATES_MAX = 64


class PersistClient(Bound, elsewhere="in another process, PersistClient.open(location)"):
    """All shards of one location. Thread-safe. A context manager that closes the connections on exit.

    Store failures are retried. With `settings.retry.give_up_ms`, the retries end with Unavailable, which names the address.
    """

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        settings: Settings | None = None,
        env: Env | None = None,
        metrics: Metrics | None = None,
        create: bool = True,
        on_wait: OnWait | None = None,
    ) -> PersistClient:
        """Connects to both stores and checks that they are a pair. Waits for an unreachable store; `on_wait` is called then and during
        later waits. Creates a missing directory or file of a URL, unless `create` is false, for processes that only read. Raises
        InvalidUsage for invalid URLs and missing files, UnsafeStore for stores without the guarantees that persist needs, and StoreLost or
        StoreMismatch for two stores that do not belong together. Raises StoreRefused within seconds for wrong credentials, databases,
        buckets, endpoints and paths.
        """
        expect(location, Location, "location", "a Location")
        settings = Settings() if settings is None else expect(settings, Settings, "settings", "Settings, or None")
        env, metrics = env or SystemEnv(), metrics or NoMetrics()
        retry = Retry(env, settings.retry, metrics, on_wait=on_wait)
        blob = open_store(
            retry, "open blob store", lambda: open_blob(location.blob, env=env, metrics=metrics, create=create)
        )
        try:
            consensus = open_store(
                retry,
                "open consensus",
                lambda: open_consensus(location.consensus, env=env, metrics=metrics, create=create),
            )
        except BaseException:
            blob.close()
            raise
        push = open_push(location.consensus, env=env, metrics=metrics) if settings.watch.push else NoPush()
        client = cls(blob, consensus, settings=settings, env=env, metrics=metrics, push=push)
        client.versions.retry.on_wait = on_wait
        try:
            client._store_id = client._identified(create=create)
        except BaseException:
            client.close()
            raise
        return client

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        *,
        settings: Settings,
        env: Env,
        metrics: Metrics,
        push: Push | None = None,
    ) -> None:
        self._blob, self._consensus, self._push = blob, consensus, push or NoPush()
        self._versions = StateVersions(blob, consensus, env=env, settings=settings, metrics=metrics, push=self._push)
        self._lock = threading.Lock()
        self._appliers: WeakValueDictionary[ShardId, Applier] = WeakValueDictionary()
        self._recent: OrderedDict[ShardId, Applier] = OrderedDict()
        self._registry = Registry(consensus, self._versions.retry)
        self._store_id: StoreId | None = None
        self._uncollected: Uncollected | None = None

    # -- handles ------------------------------------------------------------------------------------------------------

    def open_writer(self, shard_id: ShardId, schema: Schema, *, purpose: str) -> WriteHandle:
        """Opens a writer of the shard. Creates the shard, with the retention `settings.retain_ms`, when it does not exist. Registers
        nothing until the first append.

        Raises SchemaMismatch, which names the columns, when the shard has another schema. Accepts a schema that the shard had before it
        evolved. `purpose` is a description for people.
        """
        from persist_engine.client.write.handle import WriteHandle

        expect_text(purpose, "purpose")
        machine, schema_id = self._initialised(shard_id, schema)
        return WriteHandle(machine, schema, schema_id, purpose=purpose)

    def open_leased_reader(
        self, shard_id: ShardId, schema: Schema | None = None, *, purpose: str, lease_ms: int | None = None
    ) -> ReadHandle:
        """Opens a reader that holds the shard's since while it lives (one commit). It reads with the shard's newest schema, or with
        `schema`. A schema that the shard had before it evolved hides later fields. Raises SchemaMismatch for any other schema. Raises
        ShardNotFound when the shard does not exist: only `initialise` and writers create a shard.
        """
        from persist_engine.client.read.handle import ReadHandle

        expect_text(purpose, "purpose")
        if lease_ms is not None:
            expect_count(lease_ms, "lease_ms", least=0)
        machine = self.machine(shard_id)
        schema_id = None if schema is None else schema_id_of(machine, expect_schema(schema))
        return ReadHandle.open(machine, schema_id, purpose=purpose, lease_ms=lease_ms)

    def open_critical_since(
        self, shard_id: ShardId, critical_id: CriticalReaderId, *, opaque: bytes, purpose: str = ""
    ) -> SinceHandle:
        """Opens a hold on since that never lapses (one commit). An existing hold keeps its since and opaque. Raises ShardNotFound."""
        from persist_engine.client.since import SinceHandle

        expect(critical_id, CriticalReaderId, "critical_id", "a CriticalReaderId")
        expect(opaque, bytes, "opaque", "bytes")
        machine = self.machine(shard_id)
        answer, _ = machine.register_critical_reader(
            critical_id, opaque=opaque, purpose=expect_text(purpose, "purpose")
        )
        return SinceHandle(machine, critical_id, since=answer.since, opaque=answer.opaque)

    def machine(self, shard_id: ShardId) -> Machine:
        """The shard's commands, for maintenance. Shares the state with all handles. Raises ShardNotFound."""
        return Machine(self._applier(expect_shard(shard_id)))

    def background_maintenance(self, switch: CompactionSwitch | None = None) -> BackgroundMaintenance:
        """Starts threads that do the maintenance which appends return, for programs that maintain their own shards:

            with client.background_maintenance() as background, client.open_writer(...) as writer:
                upkeep = background.of(writer.machine)
                upkeep.offer(writer.append(...).maintenance)
                background.drain()

        Leaving the block drops waiting work; `drain` waits for it. All clients of a process may share one `switch`, which stops their
        compactions together. With `settings.compaction.enabled` off, compactions are only dropped and counted.
        """
        from persist_engine.work.background import BackgroundMaintenance, CompactionSwitch

        if not isinstance(switch, CompactionSwitch | None):
            raise unexpected(switch, "switch", "a CompactionSwitch, or None")
        return BackgroundMaintenance(self._versions.settings.compaction, switch)

    @property
    def versions(self) -> StateVersions:
        """The logs of all shards, for tools that must work when no state can be opened."""
        return self._versions

    # -- shards -------------------------------------------------------------------------------------------------------

    def initialise(
        self,
        shard_id: ShardId,
        schema: Schema,
        *,
        retain_ms: int | None = None,
        critical: tuple[CriticalReaderId, bytes, str] | None = None,
        clock: Clock = "ms",
        codecs: tuple[str, str] | None = None,
    ) -> None:
        """Creates the shard unless it exists. Its retention is `retain_ms` (0: none), by default `settings.retain_ms`. `critical` is the
        (id, opaque, purpose) of a critical reader that it has from the beginning. Idempotent. Raises SchemaMismatch when the shard exists
        with another schema. An existing shard stays as it is; it does not get the critical reader.

        `clock` is the source of the times of writes by tables, in Spark too: `ms`, or `counter`, which counts the writes. Callers of the
        handles below tables choose the times themselves.

        `codecs` names the encodings of keys and of values, by default those of this release. Raises CodecMismatch, and creates nothing,
        for names that this release does not have, and when the shard exists with other codecs.
        """
        if retain_ms is not None:
            expect_count(retain_ms, "retain_ms", least=0)
        hold, clock = expect_first_hold(critical), expect_clock(clock)
        names = expect_codecs(codecs)
        self._initialised(shard_id, schema, retain_ms=retain_ms, critical=hold, clock=clock, codecs=names)

    def schema(self, shard_id: ShardId) -> Schema:
        """The shard's newest schema, as far as this process knows. Raises ShardNotFound."""
        return self.machine(shard_id).schema

    def clock(self, shard_id: ShardId) -> Clock:
        """The source of the times of the shard's writes, as given to `initialise`. Raises ShardNotFound."""
        return clock_of(self.machine(shard_id).state)

    def evolve_schema(self, shard_id: ShardId, schema: Schema) -> SchemaEvolved | SchemaIncompatible:
        """Makes `schema` the shard's newest schema. It may have more nullable fields, or wider numbers in the value. Stored rows are read
        as if they had been written under it, with null in new fields. Open handles continue with their schema.

        Returns SchemaIncompatible, which names the fields that prevent it. Idempotent and linearized. Raises ShardNotFound.
        """
        return evolve_schema(self.machine(shard_id), expect_schema(schema))[0]

    def set_retention(self, shard_id: ShardId, retain_ms: int | None) -> RetentionSet:
        """Keeps the shard's since `retain_ms` behind its upper, whatever readers release, and advances it with the upper. With None or 0,
        since is where readers hold it. One commit, linearized, idempotent. The answer holds the since. Times that since has passed stay
        unreadable. Raises ShardNotFound.
        """
        if retain_ms is not None:
            expect_count(retain_ms, "retain_ms", least=0)
        return self.machine(shard_id).set_retention(retain_ms or None)[0]

    def set_filtered(self, shard_id: ShardId, columns: Sequence[str]) -> None:
        """Gives parts that are written from now on Bloom filters for exactly these columns, `key.<field>` or `val.<field>`, so that reads
        which look for single values in them fetch less. The rows of existing parts get filters when a compaction rewrites them.
        Idempotent. Raises InvalidUsage for a column that can have no filter. Raises ShardNotFound.
        """
        from persist_engine.client.write.filtered import set_filtered

        set_filtered(self, expect_shard(shard_id), columns)

    def recent_upper(self, shard_id: ShardId) -> Antichain:
        """The shard's upper, at or past every upper that was acknowledged before the call. Raises ShardNotFound."""
        return self.machine(shard_id).fetch_recent_upper()

    def progress(self, shard_id: ShardId, sink_id: str) -> SourceProgress | None:
        """The source progress that the sink's last acknowledged append stored; None if there is none. Linearized. Raises ShardNotFound."""
        expect_text(sink_id, "sink_id")
        return self.machine(shard_id).refresh().progress.get(sink_id)

    def inspect(self, shard_id: ShardId, *, known_seqno: int | None = None) -> Inspection:
        """The current metadata of the shard, for people and the operator. Reads no data. Linearized. Raises ShardNotFound. With
        `known_seqno`, includes the tag of that version's entry, while it is live, by which a caller can check that the history is the same.
        """
        from persist_engine.model.inspection import inspection_of
        from persist_engine.work.audit.uncollected import Uncollected

        if known_seqno is not None:
            expect_count(known_seqno, "known_seqno", least=0)
        machine = self.machine(shard_id)
        shard_id = machine.shard_id
        first = self._versions.fetch_diffs_after(shard_id, SeqNo(0), limit=1)
        state = machine.refresh()  # after the earliest version was read, so that the newest one is not before it
        if not first:
            raise _not_found(shard_id, self._consensus)
        earliest = first[0].seqno
        self._uncollected = self._uncollected or Uncollected()
        inspection = inspection_of(
            state,
            live_diffs=state.seqno - earliest + 1,
            earliest_seqno=earliest,
            now_ms=machine.env.now_ms(),
            uncollected_from_ms=self._uncollected.from_ms(machine, earliest=earliest),
        )
        schema = machine.schema
        known: bytes | None = None
        if known_seqno is not None:
            known = state.tag if known_seqno == state.seqno else self._versions.tag_at(shard_id, SeqNo(known_seqno))
        return replace(
            inspection,
            key_schema=schema.key_ddl,
            val_schema=schema.val_ddl,
            known_tag=None if known is None else known.hex(),
        )

    def on_commit(self, shard_id: ShardId, listener: Listener) -> None:
        """Notifies `listener` of commits to the shard by any process, for as long as another reference to the listener exists: see
        storage.notify. The shard need not exist. Reads nothing and loads no state. Idempotent.
        """
        if not callable(getattr(listener, "hear", None)):
            raise unexpected(listener, "listener", "a Listener, with a method `hear`")
        self._push.subscribe(expect_shard(shard_id), listener)

    def hears_commits(self, shard_id: ShardId, *, timeout_s: float = 0.0) -> bool:
        """Whether the store now pushes all commits to the shard, as far as this process knows. False without `on_commit`, and for stores
        that push nothing. After `on_commit`, it becomes true within some milliseconds; this waits for that at most `timeout_s` (None: for
        ever). By then, each listener has heard None. From then on, a commit that a read does not show comes as news.
        """
        found = expect_shard(shard_id)
        wait_s = expect_seconds(timeout_s, "timeout_s")
        return self._push.is_live(found) if wait_s == 0 else self._push.await_live(found, wait_s)

    def has_log(self, shard_id: ShardId) -> bool:
        """Whether consensus has the shard. Linearized; one small read. Without a log, only `initialise` shows whether there was one."""
        return self._head(expect_shard(shard_id)) is not None

    def is_newest(self, shard_id: ShardId, *, seqno: int, tag: str) -> bool:
        """Whether this version, with this tag in hex, is the newest of the shard's log. Linearized; one small read, none of blob."""
        expect_count(seqno, "seqno", least=0)
        expect(tag, str, "tag", "a text of hexadecimal digits")
        head = self._head(expect_shard(shard_id))
        return head is not None and (int(head.seqno), head.tip.tag.hex()) == (seqno, tag)

    def _head(self, shard_id: ShardId) -> VersionedData | None:
        """The newest entry of the log. A process that only inspects shards detects a forked log here first, so it is counted here."""
        try:
            return self._versions.retry.external("head", lambda: self._consensus.head(shard_id))
        except ForkedLog:
            self._versions.metrics.count("forked_log", shard=shard_id)
            raise

    def metadata(self, shard_id: ShardId, table: str) -> pa.Table:
        """The metadata of the shard as a table: `batches`, `runs`, `parts`, `versions`, `holds` or `usage` (columns: work.metadata).
        Reads no rows of the shard and registers nothing. Linearized. Raises InvalidUsage for another name. Raises ShardNotFound.
        """
        from persist_engine.work.metadata import metadata_of

        return metadata_of(self.machine(shard_id), expect_text(table, "table"))

    def finalize(self, shard_id: ShardId) -> None:
        """Empties a closed shard for good. Idempotent. Raises FinalizationError unless since and upper are both empty."""
        self.machine(shard_id).become_tombstone()

    def is_finalized(self, shard_id: ShardId) -> bool:
        """Whether the shard was finalized. Linearized. Raises ShardNotFound."""
        return is_finalized(self.machine(shard_id).refresh())

    def shards(self) -> Iterator[ShardId]:
        """Every shard of the location, in no particular order."""
        return self._versions.list_shards()

    # -- the store and its owners -------------------------------------------------------------------------------------

    @property
    def store_id(self) -> StoreId:
        """The id of this pair of stores, whatever the spelling of their addresses. It is drawn now if the pair has none. Raises StoreLost
        and StoreMismatch.
        """
        if self._store_id is None:
            self._store_id = self._identified(create=True)
        assert self._store_id is not None, "the id was to be drawn"
        return self._store_id

    def adopt(self, owner: Owner, wanted: ShardId | None, proposed: ShardId, *, take_over: bool = False) -> Adoption:
        """Makes `owner` the owner of a shard, to which its name then leads: see work.registry."""
        expect(owner, Owner, "owner", "an Owner")
        wanted = None if wanted is None else expect_shard(wanted)
        proposed = expect_shard(proposed)
        expect(take_over, bool, "take_over", "true or false")
        return self._registry.adopt(owner, wanted=wanted, proposed=proposed, take_over=take_over)

    def owner_of(self, shard_id: ShardId) -> Owner | None:
        """The shard's owner; None when it has none. Linearized."""
        return self._registry.owner_of(expect_shard(shard_id))

    def disown(self, shard_id: ShardId, *, only: Owner | None = None) -> Owner | None:
        """Removes the shard's owner and returns it. The name that led to the shard then leads nowhere. Idempotent. With `only`, any other
        owner stays, even one that took the shard over a moment ago.
        """
        if only is not None:
            expect(only, Owner, "only", "an Owner")
        return self._registry.disown(expect_shard(shard_id), only=only)

    def rename(self, shard_id: ShardId, *, old: Owner, new: Owner) -> None:
        """Makes `new` the owner of the shard in place of `old`. The name of `new` then leads to the shard: see work.registry."""
        expect(old, Owner, "old", "an Owner")
        self._registry.rename(expect_shard(shard_id), old=old, new=expect(new, Owner, "new", "an Owner"))

    def free_name(self, owner: Owner) -> bool:
        """Frees the owner's name if it leads to a shard that the owner does not own. False while it leads to its own: see work.registry."""
        return self._registry.free(expect(owner, Owner, "owner", "an Owner"))

    def registered(self, owner: Owner) -> ShardId | None:
        """The shard that the owner's name leads to. The shard may have another owner by now. Linearized."""
        return self._registry.registered(expect(owner, Owner, "owner", "an Owner"))

    def shard_named(self, name: str) -> ShardId:
        """The shard that a resource or table of this name owns: see work.registry. Linearized. Raises ShardNotFound, with near names."""
        return self._registry.shard_named(expect_text(name, "name"))

    def names(self) -> Iterator[tuple[Owner, ShardId]]:
        """Every owner's name and the shard that it leads to, in no particular order. Lists all keys of the store."""
        return self._registry.names()

    def close(self) -> None:
        """Closes the connections. Handles must not be used afterwards. Idempotent."""
        self._recent.clear()
        self._push.close()
        self._blob.close()
        self._consensus.close()

    def __enter__(self) -> PersistClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PersistClient({self._blob.address()}, {self._consensus.address()})"

    # -- private ------------------------------------------------------------------------------------------------------

    def _identified(self, *, create: bool) -> StoreId | None:
        fresh = StoreId.from_bytes(self._versions.env.random_bytes(16))
        return self._versions.retry.external(
            "identify the stores", lambda: identify(self._blob, self._consensus, fresh=fresh, create=create)
        )

    def _applier(self, shard_id: ShardId) -> Applier:
        with self._lock:
            known = self._appliers.get(shard_id)
        if known is None:
            known = self._share(Applier(self._versions.fetch_current_state(shard_id), self._versions))
        return known

    def _initialised(
        self,
        shard_id: ShardId,
        schema: Schema,
        *,
        retain_ms: int | None = None,
        critical: FirstHold | None = None,
        clock: Clock = "ms",
        codecs: CodecNames = CODECS,
    ) -> tuple[Machine, int]:
        """Creates the shard unless it exists. Returns it and the id of `schema` there. `retain_ms` None means `settings.retain_ms`."""
        shard_id, schema = expect_shard(shard_id), expect_schema(schema)
        with self._lock:
            known = self._appliers.get(shard_id)
        if known is None:
            retain_ms = self._versions.settings.retain_ms if retain_ms is None else retain_ms
            state = self._versions.maybe_init_shard(
                shard_id, codecs, schema.to_pair(), retain_ms=retain_ms or None, critical=critical, clock=clock
            )
            known = self._share(Applier(state, self._versions))
        elif not known.is_marked:  # a reader opened the shard; readers write no mark
            self._versions.ensure_mark(known.state)
        known.is_marked = True
        machine = Machine(known)
        return machine, schema_id_of(machine, schema)

    def _share(self, loaded: Applier) -> Applier:
        """The one Applier of the shard: `loaded`, unless another thread was faster. Raises CodecMismatch; then `loaded` is not kept."""
        check_codecs(loaded.state, CODECS)
        with self._lock:
            applier = self._appliers.setdefault(loaded.shard_id, loaded)
            self._recent[loaded.shard_id] = applier
            self._recent.move_to_end(loaded.shard_id)
            if len(self._recent) > _IDLE_STATES_MAX:
                self._recent.popitem(last=False)
        return applier


def _not_found(shard_id: ShardId, consensus: Consensus) -> ShardNotFound:
    return ShardNotFound(f"shard {shard_id} does not exist in {consensus.address()}", shard_id=shard_id)
