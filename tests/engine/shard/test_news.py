"""What was pushed is taken in when it follows what is known, and never believed when it does not."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import Settings, WatchSettings
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.shard.news import ENTRIES_MAX, News
from persist_engine.shard.watch import StateWatch
from persist_engine.storage.notify import KEYS_MIN, NEWS_BYTES_MAX, LocalPush, NoPush, abridged, shared_local_push
from persist_engine.storage.open import open_push
from persist_kit.world import SCHEMA, World, row

A = Antichain.of


def entry(seqno: int, data: bytes = b"x") -> VersionedData:
    return VersionedData(SeqNo(seqno), data)


def test_only_the_unbroken_run_is_taken_and_what_is_older_forgotten() -> None:
    news = News(StateWatch())
    assert news.is_empty()
    for seqno in (7, 5, 4, 3, 5, 9):
        news.hear(entry(seqno))
    assert [each.seqno for each in news.take_after(SeqNo(3))] == [4, 5]
    assert news.take_after(SeqNo(3)) == []
    assert news.is_beyond(SeqNo(5))
    assert not news.is_beyond(SeqNo(5)), "reported once"
    assert [each.seqno for each in news.take_after(SeqNo(6))] == [7]


def test_memory_is_bounded_by_number_and_size() -> None:
    news = News(StateWatch())
    for seqno in range(1, 3 * ENTRIES_MAX):
        news.hear(entry(seqno))
    assert news.take_after(SeqNo(0)) == []
    assert len(news.take_after(SeqNo(2 * ENTRIES_MAX))) == ENTRIES_MAX - 1
    news.hear(entry(900, b"x" * (NEWS_BYTES_MAX + 1)))
    assert news.take_after(SeqNo(899)) == []
    assert news.is_beyond(SeqNo(899))
    assert abridged(entry(1, b"x" * NEWS_BYTES_MAX)).data


def test_a_break_asks_for_a_look() -> None:
    watch = StateWatch()
    news = News(watch)
    with watch.subscribed() as event:
        news.hear(None)
        assert event.is_set()
    assert not news.is_empty()
    assert news.is_beyond(SeqNo(2**62))
    assert news.is_empty()


class Two:
    """Two clients on one store, the second of which hears what the first commits, through a channel that tests bend."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.push = LocalPush()
        self.counted: Counter[str] = Counter()
        self.writer_client, self.reader = self.process(), self.process()
        self.shard_id = self.world.shard_id()
        self.writer = self.writer_client.open_writer(self.shard_id, SCHEMA, purpose="test")
        self.applier = self.reader.machine(self.shard_id)._applier
        self.applier.subscribe()
        self.upper = 0

    def process(self) -> PersistClient:
        counted = self.counted

        class Counted(NoMetrics):
            def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
                counted[f"{name} {labels.get('outcome')}"] += 1

        return PersistClient(
            self.world.blob,
            self.world.consensus,
            settings=self.world.settings,
            env=self.world.env,
            metrics=Counted(),
            push=self.push,
        )

    def commit(self) -> None:
        self.writer.append([row(1, "a", self.upper)], lower=A(self.upper), upper=A(self.upper + 1))
        self.upper += 1

    def count_of(self, how: str) -> int:
        return self.counted[f"push {how}"]

    def caught_up(self) -> int:
        """How many fetches it took to hear of everything."""
        before = self.world.consensus.calls["scan"]
        self.applier.catch_up()
        fetches = self.world.consensus.calls["scan"] - before
        assert self.applier.state == self.writer_client.machine(self.shard_id).state
        return fetches


def test_successors_are_applied_without_a_fetch() -> None:
    two = Two()
    for _ in range(5):
        two.commit()
    assert two.caught_up() == 0
    assert two.count_of("applied") == 5
    assert two.caught_up() == 0


def test_a_gap_is_fetched() -> None:
    two = Two()
    two.commit()
    two.push, dropped = LocalPush(), two.applier._news
    two.writer_client._versions.push = LocalPush()  # no process listens to this one
    two.commit()
    two.writer_client._versions.push = two.push
    two.push.subscribe(two.shard_id, dropped)
    two.commit()
    assert two.caught_up() == 1
    assert two.count_of("fetched") == 1


def test_what_comes_twice_late_or_in_another_order_changes_nothing() -> None:
    """Spec 9.21."""
    two = Two()
    heard: list[VersionedData] = []
    news = two.applier._news
    two.push._listeners.clear()
    two.writer_client._versions.push.publish = lambda _key, new: heard.append(new)  # type: ignore[method-assign]
    for _ in range(4):
        two.commit()
    for each in (heard[2], heard[0], heard[0], heard[3], heard[1], heard[2]):
        news.hear(each)
    assert two.caught_up() == 0
    for each in heard:
        news.hear(each)
    assert two.caught_up() == 0


