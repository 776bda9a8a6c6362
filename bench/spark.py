"""Spark writes and reads of a shard against the same on plain Parquet, in one session on two cores.

The calls of both sides alternate, so that they run under the same load. Each row shows seconds, and the seconds of processor time of all
processes (driver, JVM, Python workers), which depend less on other work on the machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.storage.metered import MeteredBlob
from persist_engine.work.compact import compact
from prometheus_client import CollectorRegistry

from bench.compaction import whole_request
from bench.measure import Row, median
from bench.mirror import process_tree

KEY, VALUE = "id BIGINT", "name STRING, amount BIGINT"
_TICKS = os.sysconf("SC_CLK_TCK")
Call = Callable[[], object]


def run(folder: Path, quick: bool) -> list[Row]:
    """Appends, reads and mirrors of the same rows."""
    few, many, repeat = (50_000, 500_000, 3) if quick else (50_000, 5_000_000, 5)
    session = session_in(folder)
    bench = Bench(session, folder)
    try:
        rows = bench.appends(few, repeat=2 * repeat + 1)
        rows += bench.appends(many, repeat=repeat, is_large=True)
        rows += bench.reads(many, repeat=repeat)
        return [*rows, *bench.mirrors(many // 5, repeat=repeat)]
    finally:
        session.stop()


def session_in(folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A session of two threads. `more`: further settings."""
    from persist_spark.datasource import register
    from persist_spark.session import start_session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = {
        "spark.master": "local[2]", "spark.ui.enabled": "false", "spark.driver.memory": "2g", "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": str(folder / "warehouse"), **more,
    }  # fmt: skip
    arguments = " ".join(f"--conf '{name}={value}'" for name, value in conf.items())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{arguments} pyspark-shell"
    session = start_session("bench")
    register(session)
    return session


