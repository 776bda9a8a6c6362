"""Batches of a Streaming sink: the time from one commit to the next, and the processor time of a batch in all processes (driver, JVM,
Python workers). The ratio compares processor time. The baseline of an Append is a `foreachBatch` that does nothing, and that of an Upsert
is one that only collects its rows.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from persist_engine import Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv

from bench.measure import Row, median
from bench.spark import cpu_s, session_in

KEY, VALUE = "id BIGINT", "n BIGINT"
SQL = "select value as id, value % 7 as n from input"
#: Keys all over the shard, each with a new value.
UPSERTS = "select (value * 7919) % 500000 as id, value as n from input"
#: The number of batches that do not count. The first ones start Python workers, and the JVM still compiles during the others.
WARM = 40

#: The cases: what, rows of a batch, SQL, and the keys that the shard of an Upsert holds (0: an Append).
CASES = (
    ("10 rows", 10, SQL, 0),
    ("10 rows, of which SQL passes none", 10, f"{SQL} where value < 0", 0),
    ("20,000 rows", 20_000, SQL, 0),
    ("10 upserts into 500,000 keys", 10, UPSERTS, 500_000),
    ("20,000 upserts into 500,000 keys", 20_000, UPSERTS, 500_000),
    ("10 upserts into 2,000,000 keys", 10, UPSERTS, 2_000_000),
    ("20,000 upserts into 2,000,000 keys", 20_000, UPSERTS, 2_000_000),
    ("200,000 upserts into 500,000 keys", 200_000, UPSERTS, 500_000),
)


def run(folder: Path, quick: bool) -> Iterator[Row]:
    """Batches of a few rows, batches without rows that pass the SQL, and batches of many rows. Yields a case as soon as it is measured."""
    batches = WARM + (6 if quick else 16)
    session = session_in(folder)
    try:
        for what, rows, sql, keys in CASES:
            ours, base = list[Took](), list[Took]()
            for _ in range(2):  # in turn, because the load of the machine changes
                ours.append(_sink(session, folder, rows=rows, sql=sql, batches=batches, keys=keys))
                base.append(_nothing(session, rows=rows, sql=sql, batches=batches, collects=keys > 0))
            (ours_s, ours_cpu), (base_s, base_cpu) = _of(ours), _of(base)
            by = "a foreachBatch that collects" if keys else "an empty foreachBatch"
            yield Row(
                f"a batch of a stream: {what}",
                f"{ours_s * 1000:.0f} ms ({ours_cpu * 1000:.0f} ms cpu)",
                f"{base_s * 1000:.0f} ms ({base_cpu * 1000:.0f}) by {by}",
                ours_cpu / max(base_cpu, 1e-9),
                "lower",
            )
    finally:
        session.stop()


#: The seconds from one batch to the next, and the seconds of processor time of one batch.
Took = tuple[list[float], float]


def _of(repetitions: list[Took]) -> tuple[float, float]:
    return median([each for seconds, _ in repetitions for each in seconds]), median([cpu_s for _, cpu_s in repetitions])


class _Ends:
    """The times at which batches ended. `is_over` is set at the last one."""

    def __init__(self, batches: int) -> None:
        self.batches, self.is_over = batches, threading.Event()
        self.at_s: list[float] = []
        self._cpu_s: list[float] = []

    def note(self) -> None:
        """Records the end of a batch."""
        self.at_s.append(time.perf_counter())
        if len(self.at_s) in (WARM, self.batches):
            self._cpu_s.append(cpu_s())
        if len(self.at_s) == self.batches:
            self.is_over.set()

    @property
    def took(self) -> Took:
        """The times of the batches that count."""
        between = [after - before for before, after in zip(self.at_s[WARM:], self.at_s[WARM + 1 :], strict=False)]
        return between, (self._cpu_s[1] - self._cpu_s[0]) / (self.batches - WARM)


def _input(rows: int, sql: str) -> Any:
    from persist_spark.spec import Input

    return Input(format="rate-micro-batch", options={"rowsPerBatch": str(rows), "numPartitions": "1"}, sql=sql)


def _sink(session: Any, folder: Path, *, rows: int, sql: str, batches: int, keys: int) -> Took:
    """Measures a sink. With `keys`, it is an Upsert into a shard with this number of keys."""
    from persist_spark.report import Log
    from persist_spark.spec import Envelope, EnvelopeType, SinkSpec, Stream
    from persist_spark.streaming.stream import run_stream

    ends = _Ends(batches)

    class Noted(Log):
        def event(self, event: str, **fields: Any) -> None:
            super().event(event, **fields)
            if event == "batch":
                ends.note()

    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    shard = ShardId.new()
    with PersistClient.open(location) as client:
        schema = Schema.from_ddl(KEY, VALUE)
        client.initialise(shard, schema)
        if keys:
            with client.open_writer(shard, schema, purpose="bench") as writer:
                writer.compare_and_append(_held(keys, schema), expected_upper=0, new_upper=1)
    spec = SinkSpec(
        sink_id="bench/stream",
        run_id="run-1",
        shard_id=shard,
        key_ddl=KEY,
        value_ddl=VALUE,
        blob=location.blob,
        consensus=location.consensus,
        input=_input(rows, sql),
        envelope=Envelope(type=EnvelopeType.UPSERT if keys else EnvelopeType.APPEND),
        stream=Stream(commit_interval_s=0),
    )
    env = SystemEnv()
    run_stream(session, spec, stop=ends.is_over, env=env, log=Noted(io.StringIO(), env))
    return ends.took


def _held(keys: int, schema: Any) -> pa.Table:
    ids = pa.array(np.arange(keys))
    sides = [pa.StructArray.from_arrays([ids], fields=list(side)) for side in (schema.key_type, schema.val_type)]
    columns = [*sides, pa.array(np.zeros(keys, np.int64)), pa.array(np.ones(keys, np.int64))]
    return pa.Table.from_arrays(columns, schema=schema.updates_schema)


def _nothing(session: Any, *, rows: int, sql: str, batches: int, collects: bool) -> Took:
    from persist_spark.inputs.format import load_input, with_sql
    from persist_spark.streaming.checkpoint import configure, temporary_checkpoint

    configure(session)
    source, ends = _input(rows, sql), _Ends(batches)

    def nothing(frame: Any, _batch: int) -> None:
        if collects:
            frame.toArrow()
        ends.note()

    frame = with_sql(load_input(session, source, streaming=True), source)
    with temporary_checkpoint() as checkpoint:
        writer = frame.writeStream.foreachBatch(nothing).option("checkpointLocation", checkpoint.folder.as_uri())
        query = writer.trigger(processingTime="0 seconds").start()
        ends.is_over.wait()
        query.stop()
    return ends.took
