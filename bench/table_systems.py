"""One table in four systems, through the public Python API of each, for the bench `table`.

A method does one thing as a user of the system would, and nothing else. The driver generates rows before it, and compares how many were
read. A method raises `NotOffered` if the system does not offer the operation. Needs `uv sync --group bench`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

#: The columns of every table; `id` is the key.
COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("grp", pa.int32()), ("x", pa.float64())])


class NotOffered(Exception):
    """The system has no such operation."""


class System(ABC):
    """One table named `name` below `folder`, which is created at once, with rows that a key identifies."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir(parents=True)

    @abstractmethod
    def append(self, frame: pa.Table) -> None: ...

    def first(self, frame: pa.Table) -> None:
        """Writes the first rows in the fastest way of the system after which rows with the same keys may follow."""
        self.append(frame)

    @abstractmethod
    def upsert(self, frame: pa.Table) -> None: ...

    @abstractmethod
    def delete(self, grp: int) -> None:
        """Deletes the rows of a group."""

    @abstractmethod
    def overwrite(self, frame: pa.Table) -> None: ...

    @abstractmethod
    def read(self) -> pa.Table: ...

    @abstractmethod
    def read_group(self, grp: int) -> pa.Table: ...

    @abstractmethod
    def read_keys_below(self, key: int) -> pa.Table: ...

    @abstractmethod
    def version(self) -> Any:
        """The newest version, for `read_version`."""

    @abstractmethod
    def read_version(self, version: Any) -> pa.Table: ...

    def changes(self, versions: int) -> int:
        """Reads the rows that the last versions changed. Returns their number."""
        raise NotOffered

    @abstractmethod
    def optimize(self) -> None: ...

    def vacuum(self) -> None:
        """Removes the files of old versions."""
        raise NotOffered

    @abstractmethod
    def history(self) -> int:
        """Reads the list of versions. Returns their number."""

    @abstractmethod
    def reopen(self) -> None:
        """Forgets all cached data of the table and finds its newest version."""

    def settle(self) -> None:  # noqa: B027 - most systems have nothing to wait for
        """Waits for background work."""

    def close(self) -> None:  # noqa: B027 - the same
        """Closes the table."""


