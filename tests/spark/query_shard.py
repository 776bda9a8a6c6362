"""One shard on files, written by sinks whose input is a query."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from landing_run import RivalLog
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.work.audit.verify import verify_shard
from persist_spark import sink
from persist_spark.spec import Envelope, Input, SinkSpec, Write

KEY, VALUE = "id BIGINT", "name STRING, score DOUBLE"


class Shard:
    """One shard on files, written by sinks whose input is a query."""

    def __init__(self, folder, spark):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.folder, self.spark = folder, spark
        self.id = ShardId.new()
        self.schema = Schema.from_ddl(KEY, VALUE)
        self.client = PersistClient.open(self.location, settings=Settings(retain_ms=None))
        self.client.initialise(self.id, self.schema)
        self.source = folder / "input"
        self.source.write_text("")
        self.lines = io.StringIO()

    def spec(self, query: str, envelope: Envelope, run: str, **more) -> SinkSpec:
        """A sink whose input is the result of `query`, which needs no file."""
        source = Input(format="text", options={"path": str(self.source)}, sql=query, **more.pop("input", {}))
        changes = {"sink_id": "ns/s", "write": Write(parallelism=3), **more}
        return SinkSpec(
            run_id=run,
            shard_id=self.id,
            key_ddl=KEY,
            value_ddl=VALUE,
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=source,
            envelope=envelope,
            **changes,
        )

    def run(self, query: str, envelope: Envelope, run: str, *, acts: Sequence[Callable[[], Any]] = (), **more):
        """Runs a sink beside a rival, which does one of `acts` before each of the first appends."""
        return self.run_spec(self.spec(query, envelope, run, **more), acts=acts)

    def run_spec(self, spec: SinkSpec, *, acts: Sequence[Callable[[], Any]] = ()):
        log = RivalLog(io.StringIO(), SystemEnv())
        log.acts, self.lines = acts, log._stream
        return sink.run_sink(self.spark, spec, log=log)

    def events(self) -> list[str]:
        """The events that the last run logged from the staging on."""
        names = [json.loads(line)["event"] for line in self.lines.getvalue().splitlines()]
        return names[names.index("staged") :]

    def all_events(self) -> list[str]:
        """The events that the last run logged."""
        return [json.loads(line)["event"] for line in self.lines.getvalue().splitlines()]

    def rows(self, as_of: int | None = None) -> list:
        """(id, name, score, diff), sorted as text: the collection at its latest time."""
        upper = self.client.recent_upper(self.id).time
        assert upper is not None
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            table = reader.snapshot(Antichain.of(upper - 1 if as_of is None else as_of)).to_table()
        return sorted(
            ((row["key"]["id"], row["val"]["name"], row["val"]["score"], row["diff"]) for row in table.to_pylist()),
            key=repr,
        )

    def edit(self, rows, *, ahead_ms: int | None = None) -> None:
        """A rival writes (id, name, score, diff) at the shard's upper, or `ahead_ms` ahead of the clock when that is later."""
        with self.client.open_writer(self.id, self.schema, purpose="rival") as writer:
            upper = writer.fetch_recent_upper()
            time = upper.time if ahead_ms is None else max(upper.time, SystemEnv().now_ms() + ahead_ms)
            updates = [(((id_,), (name, score)), time, diff) for id_, name, score, diff in rows]
            answer = writer.compare_and_append(updates, expected_upper=upper, new_upper=Antichain.of(time + 1))
            assert isinstance(answer, Appended)

    def parts(self) -> set[str]:
        """The names of the parts in the blob store."""
        return {path.name for path in (self.folder / "blobs" / self.id).glob("n*/*")}

    def check_sound(self) -> None:
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            assert verify_shard(writer.machine).findings == []
