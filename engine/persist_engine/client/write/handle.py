"""WriteHandle: appends to one shard (spec 9.3 to 9.6, 10.6).

Owns the steps of an append: it checks the batches, stages stale copies again, joins all parts under one description,
swaps them in, and then ends or deletes every batch. It performs no maintenance: `Appended` returns it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from persist_engine.base.errors import (
    BatchNotFromThisShard,
    InvalidBounds,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    SchemaMismatch,
)
from persist_engine.base.version import check_readable
from persist_engine.client.arguments import (
    expect,
    expect_all,
    expect_commit_info,
    expect_count,
    expect_progress,
    expect_seconds,
)
from persist_engine.client.expiring import Expiring
from persist_engine.client.write.batch import Batch, BatchBuilder, flush_inline_parts, without_inline_parts
from persist_engine.client.write.copies import named_keys, restaged, stale_copies
from persist_engine.client.write.joined import combined_inline_parts, joined
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.codec.batch import decode_transmittable
from persist_engine.model import commands
from persist_engine.model.batch import HollowBatch, check_truncation
from persist_engine.model.frontier import MINIMUM, Antichain, Description, TimeLike, frontier_of
from persist_engine.model.ids import RunId, ShardId, WriterId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.queries import clock_time
from persist_engine.model.state import SourceProgress
from persist_engine.rows.ingest import Updates
from persist_engine.rows.schema import Schema
from persist_engine.shard.machine import Machine

_log = logging.getLogger(__name__)


class WriteHandle(Expiring):
    """Appends to one shard. Thread-safe: appends of one handle take turns. A context manager that expires the handle on
    exit.

    The shard's state lists the writer from its first append until `expire`, or until its lease lapses. InvalidUsage is
    raised before anything is committed. After any other error the outcome is unknown and the blobs stay. Unavailable
    occurs only with `settings.retry.give_up_ms`, or when the client was closed meanwhile.
    """

    def __init__(self, machine: Machine, schema: Schema, schema_id: int, *, purpose: str) -> None:
        self._machine = machine
        self._schema, self._schema_id = schema, schema_id
        self._purpose = purpose
        self._append_lock = threading.Lock()
        self._upper = machine.state.trace.upper
        self._registered = False
        self._expired = False
        self._pid = os.getpid()
        self._writer_id = WriterId.from_bytes(machine.env.random_bytes(16))

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def writer_id(self) -> WriterId:
        """The id of this writer in the shard's state. A forked child has another id: an append of unknown outcome recognises itself by the
        record under this id, which no other process may replace or remove.
        """
        if self._pid != os.getpid():
            self._pid, self._registered = os.getpid(), False
            self._writer_id = WriterId.from_bytes(self._machine.env.random_bytes(16))
        return self._writer_id

    @property
    def shard_id(self) -> ShardId:
        """The id of the shard."""
        return self._machine.shard_id

    @property
    def schema(self) -> Schema:
        """The types of keys and values."""
        return self._schema

    @property
    def schema_id(self) -> int:
        """The id of that schema in the shard."""
        return self._schema_id

    @property
    def machine(self) -> Machine:
        """The shard's machine, for code that performs the maintenance which appends return."""
        return self._machine

    @property
    def upper(self) -> Antichain:
        """The shard's upper as this handle last saw it. It is never past the true one. Makes no round trip."""
        return self._upper

    def check_newest_schema(self) -> None:
        """Raises SchemaMismatch when the shard, as far as this process knows, has a newer schema than this handle. This is for a
        caller that retracts the rows that it reads.

        Under an older schema, rows appear without the fields that the shard got since. A retraction of such a row matches no
        row: the real row would stay, and a row that never existed would be retracted. The caller reads rows up to some
        upper. A check after it saw that upper covers all of them, since a schema is registered before anything is appended
        under it.
        """
        newest = self._machine.schema_id
        if newest != self._schema_id:
            raise SchemaMismatch(
                f"shard {self.shard_id} has evolved to schema {newest}, this handle has {self._schema_id}: retracting rows "
                "needs the newest, open a new handle with it",
                requested=repr(self._schema),
                actual=repr(self._machine.schema),
            )

    def clock_time(self, now_ms: int) -> int:
        """The time now by the clock of the shard's table. The next write is at this time, or at the upper if that is later (spec 17.15)."""
        return clock_time(self._machine.state, expect_count(now_ms, "now_ms", least=0))

    def shared_upper(self) -> Antichain:
        """The newest upper that this process knows. Makes no round trip."""
        self._upper = self._upper.join(self._machine.state.trace.upper)
        return self._upper

    def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, at or past every upper that was acknowledged before the call. Makes one round trip."""
        self._upper = self._upper.join(self._machine.fetch_recent_upper())
        return self._upper

    def wait_for_upper_past(self, frontier: TimeLike, timeout: float | None = None) -> bool:
        """Waits until `frontier` is strictly before the shard's upper. See Machine.wait_for_upper_past."""
        expect_seconds(timeout, "timeout")
        past = self._machine.wait_for_upper_past(frontier_of(frontier), timeout)
        self.shared_upper()
        return past

    # -- staging ------------------------------------------------------------------------------------------------------

    def builder(self, lower: TimeLike) -> BatchBuilder:
        """A builder that stages updates at or beyond `lower`. `BatchBuilder.finish(upper)` makes the batch."""
        self._check_open()
        lower = frontier_of(lower, "lower")
        return BatchBuilder(self._machine, lower, schema=self._schema, schema_id=self._schema_id)

    def batch(self, updates: Updates, *, lower: TimeLike, upper: TimeLike) -> Batch:
        """Stages `updates` as a batch of [lower, upper). It is durable when this returns, but not appended."""
        self._check_open()
        lower, upper = _bounds(lower, upper)
        builder = BatchBuilder(self._machine, lower, schema=self._schema, schema_id=self._schema_id, upper=upper)
        builder.add(updates)
        return builder.finish(upper)

    def batch_from_transmittable(self, data: bytes, *, is_only_copy: bool = False) -> Batch:
        """Makes the batch that `Batch.to_transmittable` sent. Raises BatchNotFromThisShard, Incompatible or CorruptData. Raises
        SchemaMismatch for a schema that the shard does not know.

        With `is_only_copy`, the caller guarantees that no other batch was or will be made of these bytes, in any process,
        and that none of the batch's blobs was appended or deleted. The batch then counts as one that this handle staged:
        every append links it as it is, even if it is rewritten or appended past its lower, and a deletion does not check
        what the shard names. A false guarantee loses data: the blobs of an appended copy are deleted, or blobs that the
        shard no longer names are linked again and are missing when they are read.

        Copies are harmless under two conditions. Each append of a copy expects a progress of the sink, with its upper, from
        before the batch's lower. No copy is deleted before that progress has moved past that lower, and the deletion is then
        done without this guarantee.
        """
        expect(is_only_copy, bool, "is_only_copy", "True or False")
        shard_id, version, hollow = decode_transmittable(expect(data, bytes, "data", "bytes"))
        if shard_id != self.shard_id:
            raise BatchNotFromThisShard(
                f"batch of shard {shard_id} given to shard {self.shard_id}",
                batch_shard=shard_id,
                handle_shard=self.shard_id,
            )
        check_readable(version, f"transmitted batch {hollow.desc} of {shard_id}")
        self._check_schemas(hollow)
        return Batch(
            self._machine,
            hollow,
            schema=self._schema,
            shard_id=shard_id,
            version=version,
            named_keys=None if is_only_copy else self._named_keys,
        )

    def delete_batches(self, batches: Sequence[Batch]) -> None:
        """Deletes each batch like `Batch.delete`, with one check of the shard for all. The caller must not append the batches,
        now or later.
        """
        left = [batch for batch in expect_all(batches, Batch, "batches", "batches") if not batch.is_deleted]
        for batch in left:
            batch.check_deletable()
        is_doubtful = any(batch.may_have_copies and batch.has_blobs for batch in left)
        named = self._named_keys(left) if is_doubtful else ()
        for batch in left:
            batch.delete_but(named)

    def discard(self, batch: Batch) -> None:
        """Like `Batch.delete`, but only logs a failure, which must not hide the answer of an append. The blobs then stay."""
        expect(batch, Batch, "batch", "a Batch")
        try:
            batch.delete()
        except PersistError as error:
            batch.mark_spent("discarded")
            text = "left blobs %s behind: %s"
            _log.warning(text, list(batch.hollow.blob_keys()), error, extra={"shard": self.shard_id})

    # -- appending ----------------------------------------------------------------------------------------------------

    def compare_and_append(
        self,
        updates: Updates,
        *,
        expected_upper: TimeLike,
        new_upper: TimeLike,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | None = None,
        commit_info: bytes | None = None,
    ) -> AppendOutcome:
        """Appends `updates` with times in [expected_upper, new_upper) iff the shard's upper is `expected_upper`. Takes effect
        exactly once or not at all. Deletes parts that were staged and not appended.

        Returns UpperMismatch when nothing was appended because the upper is another one. The caller must check the answer.
        With `progress` (sink id, token), stores the token with the data iff the stored token is `expected_progress`;
        otherwise appends nothing and returns ProgressMismatch. `commit_info`, up to COMMIT_INFO_BYTES_MAX bytes, is stored
        in the log with the append, and stays until the log is truncated past it.
        """
        expected_upper, new_upper = _bounds(expected_upper, new_upper, "expected_upper", "new_upper")
        expect_progress(progress, expected_progress)
        expect_commit_info(commit_info)
        batch = self.batch(updates, lower=expected_upper, upper=new_upper)
        try:
            outcome = self.compare_and_append_batch(
                [batch],
                expected_upper=expected_upper,
                new_upper=new_upper,
                progress=progress,
                expected_progress=expected_progress,
                commit_info=commit_info,
            )
        except InvalidUsage:
            self.discard(batch)
            raise
        if not isinstance(outcome, Appended):
            self.discard(batch)
        return outcome

    def append(self, updates: Updates, *, lower: TimeLike, upper: TimeLike) -> Appended | UpperMismatch:
        """Appends those of `updates` that are not yet written. For many writers of identical data. See `append_batch`."""
        lower, upper = _bounds(lower, upper)
        batch = self.batch(updates, lower=lower, upper=upper)
        try:
            return self.append_batch(batch, lower, upper)
        except InvalidUsage:
            self.discard(batch)
            raise

    def append_batch(self, batch: Batch, lower: TimeLike, upper: TimeLike) -> Appended | UpperMismatch:
        """Appends the updates of `batch` at or past the shard's upper, however much of [lower, upper) other writers wrote.

        Returns Appended even when the other writers wrote all of it. Returns UpperMismatch only when there is a gap before
        `lower`. In both cases the batch is spent: it is part of the shard, or deleted.
        """
        lower, upper = _bounds(lower, upper)
        expect(batch, Batch, "batch", "a Batch")
        while True:
            outcome = self.compare_and_append_batch([batch], expected_upper=lower, new_upper=upper)
            match outcome:
                case Appended():
                    return outcome
                case UpperMismatch(current=current) if lower < current < upper:
                    lower = current
                case UpperMismatch(current=current):
                    self.discard(batch)
                    return Appended(upper=current) if upper <= current else outcome
                case _:
                    raise InvariantViolated(f"append without progress answered {outcome}")

    def compare_and_append_batch(
        self,
        batches: Sequence[Batch],
        *,
        expected_upper: TimeLike,
        new_upper: TimeLike,
        progress: tuple[str, bytes] | None = None,
        expected_progress: bytes | SourceProgress | None = None,
        commit_info: bytes | None = None,
    ) -> AppendOutcome:
        """Appends all of `batches`, staged by any process, in one step iff the shard's upper is `expected_upper`.

        Every batch must cover [expected_upper, new_upper); its updates outside this interval are left out. After Appended the
        batches are spent; otherwise they stay as they are and belong to the caller. `progress` and `commit_info` are as in
        `compare_and_append`; an `expected_progress` with an upper must be stored with this upper.

        The append links the blobs of a batch as they are, with one exception: the batch may have been appended before, from
        a copy of its bytes (see `batch_from_transmittable`) or by a call of unknown outcome, and `expected_upper` is past its
        lower. Then its updates are staged again, because the shard may have unlinked its blobs; raises BatchExpired when the
        blobs are gone. With `progress`, they are not staged again as long as this sink stored no progress past the batch's
        lower and the batch's times were not rewritten. So append copies of a batch only with `progress`.
        """
        self._check_open()
        expected_upper, new_upper = _bounds(expected_upper, new_upper, "expected_upper", "new_upper")
        expect_progress(progress, expected_progress)
        expect_commit_info(commit_info)
        expect_all(batches, Batch, "batches", "batches")
        self._check_batches(batches, expected_upper, new_upper)
        desc = Description(expected_upper, new_upper, MINIMUM)
        stale = stale_copies(self._machine, batches, desc, progress, expected_progress)
        if isinstance(stale, UpperMismatch | ProgressMismatch):
            return self._noted(stale)
        own: list[Batch] = []  # batches that this call staged to replace some of `batches`
        try:
            if stale:
                own.append(restaged(stale, desc, self._machine))
            linked = [*(batch for batch in batches if batch not in stale), *own]
            combined = self._combined(linked, desc)
            own += [] if combined is None else [combined]
            answer, maintenance = self._append_all(
                linked, combined, desc, progress, expected_progress, commit_info=commit_info
            )
            is_appended = isinstance(answer, commands.Appended)
            # Mark the batches at once: a clean-up after a later failure must not delete linked blobs.
            for batch in (*linked, *own) if is_appended else ():
                batch.mark_spent("appended")
        except InvalidUsage:
            self._discard_all(own)
            raise
        except BaseException:
            # An attempt before this error may have committed, and a clean-up must not delete linked blobs.
            for batch in batches:
                batch.note_unknown_outcome(self._named_keys)
            raise
        if not is_appended:
            self._discard_all(own)
        match answer:
            case commands.Appended():
                self._retire(stale, new_upper)
                return self._noted(Appended(upper=new_upper, maintenance=maintenance))
            case commands.UpperMismatch(current=current):
                return self._noted(UpperMismatch(current=current, expected=expected_upper))
            case commands.ProgressMismatch(current=stored):
                return ProgressMismatch(current=stored)
        raise InvariantViolated(f"append to {self.shard_id} answered {answer}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Waits for the appends under way, then removes the writer from the shard's state if it ever appended. The handle
        refuses all work afterwards. Idempotent.
        """
        self._expired = True
        # Never do this during an append: by the record that is removed here, an append of unknown outcome recognises itself.
        with self._append_lock:
            writer_id = self.writer_id
            if self._registered:
                self._machine.expire_writer(writer_id)
                self._registered = False

    def __repr__(self) -> str:
        return f"WriteHandle({self.writer_id} of {self.shard_id})"

    # -- private ------------------------------------------------------------------------------------------------------

    def _combined(self, batches: Sequence[Batch], desc: Description) -> Batch | None:
        if not self._machine.settings.batch.combine_inline or desc.lower == desc.upper:
            return None
        return combined_inline_parts(batches, desc, store=self._machine, schema=self._schema, schema_id=self._schema_id)

    def _append_all(
        self,
        batches: Sequence[Batch],
        combined: Batch | None,
        desc: Description,
        progress: tuple[str, bytes] | None,
        expected_progress: bytes | SourceProgress | None,
        *,
        commit_info: bytes | None,
    ) -> tuple[commands.Answer, Maintenance]:
        """Swaps in the parts of all batches, with `combined` in place of their inline parts. When the shard takes no more
        inline data, flushes all inline parts and tries once more.
        """
        for last_try in (False, True):
            hollows = [batch.hollow for batch in batches]
            if combined is not None:
                hollows = [*map(without_inline_parts, hollows), combined.hollow]
            answer, maintenance = self._swap_in(
                joined(hollows, desc), desc.upper, progress, expected_progress, commit_info=commit_info
            )
            if not isinstance(answer, commands.InlineBackpressure):
                return answer, maintenance
            if last_try:
                raise InvariantViolated(f"shard {self.shard_id} refuses inline parts of an append that has none")
            self._machine.metrics.count("inline_backpressure")
            flush_inline_parts(batches if combined is None else [combined])
        raise AssertionError("unreachable")

    def _swap_in(
        self,
        hollow: HollowBatch,
        new_upper: Antichain,
        progress: tuple[str, bytes] | None,
        expected_progress: bytes | SourceProgress | None,
        *,
        commit_info: bytes | None,
    ) -> tuple[commands.Answer, Maintenance]:
        """One compare-and-append of this writer. Its threads take turns: see Machine.compare_and_append."""
        with self._append_lock:
            self._check_open()
            writer_id = self.writer_id
            self._registered = True
            return self._machine.compare_and_append(
                hollow,
                writer_id=writer_id,
                purpose=self._purpose,
                progress=None if progress is None else (progress[0], SourceProgress(progress[1], new_upper)),
                expected_progress=expected_progress,
                commit_info=commit_info,
            )

    def _noted(self, outcome: AppendOutcome) -> AppendOutcome:
        """Returns `outcome`, and records the upper in it as the one that this handle last saw."""
        match outcome:
            case Appended(upper=upper) | UpperMismatch(current=upper):
                self._upper = self._upper.join(upper)
            case ProgressMismatch():
                pass
        return outcome

    def _retire(self, stale: Sequence[Batch], upper: Antichain) -> None:
        """Ends batches whose updates were linked under other keys. Deletes their own blobs when no copy of them can be
        appended past `upper`.
        """
        for batch in stale:
            if batch.upper <= upper:
                self.discard(batch)
            batch.mark_spent("appended")

    def _discard_all(self, own: Sequence[Batch]) -> None:
        for batch in own:
            self.discard(batch)

    def _named_keys(self, batches: Sequence[Batch]) -> frozenset[str]:
        return named_keys(self._machine, batches)

    def _check_open(self) -> None:
        if self._expired:
            raise InvalidUsage(f"writer {self.writer_id} of shard {self.shard_id} has expired")

    def _check_batches(self, batches: Sequence[Batch], lower: Antichain, upper: Antichain) -> None:
        runs: set[RunId] = set()
        for batch in batches:
            batch.check_usable()
            if batch.shard_id != self.shard_id:
                raise BatchNotFromThisShard(
                    f"batch of shard {batch.shard_id} given to shard {self.shard_id}",
                    batch_shard=batch.shard_id,
                    handle_shard=self.shard_id,
                )
            check_readable(batch.version, f"batch {batch.hollow.desc} of {batch.shard_id}")
            # Copies of one batch, made from the same bytes, share the ids of their runs.
            own = {meta.run_id for meta in batch.hollow.run_metas if meta.run_id is not None}
            if not own.isdisjoint(runs) or sum(batch is other for other in batches) > 1:
                raise InvalidUsage(f"batch {batch.hollow.desc} of {batch.shard_id} is appended twice in one call")
            runs |= own
        rewritten = any(part.ts_rewrite is not None for batch in batches for part in batch.hollow.parts)
        for batch in batches:
            check_truncation(batch.hollow, lower, upper, any_rewritten=rewritten)

    def _check_schemas(self, hollow: HollowBatch) -> None:
        named = {each.schema_id for each in (*hollow.parts, *hollow.run_metas) if each.schema_id is not None}
        if not named <= set(self._machine.state.schemas) and not named <= set(self._machine.refresh().schemas):
            unknown = sorted(named - set(self._machine.state.schemas))
            raise SchemaMismatch(
                f"batch {hollow.desc} was written under schema {unknown[0]}, which shard {self.shard_id} does not have",
                requested=unknown[0],
                actual=tuple(self._machine.state.schemas),
            )


def _bounds(
    lower: TimeLike, upper: TimeLike, lower_name: str = "lower", upper_name: str = "upper"
) -> tuple[Antichain, Antichain]:
    """Both bounds as frontiers. Raises InvalidBounds when no time can lie between them."""
    lower, upper = frontier_of(lower, lower_name), frontier_of(upper, upper_name)
    if lower.is_empty() or not lower <= upper:
        raise InvalidBounds(f"upper {upper} is before lower {lower}", lower=lower, upper=upper)
    return lower, upper