class Persist(System):
    """`connect` on files and SQLite, with maintenance in the background. Every write is on disk when it returns."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._open()
        self._table = self._db.create(name, key="id BIGINT", value="name STRING, grp INT, x DOUBLE")
        self._left: list[Any] = []

    def _open(self) -> None:
        from persist_engine import connect

        self._db = connect(self.folder)

    def append(self, frame: pa.Table) -> None:
        self._table.append(frame)

    def upsert(self, frame: pa.Table) -> None:
        self._table.upsert(frame)

    def delete(self, grp: int) -> None:
        self._table.delete(f"grp = {grp}")

    def overwrite(self, frame: pa.Table) -> None:
        self._table.overwrite(frame)

    def read(self) -> pa.Table:
        return self._table.to_arrow()

    def read_group(self, grp: int) -> pa.Table:
        return self._table.scan(f"grp = {grp}").to_arrow()

    def read_keys_below(self, key: int) -> pa.Table:
        return self._table.scan(f"id < {key}").to_arrow()

    def version(self) -> Any:
        return self._table.last_time

    def read_version(self, version: Any) -> pa.Table:
        return self._table.at(version).to_arrow()

    def changes(self, versions: int) -> int:
        since = self._table.history(versions).column("time").to_pylist()[-1]
        return sum(1 for _ in self._table.changes(since=since - 1))

    def optimize(self) -> None:
        self._table.optimize()

    def vacuum(self) -> None:
        self._table.vacuum()

    def history(self) -> int:
        return int(self._table.history().num_rows)

    def first(self, frame: pa.Table) -> None:
        self._table.upsert(frame)

    def reopen(self) -> None:
        self._left.append(self._db)
        self._open()
        self._table = self._db[self.name]
        assert self._table.last_time is not None

    def settle(self) -> None:
        self._db.drain()
        while self._left:
            self._left.pop().close()

    def close(self) -> None:
        self._db.close()


class Lance(System):
    """The columnar format of the package `pylance`."""

    def __init__(self, folder: Path, name: str) -> None:
        import lance

        super().__init__(folder, name)
        self._lance: Any = lance
        self._uri = str(self.folder / "table.lance")
        self._set: Any = lance.write_dataset(COLUMNS.empty_table(), self._uri)

    def append(self, frame: pa.Table) -> None:
        self._set = self._lance.write_dataset(frame, self._uri, mode="append")

    def upsert(self, frame: pa.Table) -> None:
        self._set.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(frame)

    def delete(self, grp: int) -> None:
        self._set.delete(f"grp = {grp}")

    def overwrite(self, frame: pa.Table) -> None:
        self._set = self._lance.write_dataset(frame, self._uri, mode="overwrite")

    def read(self) -> pa.Table:
        return self._lance.dataset(self._uri).to_table()

    def read_group(self, grp: int) -> pa.Table:
        return self._lance.dataset(self._uri).to_table(filter=f"grp = {grp}")

    def read_keys_below(self, key: int) -> pa.Table:
        return self._lance.dataset(self._uri).to_table(filter=f"id < {key}")

    def version(self) -> Any:
        return self._lance.dataset(self._uri).version

    def read_version(self, version: Any) -> pa.Table:
        return self._lance.dataset(self._uri, version=version).to_table()

    def optimize(self) -> None:
        self._set.optimize.compact_files()

    def vacuum(self) -> None:
        self._set.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

    def history(self) -> int:
        return len(self._lance.dataset(self._uri).versions())

    def reopen(self) -> None:
        self._set = self._lance.dataset(self._uri)


class Delta(System):
    """The Rust implementation. Changes are recorded, which its table of small commits needs for `changes`."""

    def __init__(self, folder: Path, name: str) -> None:
        import deltalake

        super().__init__(folder, name)
        self._delta: Any = deltalake
        self._uri = str(self.folder / "table")
        configuration = {"delta.enableChangeDataFeed": "true"} if name == "small" else {}
        deltalake.DeltaTable.create(self._uri, COLUMNS, configuration=configuration)

    def _table(self) -> Any:
        return self._delta.DeltaTable(self._uri)

    def append(self, frame: pa.Table) -> None:
        self._delta.write_deltalake(self._uri, frame, mode="append")

    def upsert(self, frame: pa.Table) -> None:
        merge = self._table().merge(frame, "t.id = s.id", source_alias="s", target_alias="t")
        merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def delete(self, grp: int) -> None:
        self._table().delete(f"grp = {grp}")

    def overwrite(self, frame: pa.Table) -> None:
        self._delta.write_deltalake(self._uri, frame, mode="overwrite")

    def read(self) -> pa.Table:
        return self._table().to_pyarrow_table()

    def read_group(self, grp: int) -> pa.Table:
        import pyarrow.compute as pc

        return self._table().to_pyarrow_table(filters=pc.field("grp") == grp)

    def read_keys_below(self, key: int) -> pa.Table:
        import pyarrow.compute as pc

        return self._table().to_pyarrow_table(filters=pc.field("id") < key)

    def version(self) -> Any:
        return self._table().version()

    def read_version(self, version: Any) -> pa.Table:
        return self._delta.DeltaTable(self._uri, version=version).to_pyarrow_table()

    def changes(self, versions: int) -> int:
        table = self._table()
        feed = table.load_cdf(starting_version=table.version() - versions + 1)
        return int(pa.table(feed.read_all()).num_rows)

    def optimize(self) -> None:
        self._table().optimize.compact()

    def vacuum(self) -> None:
        self._table().vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def history(self) -> int:
        return len(self._table().history())

    def reopen(self) -> None:
        self._table().version()


class Iceberg(System):
    """The Python implementation, with its SQLite catalog. It has no compaction, so `optimize` rewrites the table."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        warnings.filterwarnings("ignore")  # it warns at every write
        self._catalog = self._load()
        self._catalog.create_namespace("bench")
        self._table: Any = self._catalog.create_table("bench.rows", schema=COLUMNS)

    def _load(self) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        return SqlCatalog(
            "bench", uri=f"sqlite:///{self.folder}/catalog.db", warehouse=f"file://{self.folder}/warehouse"
        )

    def append(self, frame: pa.Table) -> None:
        self._table.append(frame)

    def upsert(self, frame: pa.Table) -> None:
        self._table.upsert(frame, join_cols=["id"])

    def delete(self, grp: int) -> None:
        self._table.delete(f"grp = {grp}")

    def overwrite(self, frame: pa.Table) -> None:
        self._table.overwrite(frame)

    def read(self) -> pa.Table:
        return self._table.scan().to_arrow()

    def read_group(self, grp: int) -> pa.Table:
        return self._table.scan(row_filter=f"grp = {grp}").to_arrow()

    def read_keys_below(self, key: int) -> pa.Table:
        return self._table.scan(row_filter=f"id < {key}").to_arrow()

    def version(self) -> Any:
        return self._table.current_snapshot().snapshot_id

    def read_version(self, version: Any) -> pa.Table:
        return self._table.scan(snapshot_id=version).to_arrow()

    def optimize(self) -> None:
        self._table.overwrite(self._table.scan().to_arrow())

    def history(self) -> int:
        return int(self._table.inspect.snapshots().num_rows)

    def reopen(self) -> None:
        self._catalog = self._load()
        self._table = self._catalog.load_table("bench.rows")


SYSTEMS: dict[str, type[System]] = {"persist": Persist, "Lance": Lance, "deltalake": Delta, "pyiceberg": Iceberg}
