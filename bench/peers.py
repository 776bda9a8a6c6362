"""Compares shards with table formats over Parquet files, through their public APIs: same rows, same disk, same run.

Needs `uv sync --group bench`. Every system gets the same Arrow tables. The calls alternate, so that all systems run under the same load. A
read returns all rows as a table in memory. Compaction merges the twenty appends.

Our appends are durable when they return; the peers do not wait for the disk. So each peer has a second row with an fsync of its files
added, and one row compares with the bare system calls of a durable append.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.work.compact import compact

from bench.compaction import whole_request
from bench.data import SCHEMA, flat, updates
from bench.disk import BareDisk, NewFiles
from bench.measure import Row, median, ms, timings_s

#: The largest ratios of ours to theirs that are acceptable. Figures against the second peer are for information.
APPEND_MAX, SMALL_MAX, READ_MAX, COMPACT_MAX = 1.0, 0.1, 1.0, 1.0
#: The approximate bytes of 10 rows in a diff, and of one row in a part.
DIFF_BYTES, PART_ROW_BYTES = 2_500, 9


class System(ABC):
    """One table in one system. A table is given as updates and as plain columns, and each system uses its own form."""

    name: str

    @abstractmethod
    def append(self, table: pa.Table, plain: pa.Table) -> None:
        """One durable commit."""

    @abstractmethod
    def begin_reading(self) -> None:
        """Opens a reader of the current contents. Not measured."""

    @abstractmethod
    def read(self) -> int:
        """Reads all rows into memory. Returns their number."""

    @abstractmethod
    def compact(self) -> None:
        """Merges many files into few."""

    @abstractmethod
    def close(self) -> None:
        """Closes the table."""


class Ours(System):
    """A shard on files and SQLite."""

    name = "persist"

    def __init__(self, folder: Path) -> None:
        location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self._client = PersistClient.open(location)
        self._shard = ShardId.new()
        self._writer = self._client.open_writer(self._shard, SCHEMA, purpose="bench")
        self._upper = 0

    def append(self, table: pa.Table, plain: pa.Table) -> None:
        lower, self._upper = Antichain.of(self._upper), self._upper + 1
        self._writer.compare_and_append(table, expected_upper=lower, new_upper=Antichain.of(self._upper))

    def begin_reading(self) -> None:
        self._reader = self._client.open_leased_reader(self._shard, SCHEMA, purpose="bench")

    def read(self) -> int:
        return int(self._reader.snapshot(as_of=Antichain.of(self._upper - 1)).to_table().num_rows)

    def compact(self) -> None:
        machine = self._client.machine(self._shard)
        compact(machine, whole_request(machine))
        if sum(len(batch.run_metas) for batch in machine.refresh().trace.batches()) != 1:
            raise SystemExit("compaction left more than one run")

    def close(self) -> None:
        self._client.close()


class Delta(System):
    """The Rust implementation."""

    name = "deltalake"

    def __init__(self, folder: Path) -> None:
        self._uri = str(folder / "table")

    def append(self, table: pa.Table, plain: pa.Table) -> None:
        from deltalake import write_deltalake

        write_deltalake(self._uri, plain, mode="append")

    def begin_reading(self) -> None:
        from deltalake import DeltaTable

        self._table = DeltaTable(self._uri)

    def read(self) -> int:
        return int(self._table.to_pyarrow_table().num_rows)

    def compact(self) -> None:
        from deltalake import DeltaTable

        DeltaTable(self._uri).optimize.compact()

    def close(self) -> None:
        pass


class Iceberg(System):
    """The Python implementation, with its SQLite catalog. It has no compaction, so the bench rewrites the whole table."""

    name = "pyiceberg"

    def __init__(self, folder: Path) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        folder.mkdir(parents=True)
        catalog = SqlCatalog("bench", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
        catalog.create_namespace("bench")
        self._catalog: Any = catalog
        self._table: Any = None

    def append(self, table: pa.Table, plain: pa.Table) -> None:
        if self._table is None:
            self._table = self._catalog.create_table("bench.rows", schema=plain.schema)
        self._table.append(plain)

    def begin_reading(self) -> None:
        self._table = self._catalog.load_table("bench.rows")

    def read(self) -> int:
        return int(self._table.scan().to_arrow().num_rows)

    def compact(self) -> None:
        self._table.overwrite(self._table.scan().to_arrow())

    def close(self) -> None:
        pass


SYSTEMS: tuple[type[System], ...] = (Ours, Delta, Iceberg)


def run(folder: Path, quick: bool) -> list[Row]:
    """20 appends of 50,000 rows, a read and a compaction; 200 commits of 10 rows."""
    warnings.filterwarnings("ignore")  # pyiceberg warns at every append
    appends, rows, commits = (4, 5_000, 20) if quick else (20, 50_000, 200)
    out = []
    large = [updates(rows, time=index, seed=index, first=index * rows) for index in range(appends)]
    systems = [system(folder / "large" / system.name) for system in SYSTEMS]
    out += _appended(f"append of {rows:,} rows", systems, large, folder / "large", APPEND_MAX)
    out += _rows(f"full read of {appends * rows:,} rows in {appends} appends", _read(systems, appends * rows), READ_MAX)
    out += _rows(f"compaction of {appends} appends", _compacted(systems), COMPACT_MAX)
    out += _rows(f"full read of {appends * rows:,} rows, compacted", _read(systems, appends * rows), READ_MAX)
    _close(systems)
    small = [updates(10, time=index, seed=index) for index in range(commits)]
    systems = [system(folder / "small" / system.name) for system in SYSTEMS]
    out += _appended("commit of 10 rows", systems, small, folder / "small", SMALL_MAX)
    _close(systems)
    return out


def _appended(what: str, systems: list[System], tables: list[pa.Table], folder: Path, most: float) -> list[Row]:
    """The medians. The first append of each system creates the table and is not counted."""
    taken: dict[str, list[float]] = {system.name: [] for system in systems}
    synced: dict[str, list[float]] = {system.name: [] for system in systems if system.name != Ours.name}
    files = {name: NewFiles(folder / name) for name in synced}
    disk, bare = BareDisk(folder / "bare"), []
    log, part = b"x" * DIFF_BYTES, bytes(PART_ROW_BYTES * tables[0].num_rows) if tables[0].num_rows > 10 else b""
    for table in tables:
        plain = flat(table)
        for system in systems:
            (seconds,) = timings_s(lambda _: system.append(table, plain), repeat=1, warm=0)  # noqa: B023
            taken[system.name].append(seconds)
            if system.name in synced:
                synced[system.name].append(seconds + files[system.name].sync_s())
        bare += timings_s(lambda _: disk.append(part, log), repeat=1, warm=0)
    disk.close()
    ours = median(taken[Ours.name][1:])
    rows = _rows(what, {name: median(seconds[1:]) for name, seconds in taken.items()}, most)
    against = {f"{name} and an fsync of its files": median(seconds[1:]) for name, seconds in synced.items()}
    against["the bare disk (" + ("file, folder, " if part else "") + "SQLite commit)"] = median(bare[1:])
    return rows + [
        Row(f"{what}, beside {name}", ms(ours), ms(theirs), ours / theirs, "lower") for name, theirs in against.items()
    ]


def _read(systems: list[System], rows: int) -> dict[str, float]:
    for system in systems:
        system.begin_reading()
    taken: dict[str, list[float]] = {system.name: [] for system in systems}
    for _, system in itertools.product(range(7), systems):

        def read(_: int, system: System = system) -> None:
            if (found := system.read()) != rows:
                raise SystemExit(f"{system.name} read {found} rows, {rows} were written")

        taken[system.name] += timings_s(read, repeat=1, warm=0)
    return {name: median(seconds[1:]) for name, seconds in taken.items()}


def _compacted(systems: list[System]) -> dict[str, float]:
    return {system.name: timings_s(lambda _: system.compact(), repeat=1, warm=0)[0] for system in systems}  # noqa: B023


def _rows(what: str, seconds: dict[str, float], most: float) -> list[Row]:
    ours = seconds[Ours.name]
    return [
        Row(f"{what}, beside {peer}", ms(ours), ms(theirs), ours / theirs, f"lower (asked for: {most:g})")
        for peer, theirs in seconds.items()
        if peer != Ours.name
    ]


def _close(systems: list[System]) -> None:
    for system in systems:
        system.close()
