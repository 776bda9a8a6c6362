"""Contents without negative diffs are read part by part, without a merge, and show the same rows as the merged read."""

from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, ShardId, SnapshotSplit
from persist_engine.base.errors import CorruptData
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_engine.rows.part_stats import part_stats
from persist_kit.depth import draws

SCHEMA = Schema.from_ddl("id BIGINT, area STRING", "x DOUBLE")
GROWN = Schema.from_ddl("id BIGINT, area STRING", "x DOUBLE, note STRING")
SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=2 * KIB), retain_ms=None)
AREAS, XS = ("a", None, "b"), (0.5, float("nan"), -0.0, None)

Rows = list[tuple[int, int, int]]


class Shard:
    """A shard on files, and what it shows, merged and not."""

    def __init__(self, folder, settings: Settings = SETTINGS) -> None:
        location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client = PersistClient.open(location, settings=settings)
        self.id, self.schema = ShardId.new(), SCHEMA
        self.client.initialise(self.id, SCHEMA)

    def append(self, rows: Rows, upper: int) -> None:
        """Appends (number, time, diff)."""
        more = () if self.schema is SCHEMA else ("new",)
        updates = [
            (((n, AREAS[n % 3]), (XS[n % 4] if n % 5 else float(n), *more)), time, diff) for n, time, diff in rows
        ]
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            lower = writer.fetch_recent_upper()
            answer = writer.compare_and_append(updates, expected_upper=lower, new_upper=Antichain.of(upper))
            assert isinstance(answer, Appended)

    def read(self, as_of: int, *, count: int, merged: bool, **asked) -> tuple[Counter, list[SnapshotSplit]]:
        """The contents as a count of each row, through `count` splits that travelled as bytes."""
        with (
            self.client.open_leased_reader(self.id, self.schema, purpose="test") as reader,
            reader.snapshot(as_of, **asked) as snapshot,
        ):
            pieces = [SnapshotSplit.from_bytes(piece.to_bytes()) for piece in snapshot.splits(count, merged=merged)]
            found: Counter = Counter()
            for piece in pieces:
                for batch in piece.to_batches(self.client.machine(self.id).blob):
                    assert batch.num_rows
                    assert set(batch.column("time").to_pylist()) == {as_of}
                    for row in batch.to_pylist():
                        found[repr((row["key"], row["val"]))] += row["diff"]
            return found, pieces

    def check(self, as_of: int, *, count: int, **asked) -> list[SnapshotSplit]:
        """Compares both reads. Returns the splits of the one that need not merge."""
        merged, _ = self.read(as_of, count=count, merged=True, **asked)
        found, pieces = self.read(as_of, count=count, merged=False, **asked)
        assert found == merged
        return pieces

    def check_plain(self, as_of: int) -> bool:
        """If the snapshot names plain blobs, compares what any Parquet reader finds there with the contents. Whether it names them."""
        with (
            self.client.open_leased_reader(self.id, self.schema, purpose="test") as reader,
            reader.snapshot(as_of) as snapshot,
        ):
            keys = snapshot.plain_blobs()
            if keys is None:
                return False
            found: Counter = Counter()
            for key in keys:
                data = self.client.machine(self.id).blob.get(key)
                assert data is not None
                rows = pq.read_table(pa.BufferReader(data), columns=["key", "val"], page_checksum_verification=True)
                found.update(repr((row["key"], row["val"])) for row in rows.to_pylist())
        assert found == self.read(as_of, count=1, merged=True)[0]
        return True


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


def numbers(*of: range, time: int, diff: int = 1) -> Rows:
    return [(n, time, diff) for each in of for n in each]


@pytest.mark.slow
def test_inserts_are_read_once_without_a_merge_even_where_runs_overlap(shard):
    shard.append(numbers(range(400), range(100), time=0), 2)
    shard.append(numbers(range(200, 600), time=3, diff=2) + numbers(range(10), time=4), 5)
    pieces = shard.check(4, count=3)
    parts = [part.key for piece in pieces for batch in piece.batches for part in batch.part_list()]
    assert len(parts) == len(set(parts)) > 10, "no part is fetched twice"
    assert 1 < len(pieces) <= 3
    assert not any(piece.is_merged or piece.key_range for piece in pieces)
    assert shard.check(4, count=1, columns=["x"])
    assert shard.check(4, count=2, columns=["key.id"], where="x > 100")
    assert shard.check(4, count=2, where="area = 'b'")
    assert len(shard.check(4, count=200)) > len(parts), "with more splits than parts, they are ranges of keys"


@pytest.mark.parametrize("as_of", [2, 3, 7])
def test_rows_after_as_of_are_hidden_and_earlier_ones_are_at_as_of(shard, as_of):
    shard.append(numbers(range(100), time=0) + numbers(range(50, 90), time=3) + numbers(range(5), time=7), 8)
    assert not shard.check(as_of, count=1)[0].is_merged
    assert sum(shard.read(as_of, count=1, merged=False)[0].values()) == {2: 100, 3: 140, 7: 145}[as_of]


