"""Lands a run's staged batches: one compare-and-append of all of them, retried until it wins against concurrent writers.

`persist_engine.flow.append_run` makes the decisions. A landing owns the staged batches that it receives. It appends them, deletes them
if no append of them can have happened, or leaves them to the orphan scan. Knows no Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import (
    Appended,
    AppendOutcome,
    Batch,
    InlinePart,
    ProgressMismatch,
    ReadHandle,
    SinceAhead,
    SourceProgress,
    UpperMismatch,
    WriteHandle,
    gathered,
)
from persist_engine.base.env import Env
from persist_engine.base.errors import Fenced, InvalidUsage, MissingBlob, SchemaMismatch, Unavailable
from persist_engine.base.settings import MIB, Settings
from persist_engine.flow.append_run import (
    AfterMismatch,
    AppendAgain,
    Correct,
    Late,
    Move,
    Recompute,
    Staged,
    after_progress_mismatch,
    after_upper_mismatch,
)
from persist_engine.flow.mint_run import AlreadyDone, RunToken, Superseded
from persist_engine.model.frontier import MINIMUM, Antichain, Description

from persist_spark.envelopes.run_keys import RunKeys
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError

#: The number of appends that a landing may lose. Beside 50 commits a second on a busy machine it loses about three, and at most fourteen
#: (docs/adr/0006-sinks.md). It loses this many in a row only when other writers leave no gap at all.
TRIES_MAX = 1000
#: The number of inline parts that corrections may accumulate before the landing joins them. Joining takes as long as the rest of a
#: correction, and a landing must be faster than the interval between other writers' commits.
INLINE_PARTS_MAX = 16
#: The driver's memory for reading what other writers wrote meanwhile.
CHANGES_MEMORY_BYTES = 64 * MIB
#: The largest part that the driver stages. It holds several at once, beside a JVM.
DRIVER_PART_BYTES_MAX = 16 * MIB


def driver_settings(settings: Settings) -> Settings:
    """The settings for the writer of a landing, made from the `settings` of its tasks."""
    target = min(settings.batch.target_part_bytes, DRIVER_PART_BYTES_MAX)
    return replace(settings, batch=replace(settings.batch, target_part_bytes=target, combine_inline=False))


@dataclass(frozen=True, slots=True)
class Landed:
    """All batches were appended, once, at [lower, upper). `updates` is their number of updates."""

    lower: Antichain
    upper: Antichain
    updates: int


Outcome = Landed | AlreadyDone | Superseded | Recompute | Late


@dataclass(kw_only=True)
class Landing:
    """The append of one run's staged batches. For one thread and one use."""

    writer: WriteHandle
    """Opened with `driver_settings`."""
    reader: ReadHandle | None
    """The lease under which the persisted side was read, opened before the read. None when it was not read."""
    staged: Staged
    batches: Sequence[Batch]
    sink_id: str | None
    """The sink under which the run's token is committed with the data. None: only the data are committed."""
    run_token: RunToken
    expected: SourceProgress | None
    """The sink's progress when the run began."""
    env: Env
    log: Log
    where: str | Sequence[Any] | None = None
    """Limits the corrections of a run that reads back to rows that satisfy this condition. None: all rows."""
    keys: RunKeys | None = None
    """Limits the corrections of a run that reads back to rows of these keys, which satisfy `where`. None: rows of all keys."""
    seen: Antichain | None = None
    """The shard's upper, if it is known to be past the batches' lower. The batches are then moved before the first append."""
    are_shared: bool = False
    """Whether another driver of the same run may append the same batches. An append then expects the sink's progress with its upper,
    because the token alone may have been stored again since (`is_expected`). The batches are deleted only when the sink's progress shows
    that no driver will ever append them. Otherwise they are left to the orphan scan.
    """
    tries_max: int = TRIES_MAX

    def land(self) -> Outcome:
        """Appends the batches. After each lost append it moves and corrects them and tries again. On any outcome other than Landed the
        batches are deleted (see `are_shared`).

        Raises ConfigurationError (closed shard, newer schema), and Unavailable after `tries_max` lost appends; both delete the batches. Any
        other exception leaves their blobs, because an append of them may have happened.
        """
        self._gather(parts_max=1)
        if self.seen is not None and self.staged.lower < self.seen:
            end = self._follow(self.seen)
            if end is not None:
                self._delete()
                return end
        for _ in range(self.tries_max):
            answer = self._try()
            match answer:
                case Appended():
                    updates = sum(batch.rows for batch in self.batches)
                    return Landed(self.staged.lower, self.staged.upper, updates)
                case ProgressMismatch(current=progress):
                    self._delete(ended=None if progress is None else progress.upper)
                    return after_progress_mismatch(progress, run=self.run_token.run)
                case UpperMismatch(current=current):
                    self.log.event("lost_append", expected=self.staged.lower.time, current=current.time)
                    end = self._follow(current)
                    if end is not None:
                        self._delete()
                        return end
                case _:
                    assert_never(answer)
        self._delete()
        raise Unavailable(
            f"other writers of shard {self.writer.shard_id} were faster {self.tries_max} times in a row; nothing was appended"
        )

    def _try(self) -> AppendOutcome:
        expected = self.expected
        return self.writer.compare_and_append_batch(
            self.batches,
            expected_upper=self.staged.lower,
            new_upper=self.staged.upper,
            progress=None if self.sink_id is None else (self.sink_id, self.run_token.encode()),
            expected_progress=expected.token if expected is not None and not self.are_shared else expected,
        )

    def _follow(self, current: Antichain) -> Late | Recompute | None:
        """Fits the batches to the shard's `current` upper. None when they fit; otherwise the outcome that ends the landing."""
        match self._decide(current):
            case AppendAgain(lower, upper):
                self.log.event("append_again", lower=lower.time)
                self.staged = replace(self.staged, lower=lower, upper=upper)
            case Move(lower, time):
                self._move(lower, time)
                self.log.event("moved", lower=lower.time, time=time)
            case Correct() as decision:
                return self._correct(decision)
            case Recompute() | Late() as end:
                return end
        return None

    def _decide(self, current: Antichain) -> AfterMismatch:
        since = MINIMUM if self.reader is None else self.reader.since
        try:
            return after_upper_mismatch(
                self.staged, current, now_ms=self.writer.clock_time(self.env.now_ms()), since=since
            )
        except InvalidUsage as error:
            self._delete()
            raise ConfigurationError(f"shard {self.writer.shard_id}: {error}") from error

    def _move(self, lower: Antichain, time: int) -> None:
        """Moves the batches to `lower`, with all their updates at `time`. Changes only metadata.

        SUBTLE: this includes batches that already have this time. Either all batches of one append or none must be marked as having
        rewritten times. In a mixed append, the engine requires unmarked batches to be staged at `lower` or later.
        """
        upper = Antichain.of(time + 1)
        for batch in self.batches:
            batch.rewrite_times(Antichain.of(time), upper)
        self.staged = replace(self.staged, lower=lower, upper=upper, time=time)

    # -- retracting what others wrote --------------------------------------------------------------------------------

    def _correct(self, decision: Correct) -> Recompute | None:
        """Stages the correction that the decision describes. Together the batches then retract the shard's contents at its newest time: the
        contents that the first batches were computed against, and everything written since. With `keys` they retract only rows of these
        keys. Returns Recompute when the run must compare its rows with the rows of other writers.
        """
        assert self.reader is not None
        try:
            # This check comes after the upper is known, so it sees the schema of all rows below that upper.
            refuse_outgrown_schema(self.writer)
        except ConfigurationError:
            self._delete()
            raise
        try:
            batch = self._negated(decision, self.reader)
        except (Fenced, MissingBlob):
            if not self.reader.since.is_empty():
                raise
            batch = None  # the lease expired during the read
        if batch is None:
            return Recompute()
        self.batches = [*self.batches, batch]
        self._move(decision.lower, decision.time)
        self.staged = replace(self.staged, as_of=decision.upto)
        self._gather(parts_max=INLINE_PARTS_MAX)
        self.log.event("corrected", lower=decision.lower.time, time=decision.time, updates=batch.rows)
        return None

    def _negated(self, decision: Correct, reader: ReadHandle) -> Batch | None:
        """Stages the negation of the rows written after `decision.after`, part by part. None when these times are no longer readable, or
        when the run may not retract the rows written to its keys.
        """
        # Without `after` all changes count. Their sum is the contents, which stay readable after since has passed the first changes.
        written = (
            reader.snapshot(decision.upto, where=self.where)
            if decision.after is None
            else reader.changes(decision.after, decision.upto, where=self.where)
        )
        if isinstance(written, SinceAhead):
            return None
        with written, self.writer.builder(decision.lower) as builder:
            for changed in written.to_batches(memory_bytes=CHANGES_MEMORY_BYTES):
                rows = changed if self.keys is None else self.keys.among(changed)
                if rows.num_rows and self.keys is not None and not self.keys.may_retract:
                    return None
                builder.add(negated(rows, time=decision.time))
            return builder.finish(decision.upper)

    # -- the batches -------------------------------------------------------------------------------------------------

    def _gather(self, *, parts_max: int) -> None:
        """Joins the inline parts when there are more than `parts_max`, and uploads them when they are too large together. This happens here
        and not in the append (the writer's `combine_inline` is off), because an append that uploads first loses to faster writers.
        """
        if sum(isinstance(part, InlinePart) for batch in self.batches for part in batch.hollow.parts) <= parts_max:
            return
        writer = self.writer
        desc = Description(self.staged.lower, self.staged.upper, MINIMUM)
        self.batches = gathered(
            self.batches, desc, store=writer.machine, schema=writer.schema, schema_id=writer.schema_id
        )

    def _delete(self, *, ended: Antichain | None = None) -> None:
        """Deletes the staged batches. The caller must be certain that this driver did not append them. `ended`: the upper of the sink's
        progress, if that progress is not the one that this run's appends expect.

        SUBTLE: another driver of this run may expect that progress. It can append a shared batch whose lower is at or past `ended`, so such
        a batch is left. No driver can append the other shared batches any more. They are deleted as copies, so the delete keeps a batch
        that another driver has appended, because the shard names it.
        """
        batches = list(self.batches)
        if self.are_shared:
            obsolete = [] if ended is None else [batch for batch in batches if not ended <= batch.lower]
            for batch in batches:
                if batch not in obsolete:
                    batch.mark_spent("left to another driver of its run")
            batches = [self.writer.batch_from_transmittable(batch.to_transmittable()) for batch in obsolete]
        self.writer.delete_batches(batches)


def refuse_outgrown_schema(writer: WriteHandle) -> None:
    """Raises ConfigurationError when rows below the last known upper may have fields of a newer schema. The rows that a run reads back lack
    these fields, so corrections of them would be wrong. Rows of a newer schema that are written later raise the upper, so the append is
    refused.
    """
    try:
        writer.check_newest_schema()
    except SchemaMismatch as error:
        raise ConfigurationError(f"schema: {error}") from error


def negated(rows: pa.RecordBatch, *, time: int) -> pa.Table:
    """Updates that retract `rows` at `time`."""
    columns = [
        rows.column("key"),
        rows.column("val"),
        pa.repeat(pa.scalar(time, pa.int64()), rows.num_rows),
        pc.negate_checked(rows.column("diff")),
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)
