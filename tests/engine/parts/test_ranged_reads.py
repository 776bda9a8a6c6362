"""Splits, and reads with a condition on the key, fetch row groups of parts. They show the same rows as a whole read, whatever is cut, and no
damaged byte.
"""

import math
from collections import Counter
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from persist_engine import Appended, ChangesSplit, Location, PersistClient, Schema, ShardId, SnapshotSplit
from persist_engine.base.errors import CorruptData, MissingBlob
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.codec import row_groups
from persist_engine.parts import even_ranges as planning
from persist_engine.parts import source as parts_source
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, IsNull, Not, Or
from persist_engine.storage.blob_mem import MemBlob
from persist_kit.depth import draws

SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4 << 10), retain_ms=None)
#: The type of the first field of the key, and its value for a number.
KEYS = {
    "BIGINT": lambda n: n - 20,
    "SMALLINT": lambda n: None if n == 7 else n,
    "STRING": lambda n: None if n == 3 else f"{'x' * (n % 70)}{n:03}",
    "BINARY": lambda n: bytes([n % 256, 255, 255]) * (n % 30),
    "DOUBLE": lambda n: {1: math.nan, 2: -0.0, 3: 0.0, 4: None, 5: math.inf}.get(n, n / 3),
    "DATE": lambda n: date.fromordinal(730_000 + 9 * n),
    "DECIMAL(20,4)": lambda n: Decimal(n - 30) / 4,
    "BOOLEAN": lambda n: (True, False, None)[n % 3],
}