class Bench:
    """One session, its folder, and one pair of stores: files, or the blob store `blob`. `plain`: the place for plain Parquet."""

    def __init__(self, session: Any, folder: Path, *, blob: str | None = None, plain: str | None = None) -> None:
        self.spark, self.folder, self.plain = session, folder, plain or str(folder)
        self.location = Location(blob=blob or f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")

    # -- writes ------------------------------------------------------------------------------------------------------

    def appends(self, rows: int, *, repeat: int, is_large: bool = False) -> list[Row]:
        """A sink's Append and `df.write`, against `df.write.parquet` of the same frame, unsorted and sorted by ranges of the key."""
        source = self._input(rows)
        sink, frame = self.shard(), self.shard()
        number = iter(range(1 << 30))

        def plain() -> None:
            self.spark.read.parquet(source).write.mode("overwrite").parquet(f"{self.folder}/plain")

        def ranged() -> None:
            ordered = self.spark.read.parquet(source).repartitionByRange("id").sortWithinPartitions("id")
            ordered.write.mode("overwrite").parquet(f"{self.folder}/ranged")

        def by_sink() -> None:
            self.sink(sink, source, run=f"run-{next(number)}", envelope="Append")

        def by_write() -> None:
            self._options(self.spark.read.parquet(source).write.format("persist"), frame).mode("append").save()

        calls = {"plain": plain, "sink": by_sink, "df.write": by_write, **({"ranged": ranged} if is_large else {})}
        took = interleaved(calls, repeat=repeat)
        found = [
            _row(f"append of {rows:,} rows, {name}", took[name], took["plain"], "df.write.parquet")
            for name in ("sink", "df.write")
        ]
        if is_large:
            found += [
                _row(f"append of {rows:,} rows, {name}", took[name], took["ranged"], "the same sorted by ranges")
                for name in ("sink", "df.write")
            ]
        return found

    # -- reads -------------------------------------------------------------------------------------------------------

    def reads(self, rows: int, *, repeat: int) -> list[Row]:
        """Queries over one compacted shard, and over one that a single append wrote."""
        source = self._input(rows)
        shard = self.shard()
        self.sink(shard, source, run="run-1", envelope="Append")
        plain = f"{self.plain}/reads"
        self.spark.read.parquet(source).repartitionByRange("id").sortWithinPartitions("id").write.parquet(plain)
        found = self._queries(f"{rows:,} rows, one append", shard, plain, rows, repeat=repeat)
        self._compact(shard)
        return found + self._queries(f"{rows:,} rows, compacted", shard, plain, rows, repeat=repeat)

    def _queries(self, what: str, shard: ShardId, plain: str, rows: int, *, repeat: int) -> list[Row]:
        columns = "count(id), max(name), sum(amount)"
        low, high = rows // 2, rows // 2 + rows // 100
        queries: dict[str, tuple[dict[str, str], Callable[[Any], Any]]] = {
            "count": ({}, lambda frame: frame.groupBy().count()),
            "sum of one column": ({}, lambda frame: frame.selectExpr("sum(amount)")),
            "sum, option columns": ({"columns": "amount"}, lambda frame: frame.selectExpr("sum(amount)")),
            "1 % of keys": (
                {},
                lambda frame: frame.where(f"id >= {low} AND id < {high}").selectExpr(*columns.split(", ")),
            ),
            "1 % of keys, option where": (
                {"where": f"id >= {low} AND id < {high}"},
                lambda frame: frame.where(f"id >= {low} AND id < {high}").selectExpr(*columns.split(", ")),
            ),
            "whole rows": ({}, lambda frame: frame.selectExpr(*columns.split(", "))),
        }
        found = []
        for name, (options, query) in queries.items():

            def ours(options: dict[str, str] = options, query: Callable[[Any], Any] = query) -> Any:
                reader = self._options(self.spark.read.format("persist"), shard).options(**options)
                return query(reader.load()).collect()

            def base(query: Callable[[Any], Any] = query) -> Any:
                return query(self.spark.read.parquet(plain)).collect()

            assert ours() == base(), name
            took = interleaved({"ours": ours, "base": base}, repeat=repeat)
            found.append(_row(f"{name}: {what}", took["ours"], took["base"], "spark.read.parquet"))
        return found

    # -- mirrors -----------------------------------------------------------------------------------------------------

    def mirrors(self, rows: int, *, repeat: int) -> list[Row]:
        """A Mirror of an unchanged input against a scan of the input; then the bytes that 64 splits fetch after many changes."""
        source = self._input(rows)
        shard = self.shard()
        number = iter(range(1, 1 << 30))

        def mirror() -> None:
            self.sink(shard, source, run=f"run-{next(number)}", envelope="Mirror")

        def scan() -> None:
            self.spark.read.parquet(source).write.format("noop").mode("overwrite").save()

        mirror()
        took = interleaved({"ours": mirror, "base": scan}, repeat=repeat)
        found = [_row(f"Mirror of {rows:,} unchanged rows", took["ours"], took["base"], "a scan of the input")]
        for change in range(20):
            changed_at = f"{self.folder}/changed"
            changed = self.spark.read.parquet(source).selectExpr(
                "id", "name", f"IF(id % 50 = {change}, amount + 1, amount) AS amount"
            )
            changed.write.mode("overwrite").parquet(changed_at)
            self.sink(shard, changed_at, run=f"run-{next(number)}", envelope="Mirror")
        return [*found, self._fetched(shard)]

    def _fetched(self, shard: ShardId) -> Row:
        with PersistClient.open(self.location) as client, client.open_leased_reader(shard, purpose="bench") as reader:
            latest = Antichain.of(client.recent_upper(shard).newest_complete)
            with reader.snapshot(latest) as snapshot:
                whole, splits = snapshot.bytes_estimate, snapshot.splits(64, merged=False)
                registry = CollectorRegistry()
                metered = MeteredBlob(client.machine(shard).blob, env=SystemEnv(), metrics=PrometheusMetrics(registry))
                for split in splits:
                    for _ in split.to_batches(metered):
                        pass
        verbs = (registry.get_sample_value("persist_blob_bytes_total", {"verb": verb}) for verb in ("get", "get_range"))
        fetched = int(sum(each or 0 for each in verbs))
        what = f"64 splits after 20 Mirrors, {len(splits)} made: bytes fetched"
        return Row(what, f"{fetched:,}", f"{whole:,} held", fetched / whole, "lower")

    # -- shards ------------------------------------------------------------------------------------------------------

    def _input(self, rows: int) -> str:
        """A folder of four Parquet files of `rows` rows in random order."""
        folder = f"{self.folder}/input-{rows}"
        if not Path(folder).exists():
            text = "concat(lower(hex(xxhash64(id))), lower(hex(xxhash64(id, 1L)))) AS name"
            frame = self.spark.range(rows).selectExpr("id", text, "id % 1000 AS amount").orderBy("name")
            frame.repartition(4).write.parquet(folder)
        return folder

    def shard(self) -> ShardId:
        """A new shard without writes."""
        shard = ShardId.new()
        with PersistClient.open(self.location) as client:
            client.initialise(shard, Schema.from_ddl(KEY, VALUE))
        return shard

    def _options(self, of: Any, shard: ShardId) -> Any:
        return of.option("shard", shard).option("blob", self.location.blob).option("consensus", self.location.consensus)

    def sink(self, shard: ShardId, source: str, *, run: str, envelope: str) -> None:
        """One run of a sink, from the Parquet of a path or folder."""
        from persist_spark.sink import run_sink
        from persist_spark.spec import SinkSpec

        spec = {
            "sink_id": f"bench/{envelope}", "run_id": run, "shard_id": str(shard), "schema": {"key": KEY, "value": VALUE},
            "location": {"blob": self.location.blob, "consensus": self.location.consensus}, "purpose": "bench",
            "input": {"type": "Format", "format": {"name": "parquet", "options": {"path": source}}},
            "envelope": {"type": envelope}, "write": {},
        }  # fmt: skip
        run_sink(self.spark, SinkSpec.parse(spec))

    def _compact(self, shard: ShardId) -> None:
        with PersistClient.open(self.location) as client:
            machine = client.machine(shard)
            compact(machine, whole_request(machine))


Took = tuple[list[float], list[float]]


def interleaved(calls: dict[str, Call], *, repeat: int) -> dict[str, Took]:
    """For each call the seconds, and the seconds of processor time, of `repeat` repetitions in turn, after two that do not count."""
    took: dict[str, Took] = {name: ([], []) for name in calls}
    for index in range(repeat + 2):
        for name, call in calls.items():
            before_s, began_s = cpu_s(), time.perf_counter()
            call()
            seconds, used_s = time.perf_counter() - began_s, cpu_s() - before_s
            if index > 1:
                took[name][0].append(seconds)
                took[name][1].append(used_s)
    return took


def cpu_s(root: int | None = None) -> float:
    """The processor time of a process (None: this one) and all its descendants, including ended ones."""
    total = 0
    for pid in process_tree(root or os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        except (OSError, IndexError):
            continue
        total += sum(map(int, fields[11:15]))
    return total / _TICKS


def _row(what: str, ours: Took, base: Took, against: str) -> Row:
    (ours_s, ours_cpu), (base_s, base_cpu) = ([median(each) for each in side] for side in (ours, base))
    ratio = f"cpu {ours_cpu / max(base_cpu, 1e-9):.2f}x"
    return Row(
        what,
        f"{ours_s:.2f} s ({ours_cpu:.2f} s cpu)",
        f"{base_s:.2f} s ({base_cpu:.2f}) by {against}; {ratio}",
        ours_s / base_s,
        "lower",
    )
