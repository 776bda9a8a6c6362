"""A driver on standby: follows the driver of the same sink that writes, and compares. Writes nothing until it is ordered to take over.

Owns the judgement of what was compared. It must not know what decides about the takeover: a callable says so.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from persist_engine import PersistClient, ProgressMismatch, ReadHandle, SourceProgress, WriteHandle
from persist_engine.base.env import Env
from persist_engine.base.errors import Fenced, Unavailable
from pyspark.sql import DataFrame, SparkSession

from persist_spark.envelopes.compared import Difference
from persist_spark.failures import is_lost_copy
from persist_spark.landing import TRIES_MAX
from persist_spark.progress.live import Stage
from persist_spark.report import Log
from persist_spark.spec import SinkSpec
from persist_spark.streaming.checkpoint import Checkpoints, configure
from persist_spark.streaming.interval import Commit, Interval, difference_in
from persist_spark.streaming.position import Position
from persist_spark.streaming.position_append import append_position

#: How often the driver looks for a commit and for the order to take over: ten times in a commit interval, within these bounds. A commit
#: that it sees late is compared together with the next one.
LOOK_LEAST_S, LOOK_MOST_S = 0.25, 1.0
#: A driver's own position after a progress of the sink.
Start = Callable[[SourceProgress | None], Position]


@dataclass(frozen=True, slots=True)
class _Look:
    """The sink's last commit, and the upper of the shard as it was before that commit was read."""

    upper: int
    commit: Commit | None
    seen_ms: int


@dataclass
class Judgement:
    """What the comparisons have shown. Bounded: sums only."""

    compared: int = 0
    """Updates that were found equal, since the last interval that decided nothing."""
    missing: int = 0
    extra: int = 0
    differs: bool = False
    """Whether one batch of the source was written in another way. That stays, whatever is equal afterwards."""

    def add(self, found: Difference, *, is_one_batch: bool) -> bool:
        """Takes one comparison. False when it decides nothing: several batches together may differ although each one is equal, because a
        later batch wins over an earlier one, and other writers may have appended between them.
        """
        if not (found.missing or found.extra):
            self.compared += found.rows
            return True
        if is_one_batch:
            self.differs = True
            self.missing, self.extra = self.missing + found.missing, self.extra + found.extra
            return True
        self.compared = 0
        return False

    @property
    def stage(self) -> Stage:
        """Differs, Proven (some updates, and all of them equal), or StandingBy."""
        if self.differs:
            return Stage.DIFFERS
        return Stage.PROVEN if self.compared else Stage.STANDING_BY


