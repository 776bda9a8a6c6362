"""One collection twice: in a shard, read through `spark.read.format("persist")`, and in Parquet files, written from the same
Python rows without the engine. A query must return the same rows from both.

The rows hold values that comparisons often get wrong: nulls at every level, NaN, both zeros, infinities, copies, texts with
quotes, wildcards and characters beyond the Basic Multilingual Plane. Some rows were deleted, and some were added late.

Each name of VIEWS is a temporary view `shard_<name>` and another `parquet_<name>`. `Twins.text` makes the query of one side from a
text that contains `{name}`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_spark.datasource import register
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import is_remote

SIDES = ("shard", "parquet")
SCHEMA = Schema.from_ddl(
    "id BIGINT NOT NULL, area STRING",
    "n INT, x DOUBLE, s STRING, m DECIMAL(12,2), d DATE, t TIMESTAMP, w TIMESTAMP_NTZ, b BOOLEAN, "
    "p STRUCT<x: INT, s: STRING, q: STRUCT<z: DOUBLE>>",
)
#: The options that each frame is loaded with, and the query that gives the same rows from Parquet.
LOADS: dict[str, tuple[dict[str, str], str]] = {
    "rows": ({"splits": "2"}, "SELECT * FROM parquet_latest"),
    "whole": ({"splits": "1"}, "SELECT /*+ COALESCE(1) */ * FROM parquet_latest"),
    "early": ({"splits": "2", "as_of": "4"}, "SELECT * FROM parquet_first"),
    "some": (
        {"splits": "2", "where": "id >= 60 AND p.x < 30"},
        "SELECT * FROM parquet_latest WHERE id >= 60 AND p.x < 30",
    ),
    "few": ({"splits": "2", "columns": "id, x, s"}, "SELECT id, x, s FROM parquet_latest"),
    "updates": ({"splits": "2", "updates": "true"}, "SELECT * FROM parquet_updates"),
}
#: Views over the views of LOADS, the same on both sides.
OVER: dict[str, str] = {
    "third": "SELECT * FROM {rows} WHERE id % 3 = 0",
    "low": "SELECT id, n, x, p.q.z AS z FROM {third} WHERE id < 150",
    "pairs": "SELECT a.id, a.n, b.n AS other FROM {low} a JOIN {rows} b ON a.id + 1 = b.id WHERE b.b",
}
VIEWS = (*LOADS, "given", *OVER)
TEXTS = (
    None,
    "",
    "o'hara",
    'say "hi"',
    "100%",
    "a_b",
    "c:\\d",
    "naïve",
    "日本語",
    "𝄞 clef",
    "Zoë",
    "z",
    "NULL",
    "it''s",
)
AREAS = ("north", "south", None, "öst", "")
XS = (0.0, -0.0, math.nan, None, 1.5, -2.25, math.inf, -math.inf, 12.0, 20.5)

Row = tuple[dict[str, Any], dict[str, Any]]


def row(i: int) -> Row:
    """Row number `i`. Its fields cycle with different periods, so that most values meet. `id` and `area` identify a row: some rows
    share an `id`.
    """
    inner = None if i % 13 == 5 else {"z": (None, 0.5, -0.0, math.nan)[i % 4]}
    nested = None if i % 11 == 3 else {"x": None if i % 17 == 2 else i % 50, "s": TEXTS[i % 9], "q": inner}
    instant = datetime(2012, 12, 31, 23, tzinfo=UTC) + timedelta(minutes=7 * i, microseconds=i % 3)
    val = {
        "n": None if i % 10 == 9 else i % 7,
        "x": XS[i % len(XS)],
        "s": TEXTS[i % len(TEXTS)],
        "m": None if i % 19 == 4 else Decimal(i * 37 - 3000).scaleb(-2),
        "d": None if i % 23 == 1 else date(2013, 1, 1) + timedelta(days=i % 40),
        "t": None if i % 29 == 8 else instant,
        "w": None if i % 31 == 6 else instant.replace(tzinfo=None),
        "b": (True, False, None)[i % 3],
        "p": nested,
    }
    return {"id": i // 2 if i % 25 == 7 else i, "area": AREAS[i % len(AREAS)]}, val


#: Three appends, each of (rows, time, diff).
APPENDS: tuple[tuple[tuple[range, int, int], ...], ...] = (
    ((range(160), 0, 1), (range(0, 160, 15), 2, 1)),
    ((range(160, 240), 5, 1), (range(30, 40), 5, -1)),
    ((range(10, 20), 9, 2), (range(200, 210), 9, -1), (range(30, 33), 9, 1)),
)
UPPERS = (5, 9, 10)


def contents(as_of: int) -> list[tuple[Row, int]]:
    """The rows of the collection at `as_of`, with their number of copies. Counted here, without the engine."""
    counts: Counter[int] = Counter()
    for append in APPENDS:
        for numbers, time, diff in append:
            if time <= as_of:
                counts.update(dict.fromkeys(numbers, diff))
    return [(row(i), count) for i, count in sorted(counts.items()) if count]


@dataclass(frozen=True)
class Twins:
    """Both sides, as views of `spark`. The shard's frames are loaded with the options `given`."""

    spark: SparkSession
    given: dict[str, str]
    folder: Path
    """Where the Parquet files are."""

    def text(self, query: str, side: str) -> str:
        """`query` of one side."""
        return query.format(**{name: f"{side}_{name}" for name in VIEWS})

    def sql(self, query: str, side: str) -> DataFrame:
        """The frame of `query` on one side, not run yet."""
        return self.spark.sql(self.text(query, side))

    def frames(self, side: str) -> dict[str, DataFrame]:
        """The frames behind the views of one side."""
        return {name: self.spark.table(f"{side}_{name}") for name in VIEWS}

    @staticmethod
    def answer_of(frame: DataFrame, *, ordered: bool = False) -> tuple[str, list[str]]:
        """The columns with their types, and the rows as texts: `repr` distinguishes -0.0 from 0.0 and 1.0 from 1.00, and equates NaNs."""
        rows = [repr(tuple(each)) for each in frame.collect()]
        return frame.schema.simpleString(), rows if ordered else sorted(rows)

    @contextmanager
    def conf(self, settings: dict[str, str]) -> Iterator[None]:
        """The session has `settings` in the block. Afterwards they are as before."""
        before = {name: self.spark.conf.get(name, None) for name in settings}
        for name, value in settings.items():
            self.spark.conf.set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self.spark.conf.unset(name) if value is None else self.spark.conf.set(name, value)


