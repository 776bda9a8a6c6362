"""A shard, and Mirrors of a folder of Parquet files."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from envelope_run import Target
from persist_engine.base.env import SystemEnv
from persist_spark import sink
from persist_spark.report import Log, SinkReport
from persist_spark.spec import Envelope, EnvelopeType, Input, Write

MIRROR = Envelope(type=EnvelopeType.MIRROR)


class Files:
    """A shard and the Mirrors of Parquet files in one folder."""

    def __init__(self, target: Target) -> None:
        self.target, self.folder, self.runs = target, target.folder / "files", 0
        self.folder.mkdir()

    def put(self, *tables: pa.Table) -> None:
        """The folder then has these files alone."""
        for file in self.folder.iterdir():
            file.unlink()
        for number, table in enumerate(tables):
            put(table, self.folder / f"{number}.parquet")

    def run(self, envelope: Envelope = MIRROR, sql: str | None = None, *, parallelism: int | None = None) -> SinkReport:
        self.runs += 1
        spec = self.target.spec(
            [], "id BIGINT", envelope, write=Write(parallelism=parallelism), run_id=f"f-{self.runs}"
        )
        options = {"path": str(self.folder)}
        spec = replace(spec, input=Input(format="parquet", options=options, sql=sql, allow_empty=True))
        log = Log(self.target.lines, SystemEnv())
        self.target.lines.seek(0)
        self.target.lines.truncate()
        return sink.run_sink(self.target.spark, spec, log=log)

    def event(self, name: str) -> dict[str, Any] | None:
        """The first event of this name that the last run logged."""
        lines = map(json.loads, self.target.lines.getvalue().splitlines())
        return next((line for line in lines if line["event"] == name), None)


def put(table: pa.Table, file: Path) -> None:
    """Files of equal tables but for their numbers have equal sizes."""
    pq.write_table(table, file, use_dictionary=False, compression="NONE", write_statistics=False)


def rows_of(target: Target) -> Counter[str]:
    """The rows of the shard, as text, with their diffs."""
    upper = target.client.recent_upper(target.id).time
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        rows = reader.snapshot(upper - 1).to_table().to_pylist()
    return Counter({repr([*row["key"].values(), *row["val"].values()]): row["diff"] for row in rows})


def as_counted(*tables: pa.Table) -> Counter[str]:
    """The rows of the tables. Negative zeros count as zeros."""
    rows = [list(row.values()) for table in tables for row in table.to_pylist()]
    return Counter(repr([each + 0.0 if isinstance(each, float) else each for each in row]) for row in rows)