def test_blobs_are_plain_where_every_row_in_them_counts_once(shard):
    shard.append(numbers(range(300), time=1) + numbers(range(50), time=2), 4)
    shard.append(numbers(range(20), time=6), 8)
    assert [shard.check_plain(as_of) for as_of in (0, 1, 2, 5, 6)] == [True, False, True, True, True]
    shard.append(numbers(range(5), time=8, diff=2), 9)
    assert [shard.check_plain(as_of) for as_of in (7, 8)] == [True, False]
    with (
        shard.client.open_leased_reader(shard.id, SCHEMA, purpose="test") as reader,
        reader.snapshot(7, where="id > 290") as some,
        reader.snapshot(7) as whole,
    ):
        few, every = some.plain_blobs(), whole.plain_blobs()
        assert few is not None
        assert every is not None
        assert 0 < len(few) < len(every), "those that may hold rows of the condition"
        assert set(few) < set(every)


def test_blobs_with_moved_or_cut_rows_are_not_plain(shard):
    with shard.client.open_writer(shard.id, SCHEMA, purpose="test") as writer:
        rows = [(((n, None), (0.5,)), 1, 1) for n in range(100)]
        moved = writer.batch(rows, lower=0, upper=3)
        moved.rewrite_times(2, 3)
        assert isinstance(writer.compare_and_append_batch([moved], expected_upper=0, new_upper=3), Appended)
        assert not shard.check_plain(2)
        assert not shard.check(2, count=1)[0].is_merged


def test_blobs_with_rows_before_their_registered_lower_are_not_plain(shard):
    shard.append([], 3)
    with shard.client.open_writer(shard.id, SCHEMA, purpose="test") as writer:
        rows = [(((n, None), (0.5,)), n % 8, 1) for n in range(100)]
        late = writer.batch(rows, lower=0, upper=8)
        assert isinstance(writer.append_batch(late, 0, 8), Appended), "only rows from 3 on are registered"
    assert sum(shard.read(7, count=1, merged=True)[0].values()) == 61
    assert not shard.check_plain(7)
    assert not shard.check(7, count=2)[0].is_merged


def test_one_negative_diff_merges_everything(shard):
    shard.append(numbers(range(300), time=0), 1)
    shard.append(numbers(range(7), time=1, diff=-1), 2)
    assert all(piece.is_merged for piece in shard.check(1, count=2))
    assert not any(piece.is_merged for piece in shard.check(0, count=2)), "it is not there yet"


def test_negative_diffs_beside_positive_ones_are_not_averaged_away(shard):
    """Their sum equals the number of rows, which proves nothing."""
    shard.append([(1, 0, 3), (1, 1, -1)], 2)
    assert shard.check(1, count=1)[0].is_merged
    assert set(shard.read(1, count=1, merged=False)[0].values()) == {2}


def test_rows_of_an_older_schema_show_the_added_field(shard):
    shard.append(numbers(range(200), time=0), 1)
    shard.client.evolve_schema(shard.id, GROWN)
    shard.schema = GROWN
    shard.append(numbers(range(100, 300), time=1), 2)
    for asked in ({}, {"columns": ["note", "id"]}, {"where": "note IS NULL"}):
        assert not any(piece.is_merged for piece in shard.check(1, count=2, **asked))


def test_inline_parts_are_read_apart_unless_they_take_away(tmp_path):
    shard = Shard(tmp_path, Settings(retain_ms=None))
    shard.append(numbers(range(5), time=0), 1)
    assert not shard.check(0, count=1)[0].is_merged
    shard.append([(1, 1, -1), (2, 1, 3)], 2)
    assert shard.check(1, count=1)[0].is_merged
    shard.client.close()


def test_parts_without_the_statistic_are_merged(shard, monkeypatch):
    monkeypatch.setattr(
        "persist_engine.parts.write.part_stats",
        lambda table, schema, bytes_max: replace(part_stats(table, schema, bytes_max), diff_min=None),
    )
    shard.append(numbers(range(100), time=0), 1)
    assert shard.check(0, count=1)[0].is_merged


def test_a_part_that_fails_its_checksum_is_refused(shard, tmp_path):
    shard.append(numbers(range(300), time=0), 1)
    path = next((tmp_path / "blobs" / shard.id).rglob("p*"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=path.name):
        shard.read(0, count=1, merged=False, columns=["x"])


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(-1, 3)), max_size=60),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
    st.integers(0, 3),
)
@drawn(max_examples=draws(15), deadline=None)
def test_any_history_shows_the_same_rows(tmp_path_factory, appends, count, back):
    shard = Shard(tmp_path_factory.mktemp("any"))
    for number, rows in enumerate(appends):
        shard.append([(n, 4 * number + time, diff) for n, time, diff in rows if diff], 4 * number + 4)
    as_of = max(0, 4 * len(appends) - 1 - back)
    shard.check(as_of, count=count)
    shard.check_plain(as_of)
    shard.client.close()


def test_the_pieces_of_an_empty_read_are_one_empty_piece(shard):
    shard.append(numbers(range(3), time=0), 1)
    found, pieces = shard.read(0, count=4, merged=False, where="id > 10")
    assert not found
    assert len(pieces) == 1
