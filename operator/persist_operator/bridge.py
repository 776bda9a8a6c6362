"""The only bridge to the engine: one client for each location of a profile, with that location's own credentials, a deadline for every
call, and a circuit breaker for each location.

A call blocks its caller at most until the deadline, and at most a second while the store is known to be down. A location never takes all
workers, because the dead store of one tenant must not slow another tenant. Exceptions of the engine become values here: a StoreFailure for
the plan, with the address of the store, or the reason of an ActionFailure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from persist_engine import Antichain, Appended, Location, PersistClient, SchemaIncompatible, Snapshot, hold_since
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import (
    CorruptData,
    ErrorKind,
    ForkedLog,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    ShardLost,
    ShardNotFound,
    StoreLost,
    StoreMismatch,
    UnsafeStore,
)
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import Adopted, OwnedElsewhere, Owner, Unowned
from persist_engine.rows.schema import Schema

from persist_operator.api import names
from persist_operator.api.redact import redact
from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR, InlineLocation, Shard, StoreLocation
from persist_operator.plan import ownership
from persist_operator.plan.actions import AdvanceSince, EvolveSchema, InitialiseShard, ShardAction
from persist_operator.plan.observed import Claim, NotInspected, NotOwned, OwnerState, Seen, ShardMissing, StoreFailure
from persist_operator.settings import OperatorSettings
from persist_operator.store_calls import PROMPT_S, CallPlaces

T = TypeVar("T")
#: The key of the canary's shard, in DDL. It has no value columns.
CANARY_KEY = "at BIGINT NOT NULL"
#: Limit on concurrent calls to one location, so that threads stay bounded.
_CALLS_MAX = 8
#: How long a call waits for its subscription to news. Without it, news may have been lost, and a second call would be needed.
_HEARD_S = 0.5
_PERMANENT: tuple[tuple[type[PersistError], str], ...] = (
    (ForkedLog, "ShardLost"),
    (ShardLost, "ShardLost"),
    (CorruptData, "CorruptState"),
    (Incompatible, "IncompatibleState"),
    (InvariantViolated, "CorruptState"),
    (UnsafeStore, "UnsafeStore"),
    (StoreLost, "StoreLost"),
    (StoreMismatch, "StoreMismatch"),
)


class Ear(Protocol):
    """Receives news of commits to one shard, in any thread. Must be quick and must not raise."""

    def ask(self) -> None:
        """Called before the stores are asked. Earlier news is older than their answer."""

    def hear(self, news: object | None) -> None:
        """Called for a commit. None: commits may have been missed."""


class BridgeFailure(PersistError):
    """A call failed because of a store. `failure` is its description for the plan."""

    kind = ErrorKind.UNAVAILABLE

    def __init__(self, failure: StoreFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class StoreBusy(PersistError):
    """The location has its maximum of calls and does not answer promptly. The caller tries again later."""

    kind = ErrorKind.UNAVAILABLE

    def __init__(self, message: str, is_over: Callable[[], bool]) -> None:
        """`is_over`: whether a call would begin now, or fail at once because the store is down. It never waits."""
        super().__init__(message)
        self.is_over = is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """A shard in its stores: the newest state, and the rows of the engine's metadata tables by name, oldest first."""

    inspection: Inspection
    tables: Mapping[str, tuple[Mapping[str, Any], ...]]


@dataclass(slots=True)
class _Store:
    """One location: its client, its threads, and the state of its circuit breaker."""

    executor: ThreadPoolExecutor
    places: CallPlaces
    opening: threading.Lock = field(default_factory=threading.Lock)
    client: PersistClient | None = None
    retired: PersistClient | None = None
    """The former client, which knew a log that consensus lost. Its calls may still be under way."""
    open_until_s: float = 0.0
    last_failure: StoreFailure | None = None

    def is_ready(self) -> bool:
        """Whether a call would begin now, or raise the last failure at once."""
        return self.last_failure is not None or not self.places.are_taken


