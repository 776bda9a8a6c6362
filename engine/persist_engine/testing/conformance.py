"""The contracts of the ports as test classes. A store proves itself by a subclass with the fixture `open_store`.

    class TestMyBlob(BlobTests):
        @pytest.fixture
        def open_store(self): ...   # yields a function; each call opens one more client of one new, empty store

Every test states a law. The two clients stand for two processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from persist_engine.base.errors import Determinate, InvalidUsage, NotKept
from persist_engine.base.extras import needs_extra
from persist_engine.base.versioned import SCAN_ALL, SEQNO_MAX, CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.blob import Blob
from persist_engine.storage.checks import ENTRY_BYTES_MAX, VALUE_BYTES_MAX
from persist_engine.storage.consensus import Consensus
from persist_engine.testing.conformance_ranges import RangeTests

with needs_extra("testing", "a conformance suite"):
    import pytest

T = TypeVar("T")

THREADS = 8
BIG_BYTES = 20 << 20
REFUSALS_MAX = 20
#: Key parts that mistakes in escaping, globbing, quoting or splitting would change.
ODD_NAMES = ("a b", "a+b", "a%2Fb", "a?b=c&d", "a#b", "a*[b]^\\c", "{a}:m", "a}b{c", "größe-木", "a'b\"c", "a..b", "~")

OpenBlob = Callable[[], Blob]
OpenConsensus = Callable[[], Consensus]


def at_once(run: Callable[[int], T], count: int = THREADS) -> list[T]:
    """Runs `run(0)` to `run(count - 1)` in threads that start together. Returns the results in order. Raises the error of a failed one."""
    start = threading.Barrier(count)

    def one(index: int) -> T:
        start.wait()
        return run(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def insisting(call: Callable[[], T]) -> T:
    """Repeats `call` while the store refuses it. A store may refuse a racing set or delete of one key, but may never do half of it."""
    for _ in range(REFUSALS_MAX):
        try:
            return call()
        except Determinate:
            continue
    return call()


def entry(seqno: int, data: bytes | None = None) -> VersionedData:
    """An entry that carries its seqno as data, unless `data` is given."""
    return VersionedData(SeqNo(seqno), b"data %d" % seqno if data is None else data)


def fill(consensus: Consensus, key: str, first: int, last: int) -> None:
    """Appends the entries first..last. The log must be empty or end at first - 1."""
    for seqno in range(first, last + 1):
        head = consensus.head(key)
        expected = None if head is None else head.tip
        assert consensus.compare_and_set(key, expected, entry(seqno)) is CasResult.COMMITTED


class _Huge(bytes):
    """Bytes that claim to be longer than VALUE_BYTES_MAX."""

    def __len__(self) -> int:
        return VALUE_BYTES_MAX + 1


class _HugeEntry(bytes):
    """Bytes that claim to be longer than ENTRY_BYTES_MAX."""

    def __len__(self) -> int:
        return ENTRY_BYTES_MAX + 1


class BlobTests(RangeTests):
    """The laws of Blob."""

    @pytest.fixture
    def blob(self, open_store: OpenBlob) -> Blob:
        """A client."""
        return open_store()

    @pytest.fixture
    def other(self, open_store: OpenBlob, blob: Blob) -> Blob:
        """A second client of the same store."""
        return open_store()

    def test_missing_objects_are_none(self, blob: Blob) -> None:
        """Reading and deleting a missing object succeeds."""
        assert blob.get("s1/p1") is None
        assert blob.delete("s1/p1") is None
        assert list(blob.list_prefix("")) == []

    def test_an_object_is_seen_by_everybody_at_once(self, blob: Blob, other: Blob) -> None:
        """Set, overwrite and delete are seen by the next call of any client."""
        blob.set("s1/p1", b"one")
        assert other.get("s1/p1") == b"one"
        other.set("s1/p1", b"another")
        assert blob.get("s1/p1") == b"another"
        assert blob.delete("s1/p1") == len(b"another")
        assert other.get("s1/p1") is None
        assert other.delete("s1/p1") is None

    @pytest.mark.parametrize("size", [0, 1, BIG_BYTES], ids=["empty", "one byte", "20 MB"])
    def test_values_come_back_byte_by_byte(self, blob: Blob, other: Blob, size: int) -> None:
        """Values are exact at every size, and listings and deletes report the size."""
        value = (bytes(range(256)) * (size // 256 + 1))[:size]
        blob.set("s1/p1", value)
        assert other.get("s1/p1") == value
        assert [(row.key, row.size_bytes) for row in blob.list_prefix("s1/")] == [("s1/p1", size)]
        assert blob.delete("s1/p1") == size

    def test_a_value_that_not_every_store_could_take_is_refused(self, blob: Blob) -> None:
        """The size alone decides, and nothing is written."""
        with pytest.raises(InvalidUsage, match="more than the 5368709120 that one put takes"):
            blob.set("s1/p1", _Huge())
        assert blob.get("s1/p1") is None

    def test_listing_is_by_any_prefix(self, blob: Blob) -> None:
        """A prefix is a prefix of text, not a directory. "" lists everything. Sizes are right."""
        sizes = {"s1/n1/p1": 1, "s1/n1/p2": 2, "s1/n2/p1": 3, "s1/v7/r1": 4, "s10/n1/p1": 5, "top": 6}
        for key, size in sizes.items():
            blob.set(key, b"x" * size)
        prefixes = [
            "",
            "s",
            "s1",
            "s1/",
            "s1/n",
            "s1/n1",
            "s1/n1/",
            "s1/n1/p1",
            "s1/n1/p11",
            "s1/v",
            "t",
            "z",
            "s1/n1/p1/",
        ]
        for prefix in prefixes:
            expected = {key: size for key, size in sizes.items() if key.startswith(prefix)}
            assert {row.key: row.size_bytes for row in blob.list_prefix(prefix)} == expected, prefix

    def test_listing_gives_each_of_many_once_in_the_order_of_keys(self, blob: Blob) -> None:
        """There are more objects than a page of any store holds, and some names are prefixes of others."""
        keys = [*(f"s1/n1{end}{index:04d}" for end in ("-p", "/p") for index in range(550)), "s1/n1z", "s1/n2/a"]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda key: blob.set(key, b""), reversed(keys)))
        assert [row.key for row in blob.list_prefix("s1/")] == keys

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_keys_are_kept_as_they_are(self, blob: Blob, other: Blob, name: str) -> None:
        """No store treats an allowed character as syntax."""
        key = f"{name}/{name}"
        blob.set(key, name.encode())
        blob.set(f"{name}/other", b"")
        assert other.get(key) == name.encode()
        assert sorted(row.key for row in other.list_prefix(f"{name}/")) == sorted([key, f"{name}/other"])
        assert other.delete(key) == len(name.encode())

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/../b",
            "a/./b",
            ".a",
            "a\0b",
            "a\nb",
            "\udc80",
            "k" * 800,
            "k" * 256,
        ],
    )
    def test_impossible_keys_are_refused_alike(self, blob: Blob, key: str) -> None:
        """If one store could not hold a key, or a key could escape from its folder, no store accepts it. Nothing is written."""
        for call in (
            lambda: blob.get(key),
            lambda: blob.set(key, b"x"),
            lambda: blob.delete(key),
            lambda: blob.restore(key),
        ):
            with pytest.raises(InvalidUsage):
                call()
        with pytest.raises(InvalidUsage):
            list(blob.list_prefix("../"))
        assert list(blob.list_prefix("")) == []

    def test_restore_succeeds_iff_the_object_exists(self, blob: Blob) -> None:
        """These stores keep no deleted objects."""
        with pytest.raises(NotKept, match="s1/p1"):
            blob.restore("s1/p1")
        blob.set("s1/p1", b"x")
        blob.restore("s1/p1")
        assert blob.get("s1/p1") == b"x"

    def test_readers_of_a_changing_object_see_one_whole_value(self, blob: Blob, other: Blob) -> None:
        """A reader sees a whole value or none while eight threads overwrite, delete and read."""
        values = [bytes([index]) * (50_000 + index) for index in range(THREADS)]
        blob.set("s1/p1", values[0])

        def hammer(index: int) -> None:
            for turn in range(10):
                if index == 0:
                    insisting(lambda: blob.delete("s1/p1"))
                elif index % 2:
                    insisting(lambda: blob.set("s1/p1", values[index]))
                else:
                    assert insisting(lambda: other.get("s1/p1")) in [None, *values], turn

        at_once(hammer)

    def test_sets_and_deletes_of_neighbours_do_not_disturb_each_other(self, blob: Blob, other: Blob) -> None:
        """Writing and deleting objects of a folder does not change the others."""

        def churn(index: int) -> None:
            client = blob if index % 2 else other
            for turn in range(20):
                key = f"s1/n1/v{turn}/p{index}"
                insisting(partial(client.set, key, b"%d" % index))
                assert client.get(key) == b"%d" % index
                assert insisting(partial(client.delete, key)) == 1

        at_once(churn)
        assert list(blob.list_prefix("")) == []

    def test_one_of_several_deleters_reports_the_size(self, blob: Blob, other: Blob) -> None:
        """Racing deletes all succeed and the object is gone. At least one delete saw it."""
        blob.set("s1/p1", b"four")
        sizes = at_once(lambda index: (blob if index % 2 else other).delete("s1/p1"))
        assert set(sizes) <= {4, None}
        assert 4 in sizes
        assert blob.get("s1/p1") is None

    def test_close_is_idempotent_and_the_address_stays(self, blob: Blob, other: Blob) -> None:
        """Closing one client leaves the others alone."""
        blob.set("s1/p1", b"x")
        blob.close()
        blob.close()
        assert ":" in blob.address()
        assert other.get("s1/p1") == b"x"


class ConsensusTests:
    """The laws of Consensus."""

    @pytest.fixture
    def consensus(self, open_store: OpenConsensus) -> Consensus:
        """A client."""
        return open_store()

    @pytest.fixture
    def other(self, open_store: OpenConsensus, consensus: Consensus) -> Consensus:
        """A second client of the same store."""
        return open_store()

    def test_an_unknown_key_is_empty(self, consensus: Consensus) -> None:
        """It has no head and no entries, and it is not listed."""
        assert consensus.head("s1") is None
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == []
        assert list(consensus.list_keys()) == []

    def test_an_append_needs_the_exact_head(self, consensus: Consensus, other: Consensus) -> None:
        """An append commits iff the head is as expected. For every other expectation it is a mismatch and changes nothing."""
        assert consensus.compare_and_set("s1", entry(0).tip, entry(1)) is CasResult.EXPECTATION_MISMATCH
        assert consensus.head("s1") is None
        assert consensus.compare_and_set("s1", None, entry(1)) is CasResult.COMMITTED
        assert other.compare_and_set("s1", entry(1).tip, entry(2)) is CasResult.COMMITTED
        for expected, new in ((None, 1), (None, 3), (1, 2), (3, 4), (0, 1)):
            tip = None if expected is None else entry(expected).tip
            result = consensus.compare_and_set("s1", tip, entry(new, b"lost"))
            assert result is CasResult.EXPECTATION_MISMATCH, (expected, new)
        assert other.scan("s1", SeqNo(0), SCAN_ALL) == [entry(1), entry(2)]

    def test_an_append_needs_the_very_entry_at_the_head(self, consensus: Consensus, other: Consensus) -> None:
        """Another entry at the same seqno, as in a log that was rolled back and has grown again, is a mismatch, also for the client that
        wrote the head. An entry without bytes is not a wildcard.
        """
        fill(consensus, "s1", 1, 2)
        tips = [entry(2, b"another second").tip, entry(2, b"").tip, Tip(SeqNo(2), b""), Tip(SeqNo(2), entry(1).tip.tag)]
        for client in (consensus, other):
            for tip in tips:
                assert client.compare_and_set("s1", tip, entry(3)) is CasResult.EXPECTATION_MISMATCH, tip
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(1), entry(2)]
        assert other.compare_and_set("s1", entry(2).tip, entry(3)) is CasResult.COMMITTED
        assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED

    @pytest.mark.parametrize("new", [0, 4, 5, 7, 100])
    def test_a_seqno_that_does_not_follow_is_misuse(self, consensus: Consensus, new: int) -> None:
        """It raises an error and is not a mismatch, whatever the head is."""
        fill(consensus, "s1", 5, 5)
        for key in ("s1", "s2"):
            with pytest.raises(InvalidUsage):
                consensus.compare_and_set(key, entry(5).tip, entry(new))
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(5)]
        assert consensus.head("s2") is None

    @pytest.mark.parametrize("first", [0, 1, 2**53 + 1, SEQNO_MAX - 1])
    def test_any_seqno_may_be_the_first(self, consensus: Consensus, first: int) -> None:
        """Seqnos are exact up to the greatest one, also where doubles are not."""
        assert consensus.compare_and_set("s1", None, entry(first)) is CasResult.COMMITTED
        assert consensus.compare_and_set("s1", entry(first).tip, entry(first + 1)) is CasResult.COMMITTED
        assert consensus.head("s1") == entry(first + 1)
        assert consensus.scan("s1", SeqNo(first), SCAN_ALL) == [entry(first), entry(first + 1)]
        assert consensus.scan("s1", SeqNo(first + 1), SCAN_ALL) == [entry(first + 1)]
        assert consensus.truncate("s1", SeqNo(first + 1), entry(first + 1).tip) == 1
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(first + 1)]

    def test_every_client_reads_what_any_wrote(self, consensus: Consensus, other: Consensus) -> None:
        """Reads are linearizable: every later head and scan shows a commit."""
        fill(consensus, "s1", 1, 1)
        for seqno in range(2, 30):
            writer, reader = (consensus, other) if seqno % 2 else (other, consensus)
            assert writer.compare_and_set("s1", entry(seqno - 1).tip, entry(seqno)) is CasResult.COMMITTED
            assert reader.head("s1") == entry(seqno)
            assert reader.scan("s1", SeqNo(seqno), SCAN_ALL) == [entry(seqno)]

    def test_scan_is_a_range_with_a_limit(self, consensus: Consensus) -> None:
        """A scan ascends from the first entry at or past `from`, has at most `limit` entries, and is empty past the head."""
        fill(consensus, "s1", 3, 7)
        whole = [entry(seqno) for seqno in range(3, 8)]
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == whole
        assert consensus.scan("s1", SeqNo(3), 2) == whole[:2]
        assert consensus.scan("s1", SeqNo(0), 2) == whole[:2]
        assert consensus.scan("s1", SeqNo(5), 5) == whole[2:]
        assert consensus.scan("s1", SeqNo(7), 1) == whole[4:]
        assert consensus.scan("s1", SeqNo(5), 0) == []
        assert [consensus.scan("s1", SeqNo(at), SCAN_ALL) for at in (8, SEQNO_MAX)] == [[], []]
        with pytest.raises(InvalidUsage):
            consensus.scan("s1", SeqNo(0), -1)

    def test_long_logs_scan_whole(self, consensus: Consensus, other: Consensus) -> None:
        """The log has more entries than any page holds. Scans begin in the middle and have limits around page ends."""
        fill(consensus, "s1", 1, 1203)
        consensus.truncate("s1", SeqNo(2), entry(2).tip)
        assert [int(row.seqno) for row in other.scan("s1", SeqNo(0), SCAN_ALL)] == list(range(2, 1204))
        assert [int(row.seqno) for row in other.scan("s1", SeqNo(300), 700)] == list(range(300, 1000))
        assert other.scan("s1", SeqNo(1000), SCAN_ALL)[-1] == entry(1203)

    def test_truncate_drops_what_is_below(self, consensus: Consensus, other: Consensus) -> None:
        """It drops exactly the entries below. Repeating it drops nothing. The head stays, and appends still work."""
        fill(consensus, "s1", 1, 5)
        assert [consensus.truncate("s1", SeqNo(at), entry(at).tip) for at in (0, 3, 3)] == [0, 2, 0]
        assert other.truncate("s1", SeqNo(1), entry(1).tip) == 0
        assert other.scan("s1", SeqNo(0), SCAN_ALL) == [entry(3), entry(4), entry(5)]
        assert other.scan("s1", SeqNo(0), 1) == [entry(3)]
        assert other.truncate("s1", SeqNo(4), entry(5).tip) == 1, "the caller may have decided from a later entry"
        assert other.truncate("s1", SeqNo(5), entry(5).tip) == 1
        assert consensus.head("s1") == entry(5)
        assert consensus.compare_and_set("s1", None, entry(1)) is CasResult.EXPECTATION_MISMATCH
        assert consensus.compare_and_set("s1", entry(5).tip, entry(6)) is CasResult.COMMITTED
        assert other.scan("s1", SeqNo(0), SCAN_ALL) == [entry(5), entry(6)]

    def test_truncate_keeps_a_log_that_is_another(self, consensus: Consensus, other: Consensus) -> None:
        """Such a log lacks the entry from which the caller decided: it holds another in its place, ends before it, or is empty."""
        fill(consensus, "s1", 1, 5)
        lost = entry(3, b"of another history").tip
        for key, known in (("s1", lost), ("s1", entry(6).tip), ("s1", entry(SEQNO_MAX).tip), ("s2", entry(1).tip)):
            assert other.truncate(key, known.seqno, known) is None
            assert other.truncate(key, SeqNo(min(2, known.seqno)), known) is None, "the entries up to 2 are the same"
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(seqno) for seqno in range(1, 6)]
        assert consensus.head("s2") is None
        assert consensus.truncate("s1", SeqNo(3), entry(3).tip) == 2
        assert other.truncate("s1", SeqNo(3), lost) is None, "it is the earliest entry now, and it still differs"
        assert other.truncate("s1", SeqNo(2), entry(2, b"of another history").tip) == 0, "nothing stands there"
        assert consensus.scan("s1", SeqNo(0), SCAN_ALL) == [entry(3), entry(4), entry(5)]

    @pytest.mark.parametrize("size", [0, 1, BIG_BYTES], ids=["empty", "one byte", "20 MB"])
    def test_data_comes_back_byte_by_byte(self, consensus: Consensus, other: Consensus, size: int) -> None:
        """Data is exact at every size."""
        new = entry(1, (bytes(range(256)) * (size // 256 + 1))[:size])
        assert consensus.compare_and_set("s1", None, new) is CasResult.COMMITTED
        assert other.head("s1") == new
        assert other.scan("s1", SeqNo(0), SCAN_ALL) == [new]

    def test_an_entry_that_not_every_store_could_take_is_refused(self, consensus: Consensus) -> None:
        """The size alone decides, and nothing is sent: Redis would drop the connection at every attempt."""
        with pytest.raises(InvalidUsage, match=r"entry v1 has .* bytes, more than 536870912"):
            consensus.compare_and_set("s1", None, entry(1, _HugeEntry()))
        assert consensus.head("s1") is None

    def test_keys_are_apart(self, consensus: Consensus, other: Consensus) -> None:
        """Odd names are kept as they are. Each is a log of its own and is listed once."""
        names = [*ODD_NAMES, "s1", "s10", "s1:m", "s1:l", "S1"]
        for count, name in enumerate(names, start=1):
            fill(consensus, name, 1, count)
        assert sorted(other.list_keys()) == sorted(names)
        for count, name in enumerate(names, start=1):
            assert other.head(name) == entry(count)
        other.truncate("s1", SeqNo(2), entry(2).tip)
        assert len(consensus.scan("s10", SeqNo(0), SCAN_ALL)) == names.index("s10") + 1

    @pytest.mark.parametrize("key", ["", "a\0b", "\udc80", "k" * 800])
    def test_impossible_keys_are_refused_alike(self, consensus: Consensus, key: str) -> None:
        """Every verb refuses them before it does anything."""
        for call in (
            lambda: consensus.head(key),
            lambda: consensus.compare_and_set(key, None, entry(1)),
            lambda: consensus.scan(key, SeqNo(0), 1),
            lambda: consensus.truncate(key, SeqNo(0), entry(0).tip),
            lambda: consensus.truncate("s1", SeqNo(1), entry(0).tip),
        ):
            with pytest.raises(InvalidUsage):
                call()
        assert list(consensus.list_keys()) == []

    def test_one_racer_wins_each_seqno(self, consensus: Consensus, other: Consensus) -> None:
        """Eight threads of two clients race for every seqno: one commits and its data stays, and the others mismatch."""
        rounds = 25
        won: list[list[int]] = []
        for seqno in range(1, rounds + 1):
            head = consensus.head("s1")
            expected = None if head is None else head.tip

            def race(index: int, seqno: int = seqno, expected: Tip | None = expected) -> CasResult:
                client = consensus if index % 2 else other
                return client.compare_and_set("s1", expected, entry(seqno, b"%d" % index))

            results = at_once(race)
            won.append([index for index, result in enumerate(results) if result is CasResult.COMMITTED])
        assert [len(winners) for winners in won] == [1] * rounds
        log = consensus.scan("s1", SeqNo(0), SCAN_ALL)
        assert [row.data for row in log] == [b"%d" % winners[0] for winners in won]

    def test_increments_are_never_lost(self, consensus: Consensus, other: Consensus) -> None:
        """Eight threads add to one counter with head and compare_and_set, and the sum is exact."""
        consensus.compare_and_set("s1", None, entry(1, b"0"))

        def add(index: int) -> None:
            client = consensus if index % 2 else other
            done = 0
            while done < 10:
                head = client.head("s1")
                assert head is not None
                new = VersionedData(head.seqno.next(), b"%d" % (int(head.data) + 1))
                done += client.compare_and_set("s1", head.tip, new) is CasResult.COMMITTED

        at_once(add)
        head = consensus.head("s1")
        assert head is not None
        assert head.data == b"%d" % (10 * THREADS)
        assert head.seqno == 10 * THREADS + 1

    def test_scans_beside_appends_and_truncates_have_no_holes(self, consensus: Consensus, other: Consensus) -> None:
        """Whatever happens in the meantime, a scan is consecutive, its data is right, and it reaches the head that was seen before."""
        fill(consensus, "s1", 1, 20)

        def act(index: int) -> None:
            client = consensus if index % 2 else other
            for _ in range(15):
                head = client.head("s1")
                assert head is not None
                if index < 3:
                    client.compare_and_set("s1", head.tip, entry(head.seqno + 1))
                elif index < 5:
                    client.truncate("s1", SeqNo(max(0, head.seqno - 3)), entry(max(0, head.seqno - 3)).tip)
                else:
                    log = client.scan("s1", SeqNo(0), SCAN_ALL)
                    first = log[0].seqno
                    assert log == [entry(first + offset) for offset in range(len(log))]
                    assert log[-1].seqno >= head.seqno

        at_once(act)

    def test_a_closed_client_is_no_failing_store(self, consensus: Consensus) -> None:
        """It does not raise a storage error, since callers would retry that for ever."""
        fill(consensus, "s1", 1, 1)
        consensus.close()
        with contextlib.suppress(InvalidUsage):
            assert consensus.head("s1") == entry(1)

    def test_close_is_idempotent_and_the_address_stays(self, consensus: Consensus, other: Consensus) -> None:
        """Closing one client leaves the others alone."""
        fill(consensus, "s1", 1, 1)
        consensus.close()
        consensus.close()
        assert ":" in consensus.address()
        assert other.head("s1") == entry(1)
