"""Batches of a Streaming sink, one after the other: the time from one commit to the next. Those of an Append against a `foreachBatch` that
does nothing, those of an Upsert against one that only collects its rows.
"""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from persist_engine import Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv

from bench.measure import Row, median
from bench.spark import session_in

KEY, VALUE = "id BIGINT", "n BIGINT"
SQL = "select value as id, value % 7 as n from input"
#: Keys all over the shard, each with a new value.
UPSERTS = "select (value * 7919) % 500000 as id, value as n from input"
#: Batches that do not count: the first ones start Python workers and compile.
WARM = 8


def run(folder: Path, quick: bool) -> list[Row]:
    """Batches of a few rows, of none that pass the SQL, and of many rows."""
    batches = 20 if quick else 40
    session = session_in(folder)
    try:
        found = []
        for what, rows, sql in (
            ("10 rows", 10, SQL),
            ("10 rows, of which SQL passes none", 10, f"{SQL} where value < 0"),
            ("20,000 rows", 20_000, SQL),
        ):
            # In turn, because the machine is not equally busy all the time.
            took: dict[str, list[float]] = {"ours": [], "base": []}
            for _ in range(2):
                took["ours"] += _sink(session, folder, rows=rows, sql=sql, batches=batches)
                took["base"] += _nothing(session, rows=rows, sql=sql, batches=batches)
            ours, base = median(took["ours"]), median(took["base"])
            baseline = f"{base * 1000:.0f} ms by an empty foreachBatch"
            found.append(Row(f"a batch of a stream: {what}", f"{ours * 1000:.0f} ms", baseline, ours / base, "lower"))
        for what, rows, sql in (
            ("10 upserts into 500,000 keys", 10, UPSERTS),
            ("20,000 upserts into 500,000 keys", 20_000, UPSERTS),
            ("200,000 upserts into 500,000 keys", 200_000, UPSERTS),
        ):
            took = {"ours": [], "base": []}
            for _ in range(2):
                took["ours"] += _sink(session, folder, rows=rows, sql=sql, batches=batches, keys=500_000)
                took["base"] += _nothing(session, rows=rows, sql=sql, batches=batches, collects=True)
            ours, base = median(took["ours"]), median(took["base"])
            baseline = f"{base * 1000:.0f} ms by a foreachBatch that collects"
            found.append(Row(f"a batch of a stream: {what}", f"{ours * 1000:.0f} ms", baseline, ours / base, "lower"))
        return found
    finally:
        session.stop()


def _input(rows: int, sql: str) -> Any:
    from persist_spark.spec import Input

    return Input(format="rate-micro-batch", options={"rowsPerBatch": str(rows), "numPartitions": "1"}, sql=sql)


def _sink(session: Any, folder: Path, *, rows: int, sql: str, batches: int, keys: int = 0) -> list[float]:
    """The seconds from one committed batch to the next. With `keys`, of an Upsert into a shard that holds so many."""
    from persist_spark.report import Log
    from persist_spark.spec import Envelope, EnvelopeType, SinkSpec, Stream
    from persist_spark.streaming.stream import run_stream

    stop, ends = threading.Event(), list[float]()

    class Ends(Log):
        def event(self, event: str, **fields: Any) -> None:
            super().event(event, **fields)
            if event == "batch":
                ends.append(time.perf_counter())
                if len(ends) == batches:
                    stop.set()

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
    run_stream(session, spec, stop=stop, env=env, log=Ends(io.StringIO(), env))
    return _between(ends)


def _held(keys: int, schema: Any) -> pa.Table:
    ids = pa.array(np.arange(keys))
    sides = [pa.StructArray.from_arrays([ids], fields=list(side)) for side in (schema.key_type, schema.val_type)]
    columns = [*sides, pa.array(np.zeros(keys, np.int64)), pa.array(np.ones(keys, np.int64))]
    return pa.Table.from_arrays(columns, schema=schema.updates_schema)


def _nothing(session: Any, *, rows: int, sql: str, batches: int, collects: bool = False) -> list[float]:
    from persist_spark.inputs.format import load_input, with_sql
    from persist_spark.streaming.checkpoint import configure, temporary_checkpoint

    configure(session)
    source, done, ends = _input(rows, sql), threading.Event(), list[float]()

    def nothing(frame: Any, _batch: int) -> None:
        if collects:
            frame.toArrow()
        ends.append(time.perf_counter())
        if len(ends) == batches:
            done.set()

    frame = with_sql(load_input(session, source, streaming=True), source)
    with temporary_checkpoint() as checkpoint:
        writer = frame.writeStream.foreachBatch(nothing).option("checkpointLocation", checkpoint.folder.as_uri())
        query = writer.trigger(processingTime="0 seconds").start()
        done.wait()
        query.stop()
    return _between(ends)


def _between(ends: list[float]) -> list[float]:
    return [after - before for before, after in zip(ends[WARM:], ends[WARM + 1 :], strict=False)]
