"""Reports the time up to which a stream has all rows of its source, for the condition Fresh. Must not know: the operator, its conditions.

A batch has all rows that the source had when Spark chose the rows, unless an option limits batches. If Spark has looked for rows and found
none, no rows are missing either. Spark looks once in every interval, but does not report what it found. So this module looks at the query
twice, at least one interval apart. If the query waited both times and no batch was committed in between, Spark looked in between and found
nothing.

A stream with refreshes leaves the rows after its last refresh, which was at most one period ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from persist_engine.base.env import Env
from persist_engine.model.retention import retention_of
from pyspark.sql.streaming.query import StreamingQuery

from persist_spark.report import Log
from persist_spark.spec import REFRESH_OPTIONS, Input, Stream

#: The interval at which this module asks Spark whether its source is idle.
LOOK_S = 5.0
#: From this target on, times are reported in steps of a quarter of the time that the target leaves after the interval, because each report
#: costs the API server a request.
_STEPS_FROM_S = 120
#: Spark's messages for a query between two looks. The choice between them depends on the moment, not on what Spark found.
_WAITING = {"Waiting for data to arrive", "Waiting for next trigger"}
#: How much later than its interval a look of Spark may be.
LATE_MS = 1000


@dataclass(kw_only=True)
class Freshness:
    """Reports how fresh one stream is. For one thread."""

    step_ms: int
    interval_ms: int
    behind_ms: int
    """The span of the newest rows that a batch leaves to the next refresh."""
    is_limited: bool
    """Whether a batch may leave rows to the next one."""
    env: Env
    log: Log
    reported_ms: int = 0
    _looked_s: float = 0.0
    _waited_ms: deque[int] = field(default_factory=deque)
    """The times at which the query waited, since the batch of `_planned_ms`, oldest first."""
    _planned_ms: int | None = None

    @classmethod
    def of(cls, stream: Stream, sources: Sequence[Input], *, env: Env, log: Log) -> Freshness | None:
        """None when the stream does not report how old its rows are, and when its refreshes have single times without a period, so that the
        age of its rows has no limit.
        """
        behind_ms = _behind_ms(sources)
        if stream.fresh_s is None or behind_ms is None:
            return None
        # An idle stream is known to have been fresh one interval ago. The steps must fit into the rest of the target.
        spare_s = max(0, stream.fresh_s - stream.commit_interval_s - behind_ms // 1000)
        return cls(
            step_ms=max(1, 250 * spare_s) if stream.fresh_s >= _STEPS_FROM_S else 1,
            interval_ms=1000 * stream.commit_interval_s,
            behind_ms=behind_ms,
            is_limited=any("pertrigger" in name.lower() for one in sources for name in one.options),
            env=env,
            log=log,
        )

    def look(self, query: StreamingQuery, planned_ms: int | None) -> None:
        """Reports the newest time. `planned_ms`: when Spark chose the newest batch that is committed."""
        now_ms = self.env.now_ms()
        if self.reported_ms > now_ms:
            # The clock was set back after the last report. Without this reset, nothing would be reported until that time comes again.
            self.reported_ms = 0
            self._waited_ms.clear()
        if planned_ms is not None and planned_ms <= now_ms and not self.is_limited:
            self.at(planned_ms)
        now_s = self.env.monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._wait(planned_ms, is_waiting=is_waiting(query.status))

    def _wait(self, planned_ms: int | None, *, is_waiting: bool) -> None:
        if not is_waiting or planned_ms != self._planned_ms:
            self._waited_ms.clear()
        self._planned_ms = planned_ms
        if not is_waiting:
            return
        now_ms = self.env.now_ms()
        self._waited_ms.append(now_ms)
        passed_ms = None
        while self._waited_ms[0] <= now_ms - self.interval_ms - LATE_MS:
            passed_ms = self._waited_ms.popleft()
        if passed_ms is not None:
            self.at(passed_ms)

    def at(self, time_ms: int) -> None:
        """Reports the time minus `behind_ms`, if it is at least one step later than the last reported time."""
        time_ms -= self.behind_ms
        if time_ms >= self.reported_ms + self.step_ms:
            self.reported_ms = time_ms
            self.log.event("fresh", fresh_ms=time_ms)


def _behind_ms(sources: Sequence[Input]) -> int | None:
    """The longest period of refreshes; 0 without refreshes; None for refreshes without a period. Names of options have any case, as
    in Spark.
    """
    every, _, at = (name.lower() for name in REFRESH_OPTIONS)
    given = [{name.lower(): value for name, value in one.options.items()} for one in sources]
    if any(at in options and every not in options for options in given):
        return None
    return max(retention_of(options.get(every, "none")) or 0 for options in given)


def is_waiting(status: Mapping[str, object]) -> bool:
    """Whether the query waits for its next look, and no batch is in flight."""
    return not (status["isTriggerActive"] or status["isDataAvailable"]) and status["message"] in _WAITING