@pytest.mark.parametrize("data", [b"", b"garbage", b"PSTD" + b"\0" * 40])
def test_what_does_not_decode_is_dropped_and_the_truth_fetched(data: bytes) -> None:
    two = Two()
    two.applier._news.hear(entry(2, data))
    two.commit()  # pushes the true v2: whichever comes last, consensus decides
    two.applier._news.hear(entry(2, data))
    two.caught_up()
    assert two.applier.state.seqno == 2


def test_an_entry_of_another_shard_is_never_applied() -> None:
    """It decodes, its seqno follows, and its changes would fit: only the birth differs."""
    two = Two()
    other = Two(seed=1)
    foreign: list[VersionedData] = []
    other.writer_client._versions.push.publish = lambda _key, new: foreign.append(new)  # type: ignore[method-assign]
    other.commit()
    assert foreign[0].seqno == two.applier.state.seqno + 1
    two.applier._news.hear(foreign[0])
    before = two.applier.state
    two.applier.catch_up()
    assert two.applier.state is before
    assert two.count_of("foreign") == 1
    two.commit()
    two.caught_up()


def test_a_seqno_out_of_nowhere_costs_one_fetch_and_no_more() -> None:
    two = Two()
    two.applier._news.hear(entry(2**62, b""))
    assert two.caught_up() == 1
    assert two.caught_up() == 0


def test_a_command_takes_the_news_first_and_does_not_lose_its_race() -> None:
    two = Two()
    reader_writer = two.reader.open_writer(two.shard_id, SCHEMA, purpose="second")
    two.commit()
    assert reader_writer.append([], lower=A(1), upper=A(2)).upper == A(2)
    assert two.counted["command cas_mismatch"] == 0


@pytest.mark.parametrize("url", ["mem:push-{}", "sqlite://{}/c.db"])
def test_clients_of_one_process_wake_each_other_without_polling(url: str, tmp_path) -> None:
    settings = Settings(watch=WatchSettings(initial_ms=3_600_000, clamp_ms=3_600_000))
    location = Location(blob=f"file://{tmp_path}/b", consensus=url.format(tmp_path))
    clients = [PersistClient.open(location, settings=settings) for _ in range(2)]
    shard_id = ShardId.new()
    writer = clients[0].open_writer(shard_id, SCHEMA, purpose="test")
    waiting = clients[1].open_writer(shard_id, SCHEMA, purpose="test")
    subscribed = threading.Event()
    applier = clients[1].machine(shard_id)._applier
    fetch, results = applier.fetch_and_update, []
    applier.fetch_and_update = lambda *args: (fetch(*args), subscribed.set())[0]
    waiter = threading.Thread(target=lambda: results.append(waiting.wait_for_upper_past(A(0), 60)))
    waiter.start()
    assert subscribed.wait(60)
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
    waiter.join(60)
    assert results == [True]
    for client in clients:
        client.close()


def test_push_is_switched_off_by_the_url_and_by_the_settings(tmp_path) -> None:
    env, metrics = SystemEnv(), NoMetrics()
    assert isinstance(open_push("mem:name?push=off", env=env, metrics=metrics), NoPush)
    assert open_push("mem:name", env=env, metrics=metrics) is shared_local_push("mem:name")
    assert open_push("mem:", env=env, metrics=metrics) is not open_push("mem:", env=env, metrics=metrics)
    with pytest.raises(InvalidUsage, match="push must be on or off"):
        open_push("mem:name?push=false", env=env, metrics=metrics)
    off = PersistClient.open(
        Location(blob="mem:", consensus="mem:name"), settings=Settings(watch=WatchSettings(push=False))
    )
    assert isinstance(off._push, NoPush)


def test_a_listener_that_is_gone_gets_no_more_news() -> None:
    push = LocalPush()
    news = News(StateWatch())
    push.subscribe("k", news)
    push.subscribe("k", news)
    push.publish("k", entry(1))
    push.publish("other", entry(2))
    assert news.take_after(SeqNo(0)) == [entry(1)]
    del news
    push.publish("k", entry(2))
    assert not push._listeners["k"]


def test_keys_to_which_nothing_listens_any_more_are_forgotten() -> None:
    """Of shards that were deleted: nothing is published to them."""
    push = LocalPush()
    kept = News(StateWatch())
    push.subscribe("kept", kept)
    for number in range(5 * KEYS_MIN):
        push.subscribe(f"gone {number}", News(StateWatch()))
    assert len(push._listeners) <= KEYS_MIN
    push.publish("kept", entry(1))
    assert kept.take_after(SeqNo(0)) == [entry(1)]


def test_every_key_with_a_listener_is_kept_however_many_there_are() -> None:
    push = LocalPush()
    all_of_them = [News(StateWatch()) for _ in range(3 * KEYS_MIN)]
    for number, news in enumerate(all_of_them):
        push.subscribe(f"{number}", news)
    for number, news in enumerate(all_of_them):
        push.publish(f"{number}", entry(1))
        assert news.take_after(SeqNo(0)) == [entry(1)]