class Bridge:
    """The operator's calls of the engine. Thread-safe."""

    def __init__(
        self,
        settings: OperatorSettings,
        *,
        env: Env | None = None,
        metrics: Metrics | None = None,
        open_client: Callable[[Location], PersistClient] | None = None,
        credentials_dir: str = OPERATOR_CREDENTIALS_DIR,
        only_reads: bool = False,
    ) -> None:
        """`credentials_dir` has a folder for each profile with a Secret. The keys of the Secret are files in it. With `only_reads` no
        missing directory, file or store identity is created.
        """
        self._credentials_dir = credentials_dir
        workers = settings.loop.workers
        self._calls_max = max(1, min(_CALLS_MAX, workers - max(1, workers // 4)))
        self._deadline_s = settings.loop.store_deadline_seconds
        self._breaker_s = settings.loop.store_breaker_seconds
        self._env = env or SystemEnv()
        # The engine gives up a little before the bridge, so that the status shows the engine's message, which has the address.
        # Shards of the operator get their retention from the operator's own hold: see advance_since.
        engine = Settings(retry=RetrySettings(give_up_ms=self._deadline_s * 1000 * 0.8), retain_ms=None)
        self._open_client = open_client or (
            lambda location: PersistClient.open(
                location, settings=engine, metrics=metrics or NoMetrics(), create=not only_reads
            )
        )
        self._stores: dict[StoreLocation, _Store] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def inspect(
        self, location: StoreLocation, claim: Claim, *, ear: Ear | None = None, known: Seen | None = None
    ) -> Seen:
        """Claim the shard for its owner, and inspect it. An answer is linearized. Failures of the store are values; raises only StoreBusy.
        `ear` receives news of later commits to the shard while the object is alive. `known`: an earlier answer to this claim. If the shard
        has had no commit since, it is returned and nothing is read from blob.
        """
        try:
            return self._call(location, lambda client: _claimed(client, claim, ear, known))
        except BridgeFailure as error:
            return Seen(inspected=error.failure)
        except InvalidUsage as error:
            reason = "CodecMismatch" if error.kind is ErrorKind.CODEC_MISMATCH else "InvalidStorage"
            return Seen(inspected=StoreFailure(reason=reason, message=_text(error, location), permanent=True))

    def metadata(
        self, location: StoreLocation, shard_id: str, *, log_max: int
    ) -> Metadata | ShardMissing | StoreFailure:
        """The shard's metadata: `batches`, and, if its log has at most `log_max` live versions, `versions` and `holds`, which read the log.

        Claims, registers and commits nothing. Linearized. Raises InvalidUsage for an invalid id and for inline storage, and StoreBusy.
        """
        found = ShardId(shard_id)

        def read(client: PersistClient) -> Metadata | ShardMissing:
            try:
                inspection = client.inspect(found)
                names_read = ("batches", "versions", "holds") if inspection.live_diffs <= log_max else ("batches",)
                tables = {name: tuple(client.metadata(found, name).to_pylist()) for name in names_read}
            except ShardNotFound:
                return ShardMissing()
            return Metadata(inspection=inspection, tables=tables)

        try:
            return self._call(location, read)
        except BridgeFailure as error:
            return error.failure

    def hears(self, location: StoreLocation, shard_id: str) -> bool:
        """Whether an ear of this shard now receives news of every commit, as far as is known. Makes no call to a store."""
        with self._lock:
            store = self._stores.get(location)
        client = None if store is None else store.client
        return client is not None and client.hears_commits(ShardId(shard_id))

    def claim(
        self,
        shard: Shard,
        location: StoreLocation,
        settings: OperatorSettings,
        *,
        owner_state: Callable[[Owner], OwnerState],
        ear: Ear | None = None,
        known: Seen | None = None,
    ) -> Seen:
        """`inspect` with the claim of a resource. Takes the shard over if plan.ownership allows it. `owner_state`: see plan.ownership."""
        claim = ownership.claim_of(shard, settings)
        answer = self.inspect(location, claim, ear=ear, known=known)
        if not isinstance(answer.inspected, NotOwned):
            return answer
        found = ownership.with_owner_state(shard, answer.inspected, settings, owner_state)
        if ownership.may_take_over(shard, found, settings):
            return self.inspect(location, replace(claim, take_over=True), ear=ear)
        return replace(answer, inspected=found)

    def owned(self, location: StoreLocation, claim: Claim) -> Seen:
        """The shard that the owner of `claim` has; its id is None when the owner has none. Claims nothing. An answer is linearized.
        Failures of the store are values; raises only StoreBusy, and InvalidUsage for inline storage.
        """

        def look(client: PersistClient) -> Seen:
            shard_id = client.registered(claim.owner) if claim.wanted is None else ShardId(claim.wanted)
            is_owner = shard_id is not None and client.owner_of(shard_id) == claim.owner
            return Seen(inspected=NotInspected(), shard_id=shard_id if is_owner else None)

        try:
            return self._call(location, look)
        except BridgeFailure as error:
            return Seen(inspected=error.failure)

    def initialise(self, action: InitialiseShard, *, looks: Callable[[], object] = lambda: None) -> Seen:
        """Create the shard if it does not exist, with the operators' critical reader, and inspect it like `inspect`, while its state is in
        memory. Later, the state would be read from blob. Calls `looks` in between. Idempotent. Raises InvalidUsage when the shard exists
        with another schema or other codecs, has another owner, or was lost, and BridgeFailure for failures of the store.
        """
        wanted, named = Schema.from_ddl(action.schema.key, action.schema.value), action.codecs
        codecs = None if named is None else (named.key, named.value)
        hold = (CriticalReaderId(names.critical_id_of(action.shard_id)), *_holder(action.owner))

        def initialise(client: PersistClient) -> Seen:
            _check_owner(client, action)
            shard_id = ShardId(action.shard_id)
            client.initialise(shard_id, wanted, critical=hold, codecs=codecs)
            client.hears_commits(shard_id, timeout_s=_HEARD_S)
            looks()
            return _inspected(client, shard_id, None)

        try:
            return self._call(action.location, initialise)
        except BridgeFailure as error:
            if isinstance(error.__cause__, ShardLost):
                # Another try would also be refused, because a lost shard does not come back without an action.
                raise InvalidUsage(error.failure.message, kind=ErrorKind.SHARD_LOST) from error
            raise

    def evolve(self, action: EvolveSchema) -> None:
        """Make the schema of the action the shard's newest. Idempotent. Raises InvalidUsage when it cannot succeed the shard's schema or
        the shard has another owner, and BridgeFailure for failures of the store.
        """
        wanted = Schema.from_ddl(action.schema.key, action.schema.value)

        def evolve(client: PersistClient) -> None:
            _check_owner(client, action)
            answer = client.evolve_schema(ShardId(action.shard_id), wanted)
            if isinstance(answer, SchemaIncompatible):
                raise InvalidUsage(f"spec.schema cannot succeed the shard's: {'; '.join(answer.reasons)}")

        self._call(action.location, evolve)

    def advance_since(self, action: AdvanceSince) -> int | None:
        """Hold since at `since_ms` or later through the operators' critical reader. Returns the since that it now holds. From then on this
        hold is the retention of the shard, and a retention from the shard's creation ends.

        Idempotent; since never goes back. The call takes over the hold of a former owner, and fences that owner. Raises InvalidUsage when
        the shard has another owner, and BridgeFailure for failures of the store.
        """

        def advance(client: PersistClient) -> int | None:
            _check_owner(client, action)
            token, purpose = _holder(action.owner)
            shard_id, reader = ShardId(action.shard_id), CriticalReaderId(action.critical_id)
            return hold_since(client, shard_id, reader, token=token, purpose=purpose, since_ms=action.since_ms)

        return self._call(action.location, advance)

    def round_trip(self, location: StoreLocation, owner: Owner, shard_id: str, *, time_ms: int) -> None:
        """Replace the rows of a shard with the key CANARY_KEY by one row with this time, and read it back. Raises InvalidUsage when the
        shard has another owner or another writer, BridgeFailure for failures of the store, and StoreBusy.
        """

        def trip(client: PersistClient) -> None:
            if client.owner_of(ShardId(shard_id)) != owner:
                raise InvalidUsage(f"{owner} does not own shard {shard_id}")
            _round_trip(client, ShardId(shard_id), time_ms)

        self._call(location, trip)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all clients. Does not wait for calls that hang."""
        with self._lock:
            self._is_closed = True
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.executor.shutdown(wait=False, cancel_futures=True)
            for client in (store.client, store.retired):
                if client is not None:
                    client.close()

    def _store(self, location: StoreLocation) -> _Store:
        with self._lock:
            # All fields are part of the key, because the same addresses with other credentials are another location.
            if location not in self._stores:
                executor = ThreadPoolExecutor(max_workers=self._calls_max, thread_name_prefix="store")
                self._stores[location] = _Store(executor, CallPlaces(self._calls_max, self._env))
            return self._stores[location]

    def _call(self, location: StoreLocation, call: Callable[[PersistClient], T]) -> T:
        """Run `call` in a thread of the location, at most until the deadline. Raises InvalidUsage and StoreBusy unchanged, and
        BridgeFailure for every other error of the engine. While the breaker is open, it raises the last failure at once. After each
        interval of the breaker, one call probes the location, and its caller waits at most a second.

        Raises InvalidUsage for inline storage, because no process of the operator connects to its stores.
        """
        if isinstance(location, InlineLocation):
            raise InvalidUsage(f"{_addresses(location)}: the operator does not connect to stores that a resource names")
        store = self._store(location)
        down = store.last_failure
        if down is not None:
            with self._lock:
                if self._env.monotonic_s() < store.open_until_s:
                    raise BridgeFailure(down)
                store.open_until_s = self._env.monotonic_s() + self._breaker_s
        place = store.places.take()
        if place is None and down is not None:
            raise BridgeFailure(down)
        if place is None:
            raise StoreBusy(f"{_addresses(location)}: other calls to it are under way and slow", store.is_ready)
        try:
            future: Future[T] = store.executor.submit(self._run, store, location, call)
        except RuntimeError:
            store.places.leave(place)
            raise
        future.add_done_callback(lambda _: store.places.leave(place))
        try:
            answer = future.result(timeout=self._deadline_s if down is None else min(PROMPT_S, self._deadline_s))
        except FutureTimeout as error:
            if down is not None:
                future.add_done_callback(lambda late: self._settle(store, location, late))
                raise BridgeFailure(down) from error
            future.cancel()
            raise BridgeFailure(self._hung(store, location)) from error
        except PersistError as error:
            failure = self._judged(store, location, error)
            if failure is None:
                raise
            raise BridgeFailure(failure) from error
        store.last_failure = None
        return answer

    def _settle(self, store: _Store, location: StoreLocation, late: Future[T]) -> None:
        """Record from the result of a call, whose caller no longer waits, whether the location is back."""
        if late.cancelled():
            return
        error = late.exception()
        if error is None:
            store.last_failure = None
        elif isinstance(error, PersistError):
            self._judged(store, location, error)

    def _run(self, store: _Store, location: StoreLocation, call: Callable[[PersistClient], T]) -> T:
        with store.opening:
            if store.client is None:
                blob, consensus = location.urls(f"{self._credentials_dir}/{location.profile}")
                store.client = self._open_client(Location(blob=blob, consensus=consensus))
        return call(store.client)

    def _retire(self, store: _Store) -> None:
        """Retire the client, so that the next call opens a new one, which accepts the current log. The status still has the lost log."""
        with store.opening:
            if store.client is None:
                return
            idle, store.retired, store.client = store.retired, store.client, None
        if idle is not None:
            idle.close()

    def _hung(self, store: _Store, location: StoreLocation) -> StoreFailure:
        message = f"{_addresses(location)} did not answer within {self._deadline_s:g} s"
        return self._opened(store, StoreFailure(reason="StorageUnreachable", message=message))

    def _judged(self, store: _Store, location: StoreLocation, error: PersistError) -> StoreFailure | None:
        """The failure for the plan; None when the engine refused the call. Only a store that is down opens the breaker. A store with
        another answer is back, and a corrupt shard is not a fact about other shards.
        """
        # The engine reports a call as misuse when its client was closed meanwhile. That is not a fact about the store.
        is_refused = isinstance(error, InvalidUsage) and not self._is_closed
        reason = next((reason for kind, reason in _PERMANENT if isinstance(error, kind)), None)
        if reason is None and not is_refused:
            return self._opened(store, StoreFailure(reason="StorageUnreachable", message=_text(error, location)))
        store.last_failure = None
        if isinstance(error, ForkedLog):
            self._retire(store)
        return None if reason is None else StoreFailure(reason=reason, message=_text(error, location), permanent=True)

    def _opened(self, store: _Store, failure: StoreFailure) -> StoreFailure:
        store.open_until_s = self._env.monotonic_s() + self._breaker_s
        store.last_failure = failure
        return failure


def _claimed(client: PersistClient, claim: Claim, ear: Ear | None, known: Seen | None) -> Seen:
    wanted = None if claim.wanted is None else ShardId(claim.wanted)
    match client.adopt(claim.owner, wanted, ShardId(claim.proposed), take_over=claim.take_over):
        case OwnedElsewhere(shard_id, owner):
            return Seen(inspected=NotOwned(shard_id=shard_id, owner=owner))
        case Unowned(shard_id):
            return Seen(inspected=NotOwned(shard_id=shard_id, owner=None))
        case Adopted(shard_id):
            if ear is not None:
                client.on_commit(shard_id, ear)
                if not client.hears_commits(shard_id) and client.hears_commits(shard_id, timeout_s=_HEARD_S):
                    ear.ask()
            was = None if known is None else known.inspected
            if isinstance(was, Inspection) and was.shard_id == shard_id:
                # Readers and writers lapse without a commit, so an old state that has some may be outdated.
                lapses = was.writers or any(one.kind == "leased" for one in was.readers)
                if not lapses and client.is_newest(shard_id, seqno=was.seqno, tag=was.tag):
                    return Seen(inspected=was, shard_id=shard_id)
            if claim.known_seqno is None and not client.has_log(shard_id):
                # This avoids `inspect`, which lists the shard's blobs for its message. `initialise` lists them before it creates anything.
                return Seen(inspected=ShardMissing(), shard_id=shard_id)
            return _inspected(client, shard_id, claim.known_seqno)


def _inspected(client: PersistClient, shard_id: ShardId, known_seqno: int | None) -> Seen:
    try:
        return Seen(inspected=client.inspect(shard_id, known_seqno=known_seqno), shard_id=shard_id)
    except ShardNotFound:
        return Seen(inspected=ShardMissing(), shard_id=shard_id)


def _round_trip(client: PersistClient, shard_id: ShardId, time_ms: int) -> None:
    purpose, schema = "canary", Schema.from_ddl(CANARY_KEY, "")
    with (
        client.open_writer(shard_id, schema, purpose=purpose) as writer,
        client.open_leased_reader(shard_id, schema, purpose=purpose) as reader,
    ):
        upper = writer.fetch_recent_upper()
        now = max(time_ms, upper.time or 0)
        # If the shard's since is past the former rows, they cannot be read now. The next trip removes them.
        before = reader.snapshot(Antichain.of(upper.time - 1), timeout_s=0) if upper.time else None
        rows = before.to_table().column("key").to_pylist() if isinstance(before, Snapshot) else []
        updates = [(((row["at"],), ()), now, -1) for row in rows] + [(((now,), ()), now, 1)]
        answer = writer.compare_and_append(updates, expected_upper=upper, new_upper=Antichain.of(now + 1))
        if not isinstance(answer, Appended):
            raise InvalidUsage(f"shard {shard_id} of the canary has another writer: {answer}")
        after = reader.snapshot(Antichain.of(now), timeout_s=0)
        found = after.to_table().column("key").to_pylist() if isinstance(after, Snapshot) else []
        if {"at": now} not in found:
            raise InvariantViolated(
                f"shard {shard_id} of the canary does not have the row of time {now} that was appended"
            )


def _check_owner(client: PersistClient, action: ShardAction) -> None:
    """Raises InvalidUsage when the owner of the action no longer owns the shard, as it did when the action was planned."""
    owner = client.owner_of(ShardId(action.shard_id))
    if owner != action.owner:
        raise InvalidUsage(f"{action.owner} no longer owns shard {action.shard_id}; its owner is {owner}")


def _holder(owner: Owner) -> tuple[bytes, str]:
    """The token and the purpose of the critical reader of this owner."""
    return str(owner).encode(), names.critical_purpose(owner.namespace, owner.name)


def _addresses(location: StoreLocation) -> str:
    return redact(f"{location.blob} or {location.consensus}")


def _text(error: PersistError, location: StoreLocation) -> str:
    """The message of an error, with the message of its cause and the address of the store."""
    cause = error.__cause__
    text = f"{error}" if cause is None or str(cause) in str(error) else f"{error}: {cause}"
    address = f" ({_addresses(location)})" if "://" not in text else ""
    return redact(f"{text}{address}")[:2000]
