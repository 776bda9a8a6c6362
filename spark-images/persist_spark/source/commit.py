"""The commit of a write in format `persist`: appends the staged batches in one compare-and-append, or leaves the shard as it was.

It runs in a Python worker of Spark's driver and is the only step of a write that uses consensus after the plan was made.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import assert_never

from persist_engine import Batch, Location, PersistClient, ReadHandle, SinceAhead, SourceProgress, WriteHandle
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, InvalidUsage, Unavailable
from persist_engine.base.settings import MIB
from persist_engine.flow.append_run import Late, Recompute, Staged
from persist_engine.flow.mint_run import AlreadyDone, Minted, RaiseUpper, RunToken, ShardView, Superseded, mint
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId

from persist_spark.landing import Landed, Landing, Outcome, driver_settings, refuse_outgrown_schema
from persist_spark.partitions import StagedBatch, StageTask, sink_settings
from persist_spark.report import Log

#: The name under which a write shows among the shard's holds.
PURPOSE = "spark write"
#: The number of rounds of an overwrite. It starts another round when since has passed the times that it read.
ROUNDS_MAX = 16
#: The memory of the driver's Python worker for the comparison of the frame with the shard.
COMPARE_MEMORY_BYTES = 192 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamProgress:
    """One batch of a streaming query. The shard stores the last batch of each query that wrote to it."""

    sink_id: str
    token: bytes
    expected: SourceProgress | None
    """The query's progress before the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of the tasks of one write."""

    location: Location
    shard: ShardId
    task: StageTask
    batches: tuple[StagedBatch, ...]
    progress: StreamProgress | None = None
    """The progress that is committed with the rows. None for a write that is not part of a stream."""

    @property
    def rows(self) -> int:
        """The number of rows of the frame."""
        return sum(batch.rows for batch in self.batches)

    @property
    def time(self) -> int:
        """The time at which the tasks staged the rows."""
        assert self.task.time is not None
        return self.task.time

    @contextmanager
    def opened(self) -> Iterator[tuple[PersistClient, WriteHandle]]:
        """A client, and its writer for the shard."""
        settings = driver_settings(sink_settings(self.task.target_part_bytes))
        with (
            PersistClient.open(self.location, settings=settings, env=SystemEnv(), create=False) as client,
            client.open_writer(self.shard, self.task.schema, purpose=PURPOSE) as writer,
        ):
            yield client, writer

    def received(self, writer: WriteHandle) -> list[Batch]:
        """The staged batches. Only one process may call this, because it then holds the only copy of each batch."""
        staged = (batch.batch for batch in self.batches if batch.batch is not None)
        return [writer.batch_from_transmittable(batch, is_only_copy=True) for batch in staged]

    def landing(self, writer: WriteHandle, *, reader: ReadHandle | None = None, where: str | None = None) -> Landing:
        """The append of the batches as the tasks staged them. With `reader` it replaces what the shard holds."""
        staged = Staged(
            lower=Antichain.of(self.task.lower),
            upper=Antichain.of(self.task.upper),
            time=self.time,
            least_time=self.time,
            reads_back=reader is not None,
        )
        return self.landing_of(writer, self.received(writer), staged, reader=reader, where=where)

    def landing_of(
        self, writer: WriteHandle, batches: list[Batch], staged: Staged, *, reader: ReadHandle | None, where: str | None
    ) -> Landing:
        """The append of `batches` with the progress of this write."""
        env, progress = SystemEnv(), self.progress
        return Landing(
            writer=writer,
            reader=reader,
            staged=staged,
            batches=batches,
            sink_id=None if progress is None else progress.sink_id,
            run_token=RunToken(b"" if progress is None else progress.token),
            expected=None if progress is None else progress.expected,
            where=where,
            seen=writer.fetch_recent_upper(),
            env=env,
            log=Log(io.StringIO(), env),
        )

    def delete(self) -> None:
        """Deletes the blobs of all batches. The caller must be certain that they are never appended."""
        with self.opened() as (_, writer):
            writer.delete_batches(self.received(writer))


def append(written: Written, *, lands_nothing: bool = False) -> None:
    """Appends all batches in one step. When other writers win, the rows get a later time, and the append is repeated. Without rows nothing
    changes, except that `lands_nothing` commits the progress alone.

    Raises InvalidUsage for a closed shard; Unavailable when a store failed, or other writers won, for too long. After Unavailable and other
    errors of the stores the append may have happened.
    """
    if written.rows == 0 and not lands_nothing:
        return
    with written.opened() as (_, writer):
        _is_landed(written, written.landing(writer).land())


