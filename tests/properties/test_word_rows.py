"""Laws of rows as words: one hash for equal rows, whatever path computes it, others for other rows; and copies that lie anywhere."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.flow.upsert_store import KEY_WORDS
from persist_engine.flow.word_rows import Words, gather, hash_rows, scatter

SEED = np.array([11, 22, 33, 44], np.uint64)
#: Rows of whole words, some of them sharing words or ending in zeros.
VALUES = st.lists(st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]), max_size=4).map(
    lambda words: np.array(words, np.uint64).tobytes()
)


def words(rows: list[bytes]) -> Words:
    return Words.from_arrow(pa.array(rows, pa.large_binary()))


@pytest.mark.slow
@given(st.lists(VALUES, max_size=20))
def test_a_hash_is_the_same_whether_rows_are_alike_in_size_or_not(rows: list[bytes]) -> None:
    """Rows of one size take another path."""
    together = hash_rows(words(rows), SEED)
    for index, row in enumerate(rows):
        assert np.array_equal(hash_rows(words([row]), SEED)[0], together[index])
    assert len({bytes(hashed.tobytes()) for hashed in together}) == len(set(rows))


@pytest.mark.parametrize("size", [1, 2, 12, 13, 40])
def test_a_hash_of_long_rows_too(size: int) -> None:
    """So long that they are summed in another way."""
    rows = [np.arange(first, first + size, dtype=np.uint64).tobytes() for first in range(5)]
    alike, unlike = hash_rows(words(rows), SEED), hash_rows(words([*rows, b""]), SEED)
    assert np.array_equal(alike, unlike[:-1])
    assert len(np.unique(alike)) == alike.size


@pytest.mark.parametrize("size", [2, 3, 14])
def test_rows_that_differ_in_upper_bits_of_several_words_have_other_hashes(size: int) -> None:
    """Signs of doubles, letters at the ends of words: as many seeds as make one lane of a weak hash fail, and with it a key, for certain."""
    flips = np.array([0, *(1 << bit for bit in range(48, 64)), 0xFF << 56], np.uint64)
    rows = np.full((len(flips) ** 2, size), 0x4025_0000_4D4D_4D4D, np.uint64)
    rows[:, 0] ^= np.repeat(flips, len(flips))
    rows[:, -1] ^= np.tile(flips, len(flips))
    given = words([row.tobytes() for row in rows])
    rng = np.random.default_rng(3)
    for _ in range(60):
        hashes = hash_rows(given, rng.integers(0, 2**64, KEY_WORDS, np.uint64))
        for lane in hashes.T:
            assert len(np.unique(lane)) == len(rows)


@pytest.mark.slow
@given(st.data())
def test_rows_are_copied_out_of_and_into_words_wherever_they_lie(data: st.DataObject) -> None:
    """Rows of one size take another path."""
    size = data.draw(st.integers(0, 3))
    sizes = data.draw(st.lists(st.just(size) | st.integers(0, 3), max_size=6) | st.just([size] * 4))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    ends = np.cumsum(np.add(sizes, gaps), dtype=np.int64)
    starts = (ends - sizes).astype(np.int64)
    full = np.arange(100, 100 + (int(ends[-1]) if len(ends) else 0), dtype=np.uint64)
    order = np.array(data.draw(st.permutations(range(len(sizes)))), np.int64)
    rows = gather(full, starts[order], np.array(sizes, np.int64)[order])
    expected = [full[starts[row] : ends[row]].tobytes() for row in order.tolist()]
    assert rows.to_arrow().to_pylist() == expected
    again = np.zeros_like(full)
    scatter(again, starts[order], rows)
    named = np.zeros(len(full), np.bool_)
    for row in range(len(sizes)):
        named[starts[row] : ends[row]] = True
    assert np.array_equal(again, np.where(named, full, 0))
