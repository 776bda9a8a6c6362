"""Since when a stream has everything of its source, for the condition Fresh. Must not know: the operator, its conditions.

A batch has everything that the source had when Spark chose its rows, unless an option limits batches. When Spark has looked for rows and
found none, nothing is missing either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persist_engine.base.env import Env
from pyspark.sql.streaming.query import StreamingQuery

from persist_spark.report import Log
from persist_spark.spec import Input, Stream

#: How often Spark is asked whether its source is idle.
LOOK_S = 5.0
#: From this age on, times are reported in steps of a quarter of it: each report is a request to the API server.
_STEPS_FROM_S = 120
#: What Spark says of a query whose last look found nothing new.
_IDLE = "Waiting for data to arrive"


@dataclass(kw_only=True)
class Freshness:
    """What was reported. For one thread."""

    step_ms: int
    interval_ms: int
    is_limited: bool
    """Whether a batch may leave rows to the next one."""
    env: Env
    log: Log
    reported_ms: int = 0
    _looked_s: float = 0.0

    @classmethod
    def of(cls, stream: Stream, source: Input, *, env: Env, log: Log) -> Freshness | None:
        """None when the stream does not report how old its rows are."""
        if stream.fresh_s is None:
            return None
        return cls(
            step_ms=1000 * stream.fresh_s // 4 if stream.fresh_s >= _STEPS_FROM_S else 1,
            interval_ms=1000 * stream.commit_interval_s,
            is_limited=any("pertrigger" in name.lower() for name in source.options),
            env=env,
            log=log,
        )

    def look(self, query: StreamingQuery, planned_ms: int | None) -> None:
        """Reports the newest time. `planned_ms`: when Spark chose the newest batch that is committed."""
        if planned_ms is not None and not self.is_limited:
            self.at(planned_ms)
        now_s = self.env.monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            now_ms = self.env.now_ms()
            if is_idle(query.status):
                # Spark's last look began at most one interval ago.
                self.at(now_ms - self.interval_ms)

    def at(self, time_ms: int) -> None:
        """Reports a time that is a step later than the last one."""
        if time_ms >= self.reported_ms + self.step_ms:
            self.reported_ms = time_ms
            self.log.event("fresh", fresh_ms=time_ms)


def is_idle(status: Mapping[str, object]) -> bool:
    """Whether the query waits and has found nothing new when it last looked."""
    return not (status["isTriggerActive"] or status["isDataAvailable"]) and status["message"] == _IDLE