def overwrite(written: Written, *, where: str | None, allow_empty: bool) -> int:
    """Makes the shard's rows that satisfy `where` (None: all rows) equal to the frame, in one step. It appends desired minus persisted, so
    equal rows need no update and no reader sees an intermediate state. It also removes rows that other writers add meanwhile. Returns by
    how many rows the shard grew, counted with their copies; the number is negative when the shard shrank.

    Raises InvalidUsage for a frame without rows, unless `allow_empty`, and the errors of `append`. Memory: COMPARE_MEMORY_BYTES and some
    parts.
    """
    with written.opened() as (client, writer):
        if written.rows == 0 and not allow_empty:
            raise InvalidUsage(
                f"the frame has no rows, so shard {written.shard} was not changed: to remove the rows that it replaces, set option "
                "allow_empty=true"
            )
        if writer.fetch_recent_upper() == Antichain.minimum():
            # Nothing was ever written, so the rows themselves are the corrections.
            with client.open_leased_reader(written.shard, written.task.schema, purpose=PURPOSE) as reader:
                landing = written.landing(writer, reader=reader, where=where)
                if _is_landed(written, landing.land()):
                    return _growth(landing)
            raise Unavailable(f"since of shard {written.shard} passed the times that the write needs; write again")
        desired = written.received(writer)
        try:
            for _ in range(ROUNDS_MAX):
                with client.open_leased_reader(written.shard, written.task.schema, purpose=PURPOSE) as reader:
                    growth = _corrected(written, writer, reader, desired, where)
                    if growth is not None:
                        return growth
        finally:
            writer.delete_batches(desired)  # never offered to an append
        raise Unavailable(
            f"since of shard {written.shard} passed what the write read {ROUNDS_MAX} times in a row; write again"
        )


def _corrected(
    written: Written, writer: WriteHandle, reader: ReadHandle, desired: list[Batch], where: str | None
) -> int | None:
    """Appends desired minus persisted. Returns by how many rows the shard grew; None when the write must start over."""
    refuse_outgrown_schema(writer)
    view = ShardView(since=reader.since, upper=writer.fetch_recent_upper(), progress=None)
    now_ms = max(
        writer.clock_time(SystemEnv().now_ms()), written.time
    )  # the staged rows have this time, and a correction none before it
    match mint(view, run=b"", now_ms=now_ms, reads_back=True):
        case RaiseUpper(lower, upper):
            writer.compare_and_append_batch([], expected_upper=lower, new_upper=upper)
            return None
        case Minted(lower, time, as_of) as minted:
            assert as_of is not None  # the shard's upper is past 0
            snapshot = reader.snapshot(as_of, where=where)
        case other:
            raise AssertionError(f"a write without progress was {other}")
    if isinstance(snapshot, SinceAhead):
        raise Fenced(f"the lease of {reader} expired before its first use; write again")
    with snapshot, writer.builder(lower) as builder:
        hollow = [batch.hollow for batch in desired]
        for updates in snapshot.corrections(hollow, time=time, memory_bytes=COMPARE_MEMORY_BYTES):
            builder.add(updates)
        corrections = builder.finish(minted.upper)
    staged = Staged(lower=lower, upper=minted.upper, time=time, least_time=time, reads_back=True, as_of=as_of)
    landing = written.landing_of(writer, [corrections], staged, reader=reader, where=where)
    return _growth(landing) if _is_landed(written, landing.land()) else None


def _growth(landing: Landing) -> int:
    """The sum of the diffs of all updates that `landing` appended."""
    return sum(part.diffs_sum or 0 for batch in landing.batches for part in batch.hollow.parts)


def _is_landed(written: Written, outcome: Outcome) -> bool:
    """Whether the rows are part of the shard now; False when the write must start over."""
    match outcome:
        case Landed() | AlreadyDone():
            return True
        case Superseded():
            raise Fenced(f"another run of the same query appended to shard {written.shard} while this one was writing")
        case Recompute():
            return False
        case Late():
            raise AssertionError("rows of a write have no times of their own")
    assert_never(outcome)
