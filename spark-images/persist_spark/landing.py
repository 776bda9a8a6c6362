"""Landing what a run staged: one compare-and-append of all of it, tried until it wins, beside writers that never rest.

The decisions are `persist_engine.flow.append_run`'s. Owns the staged batches from the moment they are handed over: they
are appended, or deleted where nothing of them can have been appended, or left to the orphan scan. Knows no Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

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
from persist_engine.flow.mint_run import AlreadyDone, Superseded
from persist_engine.model.frontier import MINIMUM, Antichain, Description

from persist_spark.report import Log
from persist_spark.spec import ConfigurationError

#: Appends of one landing that others may win. Beside 50 commits a second on a busy machine it loses some three, fourteen at
#: most (docs/adr/0006-sinks.md): so many in a row are lost only where writers leave no gap at all.
TRIES_MAX = 1000
#: Inline parts that corrections may add up to before they are joined. Joining takes as long as all else that a correction
#: does, and a landing must be quicker than the commits of others follow each other.
INLINE_PARTS_MAX = 16
#: Memory of reading back what others wrote meanwhile, in the driver.
CHANGES_MEMORY_BYTES = 64 * MIB
#: Parts that the driver stages are no larger: it holds several at once, beside a JVM.
DRIVER_PART_BYTES_MAX = 16 * MIB


def driver_settings(settings: Settings) -> Settings:
    """What the writer of a landing runs with, where tasks run with `settings`."""
    target = min(settings.batch.target_part_bytes, DRIVER_PART_BYTES_MAX)
    return replace(settings, batch=replace(settings.batch, target_part_bytes=target, combine_inline=False))


@dataclass(frozen=True, slots=True)
class Landed:
    """Everything was appended, once, at [lower, upper): so many updates."""

    lower: Antichain
    upper: Antichain
    updates: int


Outcome = Landed | AlreadyDone | Superseded | Recompute | Late


@dataclass(kw_only=True)
class Landing:
    """One run's staged batches on their way into the shard. Used by one thread, once."""

    writer: WriteHandle
    """With `driver_settings`."""
    reader: ReadHandle | None
    """The lease under which the persisted side was read back, open since before it was; None when it was not."""
    staged: Staged
    batches: Sequence[Batch]
    sink_id: str
    run_token: bytes
    expected: SourceProgress | None
    """The sink's progress when the run began."""
    env: Env
    log: Log

    def land(self) -> Outcome:
        """Append the batches, moved and corrected as often as others are faster. On any other outcome than Landed they
        are deleted.

        Raises ConfigurationError (closed shard, newer schema) and, after TRIES_MAX lost appends, Unavailable, with the
        batches deleted. Any other exception leaves their blobs alone, for an append of them may have happened.
        """
        self._gather(parts_max=1)
        for _ in range(TRIES_MAX):
            answer = self._try()
            match answer:
                case Appended():
                    updates = sum(batch.rows for batch in self.batches)
                    return Landed(self.staged.lower, self.staged.upper, updates)
                case ProgressMismatch(current=progress):
                    self._delete()
                    return after_progress_mismatch(progress, run=self.run_token)
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
            f"other writers of shard {self.writer.shard_id} were faster {TRIES_MAX} times in a row; nothing was appended"
        )

    def _try(self) -> AppendOutcome:
        return self.writer.compare_and_append_batch(
            self.batches,
            expected_upper=self.staged.lower,
            new_upper=self.staged.upper,
            progress=(self.sink_id, self.run_token),
            expected_progress=None if self.expected is None else self.expected.token,
        )

    def _follow(self, current: Antichain) -> Late | Recompute | None:
        """Make the batches fit where the shard ends now; None: they do."""
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
            return after_upper_mismatch(self.staged, current, now_ms=self.env.now_ms(), since=since)
        except InvalidUsage as error:
            self._delete()
            raise ConfigurationError(f"shard {self.writer.shard_id}: {error}") from error

    def _move(self, lower: Antichain, time: int) -> None:
        """Register the batches at `lower`, all their updates at `time`. Metadata only.

        SUBTLE: also those that have this time already. Of batches that are appended together either none says that its
        times were rewritten, or all do: else one that does not must have been staged at `lower` or later.
        """
        upper = Antichain.of(time + 1)
        for batch in self.batches:
            batch.rewrite_times(Antichain.of(time), upper)
        self.staged = replace(self.staged, lower=lower, upper=upper, time=time)

    # -- taking back what others wrote -------------------------------------------------------------------------------

    def _correct(self, decision: Correct) -> Recompute | None:
        """As the decision says. The shard's contents at its last time are then taken back in full, whatever is in them:
        what the first batches are the difference to, and all that came since.
        """
        assert self.reader is not None
        try:
            # The upper was seen before: rows of a newer schema below it would show.
            refuse_outgrown_schema(self.writer)
        except ConfigurationError:
            self._delete()
            raise
        try:
            batch = self._negated(decision, self.reader)
        except (Fenced, MissingBlob):
            if not self.reader.since.is_empty():
                raise
            batch = None  # the lease ran out under the reading
        if batch is None:
            return Recompute()
        self.batches = [*self.batches, batch]
        self._move(decision.lower, decision.time)
        self.staged = replace(self.staged, as_of=decision.upto)
        self._gather(parts_max=INLINE_PARTS_MAX)
        self.log.event("corrected", lower=decision.lower.time, time=decision.time, updates=batch.rows)
        return None

    def _negated(self, decision: Correct, reader: ReadHandle) -> Batch | None:
        """The negation of what was written after `decision.after`, staged part by part; None when it cannot be told."""
        # From the beginning on, the contents say the same as all that led to them, and since may be past the beginning.
        news = (
            reader.snapshot(decision.upto) if decision.after is None else reader.changes(decision.after, decision.upto)
        )
        if isinstance(news, SinceAhead):
            return None
        with news, self.writer.builder(decision.lower) as builder:
            for rows in news.to_batches(memory_bytes=CHANGES_MEMORY_BYTES):
                builder.add(negated(rows, time=decision.time))
            return builder.finish(decision.upper)

    # -- the batches -------------------------------------------------------------------------------------------------

    def _gather(self, *, parts_max: int) -> None:
        """Join inline parts, of which there are more than `parts_max`, and upload them if they are too many together. Here,
        not in the append (the writer's `combine_inline` is off): a try that uploads first loses to quicker writers.
        """
        if sum(isinstance(part, InlinePart) for batch in self.batches for part in batch.hollow.parts) <= parts_max:
            return
        writer = self.writer
        desc = Description(self.staged.lower, self.staged.upper, MINIMUM)
        self.batches = gathered(
            self.batches, desc, store=writer.machine, schema=writer.schema, schema_id=writer.schema_id
        )

    def _delete(self) -> None:
        """Delete what was staged and certainly not appended."""
        self.writer.delete_batches(self.batches)


def refuse_outgrown_schema(writer: WriteHandle) -> None:
    """ConfigurationError when rows that were read back below the upper seen last may have fields that they do not show:
    corrections of them would miss. Rows of a newer schema that come later move the upper, so the append is refused.
    """
    try:
        writer.check_newest_schema()
    except SchemaMismatch as error:
        raise ConfigurationError(f"schema: {error}") from error


def negated(rows: pa.RecordBatch, *, time: int) -> pa.Table:
    """Updates that take back `rows` at `time`."""
    columns = [
        rows.column("key"),
        rows.column("val"),
        pa.repeat(pa.scalar(time, pa.int64()), rows.num_rows),
        pc.negate_checked(rows.column("diff")),
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)