def make(spark: SparkSession, folder: Path) -> Twins:
    """Writes both sides, and creates the views in `spark`."""
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    shard = _write_shard(location)
    given = {"shard": str(shard), "blob": location.blob, "consensus": location.consensus}
    _write_parquet(folder)
    return seen_by(spark, given, folder)


def seen_by(spark: SparkSession, given: dict[str, str], folder: Path) -> Twins:
    """What was written, in views of `spark`, a classic session or one over Spark Connect."""
    register(spark)
    for name in ("first", "latest", "updates"):
        spark.read.parquet(f"{folder}/{name}").createOrReplaceTempView(f"parquet_{name}")
    for name, (options, parquet) in LOADS.items():
        frame = spark.read.format("persist").options(**given, **options).load()
        frame.createOrReplaceTempView(f"shard_{name}")
        if not is_remote():
            # Planned here, once. Otherwise the first query's threads would each plan it, in a process each.
            frame.rdd.getNumPartitions()
        spark.sql(parquet).createOrReplaceTempView(f"parquet_{name}")
    options = ", ".join(f"{name} '{value}'" for name, value in (given | {"splits": "2"}).items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW shard_given USING persist OPTIONS ({options})")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW parquet_given USING parquet OPTIONS (path '{folder}/latest')")
    twins = Twins(spark, given, folder)
    for name, text in OVER.items():
        for side in SIDES:
            spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {side}_{name} AS {twins.text(text, side)}")
    return twins


def _write_shard(location: Location) -> ShardId:
    """Three appends of small parts in blobs, so that a frame has several partitions."""
    shard = ShardId.new()
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=16 * KIB))
    with (
        PersistClient.open(location, settings=settings) as client,
        client.open_writer(shard, SCHEMA, purpose="test") as writer,
    ):
        lower = 0
        for append, upper in zip(APPENDS, UPPERS, strict=True):
            updates = [(_of_fields(row(i)), time, diff) for numbers, time, diff in append for i in numbers]
            writer.compare_and_append(updates, expected_upper=Antichain.of(lower), new_upper=Antichain.of(upper))
            lower = upper
    return shard


def _of_fields(given: Row) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    key, val = given
    return tuple(key.values()), tuple(val.values())


def _with_one_zero(value: Any) -> Any:
    """A shard has one zero: it stores -0.0 as 0.0 (codec.updates)."""
    if isinstance(value, dict):
        return {name: _with_one_zero(each) for name, each in value.items()}
    return value + 0.0 if isinstance(value, float) else value


def _write_parquet(folder: Path) -> None:
    flat = pa.schema([field.with_nullable(True) for field in (*SCHEMA.key, *SCHEMA.val)])
    for name, as_of in (("first", 4), ("latest", 9)):
        rows = [_with_one_zero(key | val) for (key, val), count in contents(as_of) for _ in range(count)]
        _write_file(folder / name, pa.Table.from_pylist(rows, flat))
    updates = [{"key": key, "val": _with_one_zero(val), "time": 9, "diff": count} for (key, val), count in contents(9)]
    _write_file(folder / "updates", pa.Table.from_pylist(updates, SCHEMA.updates_schema))


def _write_file(folder: Path, table: pa.Table) -> None:
    """Without the statistics that Spark skips row groups by: with them it loses rows that are equal to NaN or -0.0."""
    folder.mkdir()
    pq.write_table(table, folder / "rows.parquet", use_dictionary=False, write_statistics=False)
