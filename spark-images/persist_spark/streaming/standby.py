"""A driver on standby. It follows the writing driver of the same sink, and compares. It writes nothing until it is ordered to take over.

Owns the judgement of the comparisons. It must not know how the takeover is decided: a callable returns the order.
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

#: The bounds on the interval at which the driver looks for a commit and for the order to take over. Within them it looks ten times in a
#: commit interval. A commit that it sees late is compared together with the next one.
LOOK_LEAST_S, LOOK_MOST_S = 0.25, 1.0
#: Makes the driver's own position from a progress of the sink.
Start = Callable[[SourceProgress | None], Position]


@dataclass(frozen=True, slots=True)
class _Look:
    """The sink's last commit, and when it was read."""

    commit: Commit | None
    seen_ms: int


@dataclass
class Judgement:
    """The results of the comparisons. Bounded, because it has only sums."""

    compared: int = 0
    """The number of equal updates since the last interval that decided nothing."""
    missing: int = 0
    extra: int = 0
    differs: bool = False
    """Whether the updates of one batch differed. It stays true even if later batches are equal."""

    def add(self, found: Difference, *, is_one_batch: bool) -> bool:
        """Adds one comparison. Returns False when it decides nothing. Several batches together may differ although each batch is equal,
        because a later batch wins over an earlier one, and other writers may have appended between them.
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
        """Follows and compares. Returns True when `is_promoted`, and False when `stop` was set.

        Raises ConfigurationError for rows that cannot be written; Fenced when the lease on the shard lapsed; Spark's errors when the source
        failed, for example because it no longer has rows that the other driver has read.
        """
        self.log.event("standing_by", stage=self.judged.stage)
        purpose = f"{self.spec.purpose}, standby"
        with self.client.open_leased_reader(self.spec.shard_id, self.spec.schema, purpose=purpose) as reader:
            look = self._look()
            known = look.commit
            while not self.is_promoted():
                if self.stop.wait(self._look_s):
                    return False
                look = self._look()
                if look.commit is None or look.commit == known:
                    continue
                interval = self._interval(known, look.commit, reader)
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

    def _interval(self, known: Commit | None, newest: Commit, reader: ReadHandle) -> Interval | None:
        """The interval to compare. None when there are no rows between the commits, or the shard can no longer read the times between them.
        Raises Fenced when the lease lapsed.
        """
        if known is None or newest.position.batch <= known.position.batch:
            return None
        interval = Interval.between(known, newest, self.spec)
        since = reader.since
        if since.is_empty():
            raise Fenced(f"the lease of {reader} lapsed: the driver was not scheduled for too long; run it again")
        if interval.after >= 0 and not since.less_equal(interval.after):
            self.log.event("not_followed", batch=newest.position.batch, since=since.time)
            return None
        return interval

    def _look(self) -> _Look:
        now_ms = self.env.now_ms()
        progress = self.client.progress(self.spec.shard_id, self.spec.sink_id)
        return _Look(None if progress is None else Commit.of(progress, sink_id=self.spec.sink_id), now_ms)

    def _judged(self, found: Difference, interval: Interval, look: _Look) -> _Look:
        """Judges a comparison. Returns the look at the commit with which the next interval begins. After a comparison that decided nothing
        it is the newest commit, so that the next interval is likely to be one batch.
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
        """Runs one query of one batch, with exactly the rows of the interval. Returns None when the driver was stopped or promoted
        meanwhile, and when a lost executor held the copied rows of the comparison. The caller tries again then.
        """
        found: list[Difference] = []
        failures: list[Exception] = []

        def compare(rows: DataFrame, _batch: int) -> None:
            # As in EachBatch, the exception must not pass through the JVM, where it would lose its class.
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
            # `once` repeats the batch that was begun, and no other batch follows. `availableNow` would run more.
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
    """Commits the position of the writing driver as this driver's own, in one compare-and-set, which fences that driver. If that driver has
    committed meanwhile, its newer position is taken. From then on this driver writes everything after the position.

    If the shard has no position, nothing is committed here, and the first commit of either driver fences the other.
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
