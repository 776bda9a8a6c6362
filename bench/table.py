"""Tables of `connect` against tables of deltalake, through their public APIs: same rows, same disk, same run, calls in alternation.

Needs `uv sync --group bench`. Our writes are durable when they return; the peer does not wait for the disk, so an fsync of its new files is
added to a second figure of each write. Both keep their past. Maintenance of ours runs behind the writes, as by default.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from persist_engine import connect

from bench.disk import NewFiles
from bench.measure import Row, median, ms, timings_s


def run(folder: Path, quick: bool) -> list[Row]:
    """500,000 keys, and a tenth of that with `quick`."""
    return _Pair(folder, keys=50_000 if quick else 500_000, repeat=3 if quick else 7).run()


def rows_of(ids: np.ndarray, seed: int) -> pa.Table:
    """Rows with these keys: text of 32 characters, one of a hundred groups, a number."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "id": ids.astype(np.int64),
            "name": pa.array(np.char.mod("%032x", rng.integers(0, 2**62, len(ids)))),
            "grp": pa.array((ids % 100).astype(np.int32)),
            "x": rng.random(len(ids)),
        }
    )


class _Pair:
    """The same table twice."""

    def __init__(self, folder: Path, *, keys: int, repeat: int) -> None:
        self._folder, self._keys, self._repeat = folder, keys, repeat
        self._uri = str(folder / "theirs")
        self._files = NewFiles(folder / "theirs")
        self._db = connect(folder / "ours")
        self._rows: list[Row] = []

    def run(self) -> list[Row]:
        """All rows of the report."""
        keys, key_ddl, value_ddl = self._keys, "id BIGINT", "name STRING, grp INT, x DOUBLE"
        first = rows_of(np.random.default_rng(0).permutation(keys), 0)
        self._ours = self._db.create("rows", key=key_ddl, value=value_ddl)
        self._compare(f"first {keys:,} rows, upsert against write", self._ours.upsert, self._append, [first])
        self._small()
        self._writes()
        self._reads("as written")
        self._one("optimize", self._ours.optimize, DeltaTable(self._uri).optimize.compact)
        self._reads("optimized")
        self._db.close()
        return self._rows

    def _append(self, frame: pa.Table) -> None:
        write_deltalake(self._uri, frame, mode="append")

    def _merge(self, frame: pa.Table) -> None:
        merge = DeltaTable(self._uri).merge(frame, "t.id = s.id", source_alias="s", target_alias="t")
        merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def _small(self) -> None:
        other, uri = self._db.create("small", key="id BIGINT", value="name STRING, grp INT, x DOUBLE"), self._uri
        self._uri = str(self._folder / "theirs" / "small")
        frames = [rows_of(np.arange(10) + 10 * turn, turn) for turn in range(self._repeat * 10)]
        self._compare("append of 10 rows", other.append, self._append, frames)
        self._uri = uri

    def _writes(self) -> None:
        keys, repeat = self._keys, self._repeat
        more = [rows_of(np.arange(keys // 10) + keys + turn * keys // 10, turn) for turn in range(repeat)]
        self._compare(f"append of {keys // 10:,} rows", self._ours.append, self._append, more)
        rng = np.random.default_rng(7)
        some = [rows_of(rng.choice(keys, keys // 25, replace=False), 100 + turn) for turn in range(repeat)]
        self._compare(f"upsert of {keys // 25:,} of {keys:,} keys", self._ours.upsert, self._merge, some)
        groups = [f"grp = {turn}" for turn in range(repeat)]
        self._compare(
            "delete of 1 % by predicate", self._ours.delete, lambda p: DeltaTable(self._uri).delete(p), groups
        )
        whole = self._ours.to_arrow().combine_chunks()
        changed = [self._changed(whole, turn) for turn in range(repeat)]
        overwrite = lambda frame: write_deltalake(self._uri, frame, mode="overwrite")  # noqa: E731
        self._compare("overwrite with 1 % changed", self._ours.overwrite, overwrite, changed)

    @staticmethod
    def _changed(whole: pa.Table, turn: int) -> pa.Table:
        x = whole.column("x").to_numpy().copy()
        x[turn::100] += turn + 1
        return whole.set_column(3, "x", pa.array(x))

    def _reads(self, state: str) -> None:
        past = self._ours.last_time
        assert past is not None
        version = DeltaTable(self._uri).version() - 2
        then = self._ours.history(3).column("time").to_pylist()[-1] or past
        pairs: dict[str, tuple[Callable[[], pa.Table], Callable[[], pa.Table]]] = {
            "read of all rows": (self._ours.to_arrow, lambda: DeltaTable(self._uri).to_pyarrow_table()),
            "read of 1 % by a filter on a value": (
                self._ours.scan("grp = 50").to_arrow,
                lambda: DeltaTable(self._uri).to_pyarrow_table(filters=pc.field("grp") == 50),
            ),
            "read of 1 % by a range of keys": (
                self._ours.scan(f"id < {self._keys // 100}").to_arrow,
                lambda: DeltaTable(self._uri).to_pyarrow_table(filters=pc.field("id") < self._keys // 100),
            ),
            "read of the past": (
                lambda: self._ours.at(then).to_arrow(),
                lambda: DeltaTable(self._uri, version=version).to_pyarrow_table(),
            ),
        }
        for what, (ours, theirs) in pairs.items():
            if "past" not in what and ours().num_rows != theirs().num_rows:
                raise SystemExit(f"{what}: ours has {ours().num_rows} rows, theirs {theirs().num_rows}")
            taken: tuple[list[float], list[float]] = ([], [])
            for _, (call, seconds) in itertools.product(range(self._repeat), zip((ours, theirs), taken, strict=True)):
                seconds.extend(timings_s(lambda _, call=call: call(), repeat=1, warm=0))
            self._add(f"{what}, {state}", *map(median, taken))

    def _compare(
        self, what: str, ours: Callable[[object], object], theirs: Callable[[object], object], arguments: list
    ) -> None:
        """Medians of writes. Of several, the first warms both."""
        taken: tuple[list[float], list[float], list[float]] = ([], [], [])
        for argument in arguments:
            taken[0].extend(timings_s(lambda _, a=argument: ours(a), repeat=1, warm=0))
            taken[1].extend(timings_s(lambda _, a=argument: theirs(a), repeat=1, warm=0))
            taken[2].append(taken[1][-1] + self._files.sync_s())
        skip = 2 if len(arguments) > 2 else 0
        measured = [median(seconds[skip:]) for seconds in taken]
        self._add(what, measured[0], measured[1])
        self._add(f"{what}, with an fsync of the peer's files", measured[0], measured[2])

    def _one(self, what: str, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        self._db.drain()
        seconds = []
        for call in (ours, theirs):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        self._add(what, *seconds)

    def _add(self, what: str, ours: float, theirs: float) -> None:
        self._rows.append(Row(f"{what}, beside deltalake", ms(ours), ms(theirs), ours / theirs, "lower"))