class CountingBlob(MemBlob):
    """Counts what is fetched, and can damage the answers for pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched_bytes, self.ranges, self.flip_at = 0, 0, None

    def get(self, key: str) -> bytes | None:
        data = super().get(key)
        self.fetched_bytes += len(data or b"")
        return data

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        data = MemBlob.get(self, key)
        if data is None:
            return None
        self.ranges += 1
        if self.flip_at is not None:
            at = self.flip_at % len(data)
            data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        piece = data[start : start + size_bytes]
        self.fetched_bytes += len(piece)
        return piece


@pytest.fixture
def small(monkeypatch):
    """Row groups of seven rows, parts of some dozens, and as many splits as asked for."""
    monkeypatch.setattr(row_groups, "ROW_GROUP_ROWS", 7)
    monkeypatch.setattr(row_groups, "DECODED_ROWS", 21)
    monkeypatch.setattr(parts_source, "CUT_BYTES_MIN", 0)
    monkeypatch.setattr(planning, "FETCH_PERCENT_MAX", 10**9)


class Shard:
    """A shard in memory, with the updates that were appended."""

    def __init__(self, kind: str = "BIGINT") -> None:
        self.client = PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=SETTINGS)
        self.id, self.key_of = ShardId.new(), KEYS[kind]
        self.schema = Schema.from_ddl(f"k {kind}, n INT", "x STRING")
        self.client.initialise(self.id, self.schema)
        self.updates, self.upper = [], 0
        self.blob = CountingBlob()

    def append(self, rows, upper: int) -> None:
        """Appends (number, time, diff)."""
        updates = [(((self.key_of(n), n), (f"value {n % 4}",)), time, diff) for n, time, diff in rows]
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            answer = writer.compare_and_append(updates, expected_upper=self.upper, new_upper=upper)
            assert isinstance(answer, Appended)
        self.updates += [(n, time, diff) for n, time, diff in rows]
        self.upper = upper
        source = self.client.machine(self.id).blob
        for info in source.list_prefix(""):
            self.blob.set(info.key, source.get(info.key))

    def open(self):
        return self.client.open_leased_reader(self.id, self.schema, purpose="test")

    def check_snapshot(self, as_of: int, count: int, **asked) -> int:
        """Compares splits with the oracle and with the whole read. Returns the number of pieces."""
        with self.open() as reader, reader.snapshot(as_of, **asked) as snapshot:
            whole = shown(snapshot.to_batches())
            for merged in (True, False):
                pieces = [SnapshotSplit.from_bytes(each.to_bytes()) for each in snapshot.splits(count, merged=merged)]
                assert shown(batch for piece in pieces for batch in piece.to_batches(self.blob)) == whole
        if not asked:
            wanted = Counter()
            for n, time, diff in self.updates:
                wanted[n] += diff * (time <= as_of)
            numbers = Counter()
            for row, diff in whole.items():
                numbers[number_in(row)] += diff
            assert {name: diff for name, diff in numbers.items() if diff} == {n: d for n, d in wanted.items() if d}
        return len(pieces)

    def check_changes(self, after: int, count: int) -> None:
        with self.open() as reader, reader.changes(since=after, upto=self.upper - 1) as changes:
            pieces = [ChangesSplit.from_bytes(each.to_bytes()) for each in changes.splits(count)]
            found = shown(batch for piece in pieces for batch in piece.to_batches(self.blob))
            assert found == shown(changes.to_batches())


def shown(batches) -> Counter:
    found = Counter()
    for batch in batches:
        for row in batch.to_pylist():
            found[repr((row.get("key"), row.get("val"), row["time"]))] += row["diff"]
    return found


def number_in(row: str) -> int:
    """The number n of a shown row."""
    return int(row.split("'n': ")[1].split("}", maxsplit=1)[0])


ROWS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 4), st.sampled_from([1, 1, 1, 2, -1])), max_size=150)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.usefixtures("small")
def test_splits_show_what_was_appended_whatever_they_cut(kind):
    @given(appends=st.lists(ROWS, min_size=1, max_size=4), count=st.integers(1, 9), as_of=st.integers(0, 19))
    @drawn(max_examples=draws(8), deadline=None)
    def law(appends, count, as_of):
        shard = Shard(kind)
        for at, rows in enumerate(appends):
            shard.append([(n, 5 * at + time, diff) for n, time, diff in rows], 5 * at + 5)
        as_of = min(as_of, shard.upper - 1)
        shard.check_snapshot(as_of, count)
        shard.check_snapshot(as_of, count, columns=["x"])
        shard.check_snapshot(as_of, count, where="n >= 20 AND x <> 'value 2'")
        shard.check_changes(as_of - 1 if as_of else None, count)

    law()


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.usefixtures("small")
def test_a_condition_on_the_key_shows_the_rows_that_fulfil_it(kind):
    """Of one run alone with one column, of several, as rows, apart and as a count."""

    @given(appends=st.lists(ROWS, min_size=1, max_size=3), at=st.integers(0, 90), other=st.integers(0, 90))
    @drawn(max_examples=draws(2), deadline=None)
    def law(appends, at, other):
        shard = Shard(kind)
        for number, rows in enumerate(appends):
            shard.append([(n, number, diff) for n, _, diff in rows], number + 1)
        value, second = ("k", "<=", shard.key_of(at)), ("k", "=", shard.key_of(other))
        terms = [Compare(*each) for each in (value, second) if each[2] is not None]
        for where in (*terms, *map(Not, terms), Or((*terms, Compare("n", ">", 70))), And((*terms, Not(IsNull("x"))))):
            with shard.open() as reader, reader.snapshot(shard.upper - 1) as all_rows:
                passing = Filter(where, shard.schema)
                wanted = shown(passing.apply(pa.Table.from_batches([batch])) for batch in all_rows.to_batches())
                with reader.snapshot(shard.upper - 1, where=where) as snapshot:
                    assert shown(snapshot.to_batches()) == wanted
                    assert snapshot.count() == sum(wanted.values())
            shard.check_snapshot(shard.upper - 1, 3, where=where)
            shard.check_snapshot(shard.upper - 1, 3, where=where, columns=["n"])

    law()


@pytest.mark.usefixtures("small")
def test_a_condition_on_the_key_fetches_the_row_groups_that_may_fulfil_it():
    shard = Shard()
    shard.append([(n, 0, 1) for n in range(0, 3000, 2)], 1)
    shard.append([(n, 1, 1) for n in range(0, 3000, 3)], 2)
    fetched = []
    for where in ("k = 1480", "k IN (-18, 2500)", "k = 1480 OR n = 20"):
        with shard.open() as reader, reader.snapshot(1, where=where) as snapshot:
            (whole,) = snapshot.splits(1)
        parts = [part for batch in whole.batches for part in batch.parts]
        shard.blob.fetched_bytes = 0
        assert list(whole.to_batches(shard.blob))
        fetched.append((shard.blob.fetched_bytes - sum(part.footer.size_bytes for part in parts)) / len(parts))
    one, two, every = fetched
    assert one < every / 4
    assert two < every / 4


@pytest.mark.usefixtures("small")
def test_a_split_fetches_its_row_groups_alone():
    """Of runs that all cover all keys, and of one run alone, with all columns and with one."""
    shard = Shard()
    for at in range(3):
        shard.append([(n, at, 1) for n in range(at, 3000, 3)], at + 1)
    with shard.open() as reader, reader.snapshot(2) as snapshot:
        held, pieces = snapshot.bytes_estimate, snapshot.splits(4)
    assert sum(piece.bytes_estimate for piece in pieces) > held
    footers = sum(p.footer.size_bytes for piece in pieces for batch in piece.batches for p in batch.parts)
    for piece in pieces:
        list(piece.to_batches(shard.blob))
    assert shard.blob.ranges
    assert shard.blob.fetched_bytes - footers < 1.1 * held


def test_two_splits_of_parts_of_some_thousand_rows_fetch_little_twice():
    """As many Mirrors leave them: each part has rows of all keys, and the splits meet within it."""
    client, noise = PersistClient.open(Location(blob="mem:", consensus="mem:")), np.random.default_rng(1)
    id_, schema = ShardId.new(), Schema.from_ddl("k BIGINT", "x BIGINT")
    with client.open_writer(id_, schema, purpose="test") as writer:
        for at in range(8):
            numbers = pa.array(range(at, 80_000, 8))
            key = pa.StructArray.from_arrays([numbers], fields=list(schema.key_type))
            values = pa.array(noise.integers(0, 1 << 62, len(numbers)))
            val = pa.StructArray.from_arrays([values], fields=list(schema.val_type))
            columns = [key, val, pa.repeat(at, len(numbers)), pa.repeat(1, len(numbers))]
            rows = pa.table(columns, schema=schema.updates_schema)
            assert isinstance(writer.compare_and_append(rows, expected_upper=at, new_upper=at + 1), Appended)
    blob = CountingBlob()
    source = client.machine(id_).blob
    for info in source.list_prefix(""):
        blob.set(info.key, source.get(info.key))
    with client.open_leased_reader(id_, schema, purpose="test") as reader, reader.snapshot(7) as snapshot:
        pieces = snapshot.splits(2)
        read = [batch.num_rows for piece in pieces for batch in piece.to_batches(blob)]
        assert (len(pieces), sum(read)) == (2, 80_000)
        assert blob.fetched_bytes < 1.3 * snapshot.bytes_estimate
    client.close()


@pytest.mark.usefixtures("small")
def test_a_damaged_byte_of_a_piece_is_found_wherever_it_is():
    shard = Shard()
    shard.append([(n, 0, 1) for n in range(120)], 1)
    with shard.open() as reader, reader.snapshot(0) as snapshot:
        _, piece, *_ = snapshot.splits(5)
    good = shown(piece.to_batches(shard.blob))
    messages = []
    for at in range(0, 6000, 13):
        shard.blob.flip_at = at
        try:
            assert shown(piece.to_batches(shard.blob)) == good, "the byte was not fetched, or the error was found"
        except CorruptData as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("footer" in each or "row group" in each for each in messages)
    shard.blob.flip_at = None
    for info in list(shard.blob.list_prefix("")):
        shard.blob.delete(info.key)
    with pytest.raises(MissingBlob, match="is missing though a live state names it"):
        list(piece.to_batches(shard.blob))


def test_many_splits_of_overlapping_runs_become_fewer_where_each_would_fetch_too_much(monkeypatch):
    """Footers and a row group of each run for each split are most of what so small splits fetch."""
    monkeypatch.setattr(planning, "FETCH_BYTES_MORE", 0)
    shard = Shard()
    for at in range(8):
        shard.append([(n, at, 1) for n in range(at, 4000, 8)], at + 1)
    with shard.open() as reader, reader.snapshot(7) as snapshot:
        few = snapshot.splits(64)
        assert len(few) < 10
        assert sum(piece.bytes_estimate for piece in few) < 1.5 * snapshot.bytes_estimate
        monkeypatch.setattr(planning, "RANGE_BYTES_MIN", snapshot.bytes_estimate // 6)
        assert 6 <= len(snapshot.splits(64)) <= 7, "but a large read stays parallel"
        monkeypatch.setattr(planning, "FETCH_BYTES_MORE", 64 << 20)
        assert len(snapshot.splits(64)) == 64, "and a small one may fetch some bytes twice"
