"""One method per command on a shard, each with the retry rules that its meaning allows (spec 9).

Every command method returns `(answer, Maintenance)`: the result, and the work that the commit leaves for later. No method does that work.
All methods survive unknown outcomes. An idempotent command is simply applied again. An event that can occur only once (an append, a linked
rollup, an applied merge result) is remembered across attempts, so that blobs in use are never deleted. Storage errors surface only as
Unavailable, after `settings.retry.give_up_ms`; the outcome is then unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from persist_engine.base.env import Env
from persist_engine.base.errors import AmbiguousAppend, InvalidUsage, InvariantViolated, Unavailable, check
from persist_engine.base.metrics import Metrics
from persist_engine.base.retry import Backoff, Retry
from persist_engine.base.settings import Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands
from persist_engine.model.append import batch_expired, is_refusal_certain
from persist_engine.model.batch import HollowBatch, HollowRollup
from persist_engine.model.commands import Command
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.model.ids import CriticalReaderId, IdempotencyToken, LeasedReaderId, ShardId, WriterId
from persist_engine.model.leases import held_until_ms
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.spine.trace import MergeOutcome, MergeRes
from persist_engine.model.state import FILTERED, DebugInfo, SchemaPair, ShardState, SourceProgress, is_expected
from persist_engine.rows.schema import Schema
from persist_engine.shard.applier import NO_MAINTENANCE, Applier, UnknownOutcome
from persist_engine.shard.gauges import count_inline
from persist_engine.shard.versions import StateVersions
from persist_engine.shard.watch import StateWatch, wait_until
from persist_engine.storage.blob import Blob

#: Later than every clock.
_NEVER_MS = 2**63

A = TypeVar("A")
T = TypeVar("T")

AppendAnswer = commands.Appended | commands.UpperMismatch | commands.ProgressMismatch | commands.InlineBackpressure
CriticalAnswer = commands.CriticalDowngraded | commands.OpaqueMismatch


@dataclass(frozen=True, slots=True)
class SinceAhead:
    """The contents at the requested time can no longer be read. `since` is the earliest readable time."""

    since: Antichain


class Machine:
    """Commands and waits on one shard. Thread-safe and cheap: any number of machines may share one Applier."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        # These are attributes and not chained properties, because a commit reads them some forty times.
        versions = applier.versions
        self.shard_id: ShardId = applier.shard_id
        """The id of the shard."""
        self.versions: StateVersions = versions
        """The log of states."""
        self.blob: Blob = versions.blob
        """The store of parts and rollups."""
        self.retry: Retry = versions.retry
        """The policy for retries after store failures."""
        self.settings: Settings = versions.settings
        """The settings of this process."""
        self.env: Env = versions.env
        """Clock, sleep, randomness."""
        self.metrics: Metrics = versions.metrics
        """The sink for metrics."""
        self.watch: StateWatch = applier.watch
        """Notifies when this process learns of a newer state, for callers that wait for several things."""

    # -- state and environment ----------------------------------------------------------------------------------------

    @property
    def state(self) -> ShardState:
        """The newest state that this process knows. It may be stale: call `refresh` first if that is not good enough."""
        return self._applier.state

    @property
    def staging_floor_ms(self) -> int:
        """The staging floor, as far as this process knows: no part staged before it can be linked. 0 before the first orphan scan."""
        return self.state.staging_floor_ms or 0

    @property
    def schema_id(self) -> int:
        """The id of the newest registered schema."""
        return max(self.state.schemas)

    @property
    def schema(self) -> Schema:
        """The newest registered schema."""
        return Schema.from_pair(self.state.schemas[self.schema_id])

    @property
    def filtered(self) -> tuple[str, ...]:
        """The columns for which new parts get Bloom filters."""
        stored = self.state.progress.get(FILTERED)
        if stored is None:
            return ()
        from persist_engine.codec.bloom import decode_filtered  # most shards have none

        return decode_filtered(stored.token)

    def refresh(self) -> ShardState:
        """Fetches what other processes committed and returns the state. Linearized: sees everything that was acknowledged before
        the call.
        """
        self._applier.fetch_and_update()
        return self.state

    # -- appending ----------------------------------------------------------------------------------------------------

    def compare_and_append(
        self,
        batch: HollowBatch,
        *,
        writer_id: WriterId,
        purpose: str,
        progress: tuple[str, SourceProgress] | None = None,
        expected_progress: bytes | SourceProgress | None = None,
        commit_info: bytes | None = None,
    ) -> tuple[AppendAnswer, Maintenance]:
        """Appends `batch` iff the shard's upper equals its lower (and the stored progress is the expected one).

        Takes effect exactly once or, with a refusal or InvalidUsage (BatchExpired included), not at all. A mismatch is returned only after
        a fetch that began during the call. One writer must not append concurrently with itself: its later token would hide the outcome of
        the earlier append. Raises Unavailable when the outcome is unknown, and AmbiguousAppend when it can no longer be determined.
        """
        command = commands.CompareAndAppend(
            batch=batch,
            writer_id=writer_id,
            token=IdempotencyToken.from_bytes(self.env.random_bytes(16)),
            debug=self._debug(purpose),
            lease_ms=self.settings.lease.writer_lease_ms,
            progress=progress,
            expected_progress=expected_progress,
            commit_info=commit_info,
            inline_total_bytes_max=self.settings.batch.inline_total_bytes_max,
            claim_ms=self.settings.compaction.claim_ms,
            claim_percent=self.settings.compaction.claim_percent,
            claim_min_version=self.settings.compaction.claim_min_version,
        )
        earliest_ms, held_ms = _NEVER_MS, 0
        backoff: Backoff | None = None  # not None iff some outcome was unknown
        while True:
            try:
                answer, maintenance = self._applier.apply(command, is_write=True)
            except UnknownOutcome as error:
                # Use the time of the decision, and not a clock read before or after the call: the clock may be set back between attempts.
                earliest_ms = min(earliest_ms, error.decided_ms)
                held_ms = max(held_ms, held_until_ms(error.before.writers.get(writer_id)))
                backoff = backoff or self._backoff("compare_and_append")
                backoff.wait(error)
                continue
            except InvalidUsage as error:
                if backoff is not None:  # the command was valid before, so the error is the store's
                    text = f"append of {batch.desc} to {self.shard_id} may or may not have happened: {error}"
                    raise Unavailable(text, shard_id=self.shard_id) from error
                raise
            match answer:
                case commands.Appended():
                    count_inline(self.metrics, batch)
                    return answer, maintenance
                case commands.AlreadyCommitted():
                    check(backoff is not None, f"{command.token} of {self.shard_id} was known before its first use")
                    self.metrics.count("append_already_committed")
                    return commands.Appended(requests=()), NO_MAINTENANCE
                case commands.InlineBackpressure():
                    return answer, NO_MAINTENANCE
                case commands.StagedTooEarly():
                    # Only versions after the floor was raised refuse the batch, so an earlier attempt that succeeded would be visible here.
                    if backoff is not None:
                        self._check_surely_refused(command, earliest_ms, held_ms)
                    raise batch_expired(self.shard_id, answer)
                case commands.UpperMismatch() | commands.ProgressMismatch():
                    if backoff is not None:
                        self._check_surely_refused(command, earliest_ms, held_ms)
                    if (mismatch := self._mismatch(command)) is not None:
                        return mismatch, NO_MAINTENANCE
                case _:
                    raise InvariantViolated(f"compare_and_append of {self.shard_id} answered {answer}")

    def _mismatch(
        self, command: commands.CompareAndAppend
    ) -> commands.UpperMismatch | commands.ProgressMismatch | None:
        """Why a fresh state refuses `command`, or None if it does not. The refusal that led here may come from a stale state."""
        state = self.refresh()
        if command.progress is not None:
            stored = state.progress.get(command.progress[0])
            if not is_expected(stored, command.expected_progress):
                return commands.ProgressMismatch(current=stored)
        if state.trace.upper == command.batch.desc.lower:
            return None
        writer_upper = self._writer_upper(command.writer_id)
        return commands.UpperMismatch(
            current=state.trace.upper, expected=command.batch.desc.lower, writer_upper=writer_upper or MINIMUM
        )

    def _check_surely_refused(self, command: commands.CompareAndAppend, earliest_ms: int, held_ms: int) -> None:
        """Raises AmbiguousAppend unless an earlier attempt certainly failed (`is_refusal_certain`): the caller must check the data."""
        state, now_ms = self.state, self.env.now_ms()
        if not is_refusal_certain(state, command, earliest_ms=earliest_ms, held_ms=held_ms, now_ms=now_ms):
            raise AmbiguousAppend(
                f"append of {command.batch.desc} to {self.shard_id} may or may not have happened: its outcome was unknown, "
                f"and the record of writer {command.writer_id} no longer shows it (shard upper {state.trace.upper}, "
                f"writer upper {self._writer_upper(command.writer_id)})",
                shard_id=self.shard_id,
                writer_id=command.writer_id,
            )

    def _debug(self, purpose: str) -> DebugInfo:
        return DebugInfo(hostname=self.env.hostname(), purpose=purpose)

    def _writer_upper(self, writer_id: WriterId) -> Antichain | None:
        writer = self.state.writers.get(writer_id)
        return None if writer is None else writer.most_recent_write_upper

    def expire_writer(self, writer_id: WriterId) -> tuple[bool, Maintenance]:
        """Removes a writer's registration. Returns whether it existed."""
        return self._expire(commands.ExpireWriter(writer_id=writer_id))

    # -- leased readers -----------------------------------------------------------------------------------------------

    def register_leased_reader(
        self, reader_id: LeasedReaderId, *, lease_ms: int, purpose: str, since_from_critical: bool = False
    ) -> tuple[commands.Registered, Maintenance]:
        """Registers a reader that holds the shard's since, and the blobs of the new version, for `lease_ms` after each heartbeat.
        Overwrites an existing registration.
        """
        command = commands.RegisterLeasedReader(
            reader_id=reader_id, lease_ms=lease_ms, debug=self._debug(purpose), since_from_critical=since_from_critical
        )
        return self._idempotent(command, commands.Registered)

    def heartbeat_leased_reader(self, reader_id: LeasedReaderId) -> tuple[commands.HeartbeatSeen, Maintenance]:
        """Renews the lease. The answer says whether the reader still existed."""
        return self._idempotent(commands.HeartbeatLeasedReader(reader_id=reader_id), commands.HeartbeatSeen)

    def downgrade_since(
        self,
        reader_id: LeasedReaderId,
        *,
        outstanding_seqno: SeqNo | None,
        new_since: Antichain,
        is_heartbeat: bool = False,
    ) -> tuple[commands.SinceDowngraded, Maintenance]:
        """Releases times before `new_since` and versions before `outstanding_seqno` (None: all but the newest), and renews the lease. The
        shard's since advances to what all readers still hold, except for a heartbeat that moves nothing.

        The answer is the reader's since. It never goes back, and is empty when the reader no longer exists.
        """
        command = commands.DowngradeSince(
            reader_id=reader_id, outstanding_seqno=outstanding_seqno, new_since=new_since, is_heartbeat=is_heartbeat
        )
        return self._idempotent(command, commands.SinceDowngraded)

    def expire_leased_reader(self, reader_id: LeasedReaderId) -> tuple[bool, Maintenance]:
        """Removes the reader. Returns whether it existed. The shard's since stays."""
        return self._expire(commands.ExpireLeasedReader(reader_id=reader_id))

    # -- critical readers ---------------------------------------------------------------------------------------------

    def register_critical_reader(
        self, reader_id: CriticalReaderId, *, opaque: bytes, purpose: str
    ) -> tuple[commands.CriticalRegistered, Maintenance]:
        """Registers a reader that holds the shard's since until it is moved or removed. An existing reader keeps its since and opaque,
        which are returned.
        """
        command = commands.RegisterCriticalReader(reader_id=reader_id, opaque=opaque, debug=self._debug(purpose))
        return self._idempotent(command, commands.CriticalRegistered)

    def compare_and_downgrade_since(
        self, reader_id: CriticalReaderId, *, expected_opaque: bytes, new_opaque: bytes, new_since: Antichain
    ) -> tuple[commands.CriticalDowngraded | commands.OpaqueMismatch, Maintenance]:
        """Sets opaque and since iff the opaque is the expected one.

        After an attempt with an unknown outcome, finding `new_opaque` counts as success. Rival owners must therefore not share tokens.
        """
        command = commands.CompareAndDowngradeSince(
            reader_id=reader_id, expected_opaque=expected_opaque, new_opaque=new_opaque, new_since=new_since
        )

        def ours(unknown: CriticalAnswer, known: CriticalAnswer) -> CriticalAnswer:
            if isinstance(known, commands.OpaqueMismatch) and known.opaque == new_opaque:
                return commands.CriticalDowngraded(since=known.since)
            return known

        return self._take(command, (commands.CriticalDowngraded, commands.OpaqueMismatch), ours)

    def expire_critical_reader(self, reader_id: CriticalReaderId) -> tuple[bool, Maintenance]:
        """Removes the reader. Returns whether it existed. The shard's since stays."""
        return self._expire(commands.ExpireCriticalReader(reader_id=reader_id))

    def set_retention(self, retain_ms: int | None) -> tuple[commands.RetentionSet, Maintenance]:
        """Keeps the newest `retain_ms` of times readable from now on. None keeps only what readers hold. The answer holds the since."""
        return self._idempotent(commands.SetRetention(retain_ms), commands.RetentionSet)

    # -- maintenance results ------------------------------------------------------------------------------------------

    def add_rollup(self, seqno: SeqNo, rollup: HollowRollup) -> tuple[commands.RollupAdded, Maintenance]:
        """Links a written rollup. `applied` is true when any attempt may have linked it. Delete its blob only when it is false."""
        return self._take(
            commands.AddRollup(seqno=seqno, rollup=rollup),
            commands.RollupAdded,
            lambda unknown, known: unknown if unknown.applied else known,
        )

    def remove_rollups(
        self, rollups: Sequence[tuple[SeqNo, HollowRollup]]
    ) -> tuple[commands.RollupsRemoved, Maintenance]:
        """Unlinks rollups below the earliest live version. The answer names those that existed at any attempt."""
        return self._take(
            commands.RemoveRollups(rollups=tuple(rollups)),
            commands.RollupsRemoved,
            lambda unknown, known: commands.RollupsRemoved(seqnos=tuple(sorted({*unknown.seqnos, *known.seqnos}))),
        )

    def apply_merge_res(self, res: MergeRes) -> tuple[MergeOutcome, Maintenance]:
        """Replaces a compaction's inputs with its output. `applied` is true when any attempt may have applied it. Delete the output's blobs
        only when it is false, and never those of the inputs.
        """
        answer, maintenance = self._take(
            commands.ApplyMergeRes(res=res),
            commands.MergeApplied,
            lambda unknown, known: unknown if unknown.outcome.applied else known,
        )
        if answer.outcome.applied:
            self.metrics.count("shard_compactions_applied", shard=self.shard_id)
        return answer.outcome, maintenance

    def claim_compactions(
        self, *, max_requests: int, max_bytes: int | None = None
    ) -> tuple[commands.CompactionsClaimed, Maintenance]:
        """Claims up to `max_requests` unclaimed compactions, whose inputs have at most `max_bytes` in total. If the outcome of an attempt
        was unknown, the requests that it claimed are offered again when the claim lapses.
        """
        due = self.settings.compaction
        command = commands.ClaimCompactions(
            max_requests=max_requests,
            claim_ms=due.claim_ms,
            claim_min_version=due.claim_min_version,
            max_bytes=max_bytes,
        )
        return self._idempotent(command, commands.CompactionsClaimed)

    def spine_exert(self, fuel: int) -> tuple[commands.Exerted, Maintenance]:
        """Spends `fuel` on merges in progress. This is for shards without writers, whose appends would spend it."""
        return self._idempotent(commands.SpineExert(fuel=fuel), commands.Exerted)

    def raise_staging_floor(self, floor_ms: int) -> tuple[commands.StagingFloor, Maintenance]:
        """Forbids every process, for ever, to link a part staged before `floor_ms`. The answer is the floor in force."""
        return self._idempotent(commands.RaiseStagingFloor(floor_ms), commands.StagingFloor)

    def overtake(self) -> ShardState:
        """Commits a version that changes nothing, so that any command decided before it and still in flight loses its race. Returns the
        state after it. On a tombstone it commits nothing, and no other command can commit there either.
        """
        self.raise_staging_floor(0)
        return self.state

    def register_schema(self, pair: SchemaPair) -> tuple[commands.SchemaRegistered, Maintenance]:
        """The id of `pair`; None when the shard has other schemas but not this one."""
        return self._idempotent(commands.RegisterSchema(pair=pair), commands.SchemaRegistered)

    def compare_and_evolve_schema(
        self, pair: SchemaPair, *, expected_id: int
    ) -> tuple[commands.SchemaEvolved | commands.SchemaIdMismatch, Maintenance]:
        """Makes `pair` the newest schema iff the newest is `expected_id`; see `shard.schemas`. A mismatch may come from this call's own
        attempt with an unknown outcome, or from a stale state: fetch and check again.
        """
        command = commands.CompareAndEvolveSchema(expected_id=expected_id, pair=pair)
        return self._idempotent(command, (commands.SchemaEvolved, commands.SchemaIdMismatch))

    def become_tombstone(self) -> Maintenance:
        """Empties a shard whose since and upper are empty; FinalizationError otherwise. Runs in bounded steps. Idempotent."""
        self.refresh()
        left = NO_MAINTENANCE
        while True:
            answer, maintenance = self._idempotent(commands.BecomeTombstone(), commands.TombstoneStep)
            left = left.merge(maintenance)
            if not answer.progressed:
                return left

    # -- waiting and reading ------------------------------------------------------------------------------------------

    def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, at or past every upper that was acknowledged before the call. Makes one round trip."""
        return self.refresh().trace.upper

    def wait_for_upper_past(self, frontier: Antichain, timeout_s: float | None = None) -> bool:
        """Waits until `frontier` is strictly before the shard's upper. Returns False when `timeout_s` passed first (0 fetches once). Raises
        Unavailable when the store did not answer meanwhile.
        """
        if frontier.is_empty():
            raise InvalidUsage(f"no upper of {self.shard_id} can be past the closed frontier")
        return self.wait(lambda: True if frontier < self.state.trace.upper else None, timeout_s) is not None

    def snapshot_batches(
        self, as_of: Antichain, timeout_s: float | None = None
    ) -> tuple[HollowBatch, ...] | SinceAhead | None:
        """The batches that hold the contents at `as_of`. Waits until that time is written; None when `timeout_s` passed first.

        Returns SinceAhead when since has passed `as_of`: its contents can never be read again. The caller must hold a lease; otherwise the
        blobs may be deleted.
        """
        if as_of.is_empty():
            raise InvalidUsage(f"a snapshot of {self.shard_id} needs a time, not the closed frontier")

        def check_state() -> tuple[HollowBatch, ...] | SinceAhead | None:
            trace = self.state.trace
            if not trace.since <= as_of:
                return SinceAhead(trace.since)
            if trace.upper <= as_of:
                return None
            return tuple(batch for batch in trace.batches() if batch.desc.lower <= as_of)

        return self.wait(check_state, timeout_s)

    def next_listen_batch(self, frontier: Antichain, timeout_s: float | None = None) -> HollowBatch | None:
        """The batch with lower <= `frontier` < upper. Waits until it is written; None when `timeout_s` passed first."""
        if frontier.is_empty():
            raise InvalidUsage(f"nothing of {self.shard_id} comes after the closed frontier")

        def check_state() -> HollowBatch | None:
            trace = self.state.trace
            if trace.upper <= frontier:
                return None
            for batch in trace.batches():
                if batch.desc.lower <= frontier < batch.desc.upper:
                    return batch
            raise InvariantViolated(f"no batch of {self.shard_id} holds {frontier} although its upper is {trace.upper}")

        return self.wait(check_state, timeout_s)

    def wait(self, check_state: Callable[[], T], timeout_s: float | None = None) -> T:
        """Waits until `check_state` returns something and returns that. Returns None after `timeout_s`; Unavailable if stores fail."""
        with self.versions.retry.until(timeout_s):
            return wait_until(
                check_state,
                refresh=self._applier.fetch_and_update,
                watch=self._applier.watch,
                env=self.env,
                settings=self.settings.watch,
                timeout_s=timeout_s,
                pushed=self._applier,
                metrics=self.metrics,
            )

    # -- private ------------------------------------------------------------------------------------------------------

    def _backoff(self, what: str) -> Backoff:
        return self.versions.retry.backoff(what, shard=self.shard_id)

    def _idempotent(self, command: Command, expected: type[A] | tuple[type[A], ...]) -> tuple[A, Maintenance]:
        """Applies `command` until its outcome is known. The last answer counts."""
        return self._take(command, expected, lambda _, known: known)

    def _expire(self, command: Command) -> tuple[bool, Maintenance]:
        answer, maintenance = self._take(
            command, commands.Expired, lambda unknown, known: unknown if unknown.existed else known
        )
        return answer.existed, maintenance

    def _take(
        self, command: Command, expected: type[A] | tuple[type[A], ...], remember: Callable[[A, A], A]
    ) -> tuple[A, Maintenance]:
        """Applies `command` until its outcome is known. `remember(unknown, known)` combines the answer of an attempt with an unknown
        outcome with that of a later attempt. An event that may have happened counts as happened where forgetting it would lose data.
        """
        backoff: Backoff | None = None
        maybe: list[A] = []
        while True:
            try:
                answer, maintenance = self._applier.apply(command, is_write=False)
            except UnknownOutcome as error:
                maybe.append(self._expect(command, error.answer, expected))
                backoff = backoff or self._backoff(type(command).__name__)
                backoff.wait(error)
                continue
            known = self._expect(command, answer, expected)
            for unknown in maybe:
                known = remember(unknown, known)
            return known, maintenance

    def _expect(self, command: Command, answer: object, expected: type[A] | tuple[type[A], ...]) -> A:
        check(isinstance(answer, expected), f"{type(command).__name__} of {self.shard_id} answered {answer}")
        return cast(A, answer)
