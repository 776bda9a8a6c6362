"""A shard and the sinks that write it with envelopes whose rows are commands on keys, and what their rows mean, in plain Python."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from landing_run import RivalLog
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.settings import BatchSettings
from persist_engine.work.audit.verify import verify_shard
from persist_spark import sink
from persist_spark.report import SinkReport
from persist_spark.spec import Envelope, Input, SinkSpec, Write
from pyspark.sql import SparkSession

Row = dict[str, Any]
State = dict[tuple[Any, ...], tuple[Any, ...]]


class Target:
    """One shard on files. Its sinks read rows as JSON."""

    def __init__(self, folder: Path, spark: SparkSession, key: str, value: str) -> None:
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.folder, self.spark, self.key, self.value = folder, spark, key, value
        self.id, self.schema = ShardId.new(), Schema.from_ddl(key, value)
        # The rival's rows are parts with statistics; those of small sinks stay inline.
        settings = Settings(retain_ms=None, batch=BatchSettings(inline_part_bytes_max=0))
        self.client = PersistClient.open(self.location, settings=settings)
        self.client.initialise(self.id, self.schema)
        self.lines = io.StringIO()
        self.runs = 0

    def spec(self, rows: Iterable[Row], columns: str, envelope: Envelope, **changes: Any) -> SinkSpec:
        """A run of its own, unless `changes` says another `run_id`. `columns`: the input's columns as DDL."""
        self.runs += 1
        file = self.folder / f"input{self.runs}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"options": {"path": str(file), "mode": "FAILFAST"}, "schema": columns, **changes.pop("input", {})}
        return SinkSpec(
            shard_id=self.id,
            key_ddl=self.key,
            value_ddl=self.value,
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=Input(format="json", **given),
            envelope=envelope,
            **{"sink_id": "ns/s", "run_id": f"u-{self.runs}", "write": Write(parallelism=2), **changes},
        )

    def run(
        self,
        rows: Iterable[Row],
        columns: str,
        envelope: Envelope,
        *,
        acts: Sequence[Callable[[], Any]] = (),
        **changes: Any,
    ) -> SinkReport:
        """Runs a sink beside a rival, which does one of `acts` before each of the first appends."""
        log = RivalLog(io.StringIO(), SystemEnv())
        log.acts, self.lines = acts, log._stream
        return sink.run_sink(self.spark, self.spec(rows, columns, envelope, **changes), log=log)

    def events(self) -> list[str]:
        """The names of the events that the last run logged."""
        return [json.loads(line)["event"] for line in self.lines.getvalue().splitlines()]

    def write(self, updates: dict[tuple[tuple[Any, ...], tuple[Any, ...]], int]) -> None:
        """A rival appends (key, value): diff at the shard's upper."""
        with self.client.open_writer(self.id, self.schema, purpose="rival") as writer:
            upper = writer.fetch_recent_upper()
            rows = [(row, upper.time, diff) for row, diff in updates.items()]
            answer = writer.compare_and_append(rows, expected_upper=upper, new_upper=Antichain.of(upper.time + 1))
            assert isinstance(answer, Appended)

    def state(self) -> State:
        """The shard's contents by key. Fails when a key has several values."""
        upper = self.client.recent_upper(self.id).time
        if upper == 0:
            return {}
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            rows = reader.snapshot(upper - 1).to_table().to_pylist()
        found = {key_of(row["key"].values()): tuple(row["val"].values()) for row in rows}
        assert {row["diff"] for row in rows} <= {1}
        assert len(found) == len(rows)
        return found

    def footprint(self) -> tuple[Any, ...]:
        """Everything that a refused run must leave unchanged."""
        found = self.client.inspect(self.id)
        parts = {path.name for path in (self.folder / "blobs" / self.id).glob("n*/*")}
        return found.upper, found.updates, len(found.readers), len(found.writers), dict(found.progress), parts

    def close(self) -> None:
        """Checks the shard and closes it."""
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            assert verify_shard(writer.machine).findings == []
        self.client.close()


def key_of(fields: Iterable[Any]) -> tuple[Any, ...]:
    """A key by which Python finds equal what the engine finds equal: one NaN, one zero."""
    return tuple(_hashable(one) for one in fields)


def _hashable(field: Any) -> Any:
    if isinstance(field, dict):
        return tuple(_hashable(one) for one in field.values())
    if isinstance(field, float):
        return "NaN" if math.isnan(field) else field + 0.0
    return field


def upserted(
    before: State, rows: Iterable[Row], *, key: Sequence[str], value: Sequence[str], envelope: Envelope
) -> State:
    """The contents after a run of an Upsert: the oracle. Orders are integers or None, and those of different rows of a key differ."""
    after, order = dict(before), envelope.order_column
    last: dict[tuple[Any, ...], Row] = {}

    def rank(row: Row) -> float:
        return -math.inf if order is None or row.get(order) is None else row[order]

    for row in rows:
        name = key_of(row.get(field) for field in key)
        if name not in last or rank(row) > rank(last[name]):
            last[name] = row
    for name, row in last.items():
        others = [field for field in value if field != order]
        if order in value and name in before:
            held = before[name][list(value).index(order)]
            if held is not None and held > rank(row):
                continue
        removes = (
            row.get(envelope.delete_column) is True
            if envelope.delete_column is not None
            else bool(others) and all(row.get(field) is None for field in others)
        )
        after.pop(name, None)
        if not removes:
            after[name] = tuple(row.get(field) for field in value)
    return after
