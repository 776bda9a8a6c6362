"""Batches of a Streaming sink, one after the other: the time from one commit to the next, against a `foreachBatch` that does nothing."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

from persist_engine import Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv

from bench.measure import Row, median
from bench.spark import session_in

KEY, VALUE = "id BIGINT", "n BIGINT"
SQL = "select value as id, value % 7 as n from input"
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
        return found
    finally:
        session.stop()


def _input(rows: int, sql: str) -> Any:
    from persist_spark.spec import Input

    return Input(format="rate-micro-batch", options={"rowsPerBatch": str(rows), "numPartitions": "1"}, sql=sql)


def _sink(session: Any, folder: Path, *, rows: int, sql: str, batches: int) -> list[float]:
    """The seconds from one committed batch to the next."""
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
        client.initialise(shard, Schema.from_ddl(KEY, VALUE))
    spec = SinkSpec(
        sink_id="bench/stream",
        run_id="run-1",
        shard_id=shard,
        key_ddl=KEY,
        value_ddl=VALUE,
        blob=location.blob,
        consensus=location.consensus,
        input=_input(rows, sql),
        envelope=Envelope(type=EnvelopeType.APPEND),
        stream=Stream(commit_interval_s=0),
    )
    env = SystemEnv()
    run_stream(session, spec, stop=stop, env=env, log=Ends(io.StringIO(), env))
    return _between(ends)


def _nothing(session: Any, *, rows: int, sql: str, batches: int) -> list[float]:
    from persist_spark.inputs.format import load_input, with_sql
    from persist_spark.streaming.checkpoint import configure, temporary_checkpoint

    configure(session)
    source, done, ends = _input(rows, sql), threading.Event(), list[float]()

    def nothing(_frame: Any, _batch: int) -> None:
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
