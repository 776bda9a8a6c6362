"""Appends a position without rows. With it a stream passes batches without rows, and takes over from another driver."""

from __future__ import annotations

from dataclasses import replace

from persist_engine import Appended, ProgressMismatch, SourceProgress, UpperMismatch, WriteHandle
from persist_engine.base.errors import Unavailable

from persist_spark.landing import TRIES_MAX
from persist_spark.spec import ConfigurationError, SinkSpec
from persist_spark.streaming.position import Position, encode_position


def append_position(
    writer: WriteHandle, spec: SinkSpec, position: Position, *, expected: SourceProgress | None
) -> SourceProgress | ProgressMismatch:
    """Appends an empty interval with `position` as the sink's progress, in one compare-and-set, which does not change the shard's upper.
    Retries when other writers raise the upper. Returns ProgressMismatch, and appends nothing, when the sink's progress is not `expected`.
    """
    token = encode_position(replace(position, has_rows=False))
    upper = writer.fetch_recent_upper()
    for _ in range(TRIES_MAX):
        if upper.time is None:
            raise ConfigurationError(f"shard {spec.shard_id} is closed: nothing more can be written")
        answer = writer.compare_and_append_batch(
            [],
            expected_upper=upper,
            new_upper=upper,
            progress=(spec.sink_id, token),
            expected_progress=None if expected is None else expected.token,
        )
        match answer:
            case Appended():
                return SourceProgress(token=token, upper=upper)
            case UpperMismatch(current=upper):
                continue
            case ProgressMismatch():
                return answer
    raise Unavailable(
        f"other writers of shard {spec.shard_id} were faster {TRIES_MAX} times in a row; nothing was appended"
    )