@dataclass
class Standby:
    """The standby of one driver. For one use."""

    spark: SparkSession
    spec: SinkSpec
    client: PersistClient
    rows: DataFrame
    """The input as a stream, as the envelope reads it (`staging.rows_of`)."""
    checkpoints: Checkpoints
    _: KW_ONLY
    is_promoted: Callable[[], bool]
    stop: threading.Event
    env: Env
    log: Log
    judged: Judgement = field(default_factory=Judgement)

    def until_promoted(self) -> bool:
        """Follows and compares until `is_promoted`: then True. False when `stop` was set.

        ConfigurationError for rows that cannot be written; Fenced when the lease on the shard lapsed; Spark's errors when the source
        failed, also because it no longer has rows that the other driver has read.
        """
        self.log.event("standing_by", stage=self.judged.stage)
        purpose = f"{self.spec.purpose}, standby"
        with self.client.open_leased_reader(self.spec.shard_id, self.spec.schema, purpose=purpose) as reader:
            look = self._look()
            known = look.commit
            while not self.is_promoted():
                if self.stop.wait(self._look_s):
                    return False
                before, look = look, self._look()
                if look.commit is None or look.commit == known:
                    continue
                interval = self._interval(known, look.commit, before, reader)
                if interval is not None:
                    found = self._compared(interval, reader)
                    if found is None:
                        continue  # `known` stays, and the loop decides
                    look = self._judged(found, interval, look)
                known = look.commit
                reader.maybe_downgrade_since(0 if known is None else max(0, known.upper - 1))
        return not self.stop.is_set()

    @property
    def _look_s(self) -> float:
        interval_s = 0 if self.spec.stream is None else self.spec.stream.commit_interval_s
        return min(LOOK_MOST_S, max(LOOK_LEAST_S, interval_s / 10))

    def _interval(self, known: Commit | None, newest: Commit, before: _Look, reader: ReadHandle) -> Interval | None:
        """What to compare. None where nothing can be: there are no rows between the commits, or the shard no longer knows the times
        between them. Fenced when the lease lapsed.
        """
        if known is None or newest.position.batch <= known.position.batch:
            return None
        upper_before = before.upper if before.commit == known else 0
        interval = Interval.between(known, newest, self.spec, upper_before=upper_before)
        since = reader.since
        if since.is_empty():
            raise Fenced(f"the lease of {reader} lapsed: the driver was not scheduled for too long; run it again")
        if interval.after >= 0 and not since.less_equal(interval.after):
            self.log.event("not_followed", batch=newest.position.batch, since=since.time)
            return None
        return interval

    def _look(self) -> _Look:
        upper, now_ms = self.client.recent_upper(self.spec.shard_id).newest_complete + 1, self.env.now_ms()
        progress = self.client.progress(self.spec.shard_id, self.spec.sink_id)
        return _Look(upper, None if progress is None else Commit.of(progress, sink_id=self.spec.sink_id), now_ms)

    def _judged(self, found: Difference, interval: Interval, look: _Look) -> _Look:
        """Judges a comparison. Returns the look at the commit from which the next interval begins: after a comparison that decided nothing
        the newest one, so that the next interval is likely to be one batch.
        """
        is_decided = self.judged.add(found, is_one_batch=interval.is_one_batch)
        self.log.event(
            "followed",
            stage=self.judged.stage,
            batch=interval.end.position.batch,
            rows=found.rows,
            is_decided=is_decided,
            compared=self.judged.compared,
            missing=self.judged.missing,
            extra=self.judged.extra,
            lag_ms=max(0, self.env.now_ms() - look.seen_ms),
        )
        return look if is_decided else self._look()

    def _compared(self, interval: Interval, reader: ReadHandle) -> Difference | None:
        """One query of one batch, with exactly the rows of the interval. None when the driver was stopped or promoted meanwhile, and when
        an executor took with it rows that the comparison had chosen: then it is tried again.
        """
        found: list[Difference] = []
        failures: list[Exception] = []

        def compare(rows: DataFrame, _batch: int) -> None:
            # As in EachBatch: an exception on its way through the JVM loses its class.
            try:
                found.append(difference_in(rows.sparkSession, rows, interval, self.spec, reader))
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        with self.checkpoints() as checkpoint:
            query_id = str(uuid.UUID(bytes=self.env.random_bytes(16), version=4))
            checkpoint.write_interval(interval.before.position, interval.end.position, query=query_id)
            configure(self.spark)
            writer = self.rows.writeStream.foreachBatch(compare).outputMode("append")
            writer = writer.option("checkpointLocation", checkpoint.folder.as_uri())
            # Once, and not availableNow: a batch that was begun is repeated, and no other one follows.
            query = writer.trigger(once=True).start()
            try:
                while query.isActive and not self.is_promoted() and not self.stop.wait(LOOK_LEAST_S):
                    pass
                error = query.exception()
            finally:
                query.stop()
        if found:
            return found[0]
        if self.is_promoted() or self.stop.is_set():
            return None
        if failures and is_lost_copy(failures[0]):
            self.log.event("lost_copy")
            return None
        if failures or error is not None:
            raise failures[0] if failures else error
        raise Unavailable(f"Spark ran no batch for the rows up to batch {interval.end.position.batch}")


def take_over(
    writer: WriteHandle, spec: SinkSpec, client: PersistClient, start: Start, log: Log
) -> tuple[Position, SourceProgress | None]:
    """Commits the position of the driver that writes as this driver's own, which fences that one: one compare-and-set. When the other one
    has committed meanwhile, its newer position is taken. From then on everything after the position is this driver's.

    Without a position in the shard there is nothing to take: the first commit of either driver fences the other.
    """
    for _ in range(TRIES_MAX):
        progress = client.progress(spec.shard_id, spec.sink_id)
        position = start(progress)
        if progress is None:
            return position, None
        answer = append_position(writer, spec, position, expected=progress)
        if not isinstance(answer, ProgressMismatch):
            log.event("taken_over", batch=position.batch)
            return position, answer
        log.event("take_over_again")
    raise Unavailable(f"the former driver of sink {spec.sink_id} committed {TRIES_MAX} times in a row")
