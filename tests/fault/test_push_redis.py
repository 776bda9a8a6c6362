"""News through a real Redis: it wakes waiters, and whatever happens to it, answers stay the same."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from persist_engine import Antichain, Location, PersistClient, ShardId, WriteHandle
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, LeaseSettings, RetrySettings, Settings, WatchSettings
from persist_engine.shard.news import News
from persist_engine.shard.watch import StateWatch
from persist_engine.storage.notify import KEYS_MIN, NEWS_BYTES_MAX
from persist_engine.storage.open import open_push
from persist_engine.storage.redis.notify import RedisPush, news_channel
from persist_kit.servers import RedisServer, redis_server
from persist_kit.world import SCHEMA, row

pytestmark = pytest.mark.redis
A = Antichain.of
#: No process polls within a test: the news ends a wait.
HOUR_MS = 3_600_000.0
PATIENT = Settings(
    watch=WatchSettings(initial_ms=HOUR_MS, clamp_ms=HOUR_MS, pushed_clamp_ms=HOUR_MS),
    retry=RetrySettings(clamp_ms=50, give_up_ms=60_000),
    lease=LeaseSettings(),
    batch=BatchSettings(inline_part_bytes_max=200_000),
)


class Counted(NoMetrics):
    """Counts `name outcome`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        self.counts[" ".join([name, *labels.values()])] += int(amount)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class WatchedEnv(SystemEnv):
    """Shows when the waiter has gone to sleep."""

    sleeps = 0

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.sleeps += threading.current_thread().name == "waiter"
        return super().wait(event, seconds)


def blobs_of(server: RedisServer, tmp_path) -> str:
    """The one blob store that belongs to the server, in all tests that share it."""
    return f"file://{tmp_path.parent}/blobs-{server.port}"


class Pair:
    """One process that writes and one that waits."""

    def __init__(self, server: RedisServer, tmp_path, *, writer_url: str = "", settings: Settings = PATIENT) -> None:
        self.server = server
        self.metrics, self.env = Counted(), WatchedEnv()
        blob = blobs_of(server, tmp_path)
        url = f"{server.url}?ca_file={server.ca_file}" if server.ca_file else server.url
        self.writing = PersistClient.open(
            Location(blob=blob, consensus=url + writer_url), settings=settings, metrics=NoMetrics()
        )
        self.waiting = PersistClient.open(
            Location(blob=blob, consensus=url), settings=settings, metrics=self.metrics, env=self.env
        )
        self.shard_id = ShardId.new()
        self.writer: WriteHandle = self.writing.open_writer(self.shard_id, SCHEMA, purpose="test")
        self.waiter: WriteHandle = self.waiting.open_writer(self.shard_id, SCHEMA, purpose="test")
        self.upper = 0

    @property
    def push(self) -> RedisPush:
        assert isinstance(self.waiting._push, RedisPush)
        return self.waiting._push

    def commit(self, name: str = "a") -> None:
        self.writer.append([row(1, name, self.upper)], lower=A(self.upper), upper=A(self.upper + 1))
        self.upper += 1

    def begin_waiting(self) -> Callable[[], None]:
        """Wait for the next commit in a thread; the returned function waits for that to have ended."""
        upper = A(self.upper)

        def wait() -> None:
            assert self.waiter.wait_for_upper_past(upper, 60)

        applier = self.waiter.machine._applier
        applier.subscribe()
        until(lambda: self.push.is_live(self.shard_id))
        applier.catch_up()
        thread = threading.Thread(target=wait, name="waiter")
        asleep = self.env.sleeps
        thread.start()
        until(lambda: self.env.sleeps > asleep)

        def woken() -> None:
            thread.join(60)
            assert not thread.is_alive()

        return woken

    def close(self) -> None:
        self.writing.close()
        self.waiting.close()


class Heard:
    """Hears news, and does nothing."""

    def hear(self, news: object | None) -> None:
        pass


def until(condition: Callable[[], bool]) -> None:
    ticking = threading.Event()
    for _ in range(6000):
        if condition():
            return
        ticking.wait(0.01)
    raise AssertionError("it never came to be")


@pytest.fixture
def pair(server, tmp_path) -> Iterator[Pair]:
    pair = Pair(server, tmp_path)
    yield pair
    pair.close()


def agree(pair: Pair) -> None:
    assert pair.waiting.machine(pair.shard_id).state == pair.writing.machine(pair.shard_id).state


def test_a_waiter_is_woken_by_the_commit_of_another_process_and_fetches_nothing(pair: Pair) -> None:
    for _ in range(5):
        woken = pair.begin_waiting()
        scans = pair.metrics.counts["consensus_calls scan ok"]
        pair.commit()
        woken()
        assert pair.metrics.counts["consensus_calls scan ok"] == scans
        agree(pair)
    assert pair.metrics.counts["push applied"] >= 5


def test_news_come_through_tls(tmp_path) -> None:
    with redis_server(tls=True) as server:
        pair = Pair(server, tmp_path)
        try:
            for _ in range(2):
                woken = pair.begin_waiting()
                pair.commit()
                woken()
                agree(pair)
            assert pair.metrics.counts["push_disconnected"] == 0
        finally:
            pair.close()


def test_a_large_entry_is_announced_and_fetched(pair: Pair) -> None:
    woken = pair.begin_waiting()
    pair.commit("x" * (3 * NEWS_BYTES_MAX) + "".join(map(str, range(9000))))
    woken()
    agree(pair)


def test_foreign_corrupt_repeated_and_dropped_messages_change_no_answer(pair: Pair) -> None:
    channel = news_channel("", pair.shard_id)
    woken = pair.begin_waiting()
    for message in ("", "garbage", "-1 x", "99999999999999999999 x", "2 garbage", "3 PSTD", "4611686018427387904 x"):
        pair.server.command("PUBLISH", channel, message)
    pair.commit()
    woken()
    agree(pair)
    for message in ("1 x", "2 garbage"):
        pair.server.command("PUBLISH", channel, message)
    woken = pair.begin_waiting()
    pair.commit()
    woken()
    agree(pair)
    assert pair.metrics.counts["push foreign"] >= 4


def test_a_break_of_the_connection_is_healed_and_nothing_is_missed(pair: Pair) -> None:
    woken = pair.begin_waiting()
    pair.server.command("CLIENT", "KILL", "TYPE", "pubsub")
    pair.commit()  # maybe between the two connections: every waiter is woken to look
    woken()
    agree(pair)
    woken = pair.begin_waiting()
    pair.commit()
    woken()


@pytest.mark.parametrize("wrong", [b"\xff\xfe", None], ids=["no text", "no file"])
def test_a_password_file_that_cannot_be_read_for_a_moment_ends_no_push(tmp_path, wrong: bytes | None) -> None:
    """As while it is replaced. Nothing else would begin to listen again."""
    file = tmp_path / "password"
    with redis_server(password="secret") as server:
        file.write_text("secret")
        metrics, heard = Counted(), Heard()
        url = f"redis://{server.address}/0?password_file={file}"
        push = open_push(url, env=SystemEnv(), metrics=metrics)
        push.subscribe("k", heard)
        until(lambda: push.is_live("k"))
        file.unlink() if wrong is None else file.write_bytes(wrong)
        server.command("CLIENT", "KILL", "TYPE", "pubsub")
        until(lambda: metrics.counts["push_disconnected"] >= 2)
        file.write_text("secret")
        until(lambda: push.is_live("k"))
        push.close()


def test_a_restart_of_redis_is_survived(tmp_path) -> None:
    with redis_server() as server:
        pair = Pair(server, tmp_path)
        woken = pair.begin_waiting()
        server.restart()
        pair.commit()
        woken()
        agree(pair)
        pair.close()


def test_the_commits_of_a_writer_that_pushes_nothing_are_found_by_polling(server, tmp_path) -> None:
    settings = Settings(watch=WatchSettings(initial_ms=20, clamp_ms=50, pushed_clamp_ms=100))
    pair = Pair(server, tmp_path, writer_url="?push=off", settings=settings)
    woken = pair.begin_waiting()
    pair.commit()
    woken()
    assert pair.metrics.counts["push applied"] == 0
    pair.close()


def test_a_user_without_the_right_to_publish_commits_all_the_same(server, tmp_path) -> None:
    server.command("ACL", "SETUSER", "quiet", "on", ">pw", "~*", "+@all", "resetchannels")
    location = Location(
        blob=blobs_of(server, tmp_path), consensus=server.url.replace("redis://", "redis://quiet:pw@") + "?unsafe=true"
    )
    with PersistClient.open(location) as client:
        writer = client.open_writer(ShardId.new(), SCHEMA, purpose="test")
        assert writer.append([row(1, "a", 0)], lower=A(0), upper=A(1)).upper == A(1)
        # A user without the right to listen polls.
        assert not writer.wait_for_upper_past(A(1), 0.3)


def test_one_connection_and_one_thread_for_any_number_of_shards_and_none_after_close(server, tmp_path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    pair = Pair(server, tmp_path)
    for _ in range(20):
        writer = pair.waiting.open_writer(ShardId.new(), SCHEMA, purpose="test")
        assert not writer.wait_for_upper_past(A(0), 0)
    until(lambda: len(pair.push._heard) == 20)
    assert sum(thread.name == "persist-push" for thread in threading.enumerate() if thread.ident not in before) == 1
    # Redis may still have the connection of the test before.
    until(lambda: pair.server.command("CLIENT", "LIST", "TYPE", "pubsub").count(b"id=") == 1)
    pair.close()
    assert not [
        thread for thread in threading.enumerate() if thread.name == "persist-push" and thread.ident not in before
    ]
    until(lambda: pair.server.command("CLIENT", "LIST", "TYPE", "pubsub").count(b"id=") == 0)


def test_channels_of_shards_without_handles_are_left(pair: Pair) -> None:
    woken = pair.begin_waiting()
    pair.commit()
    woken()
    pair.push._listeners[news_channel("", pair.shard_id)].clear()
    pair.commit()
    until(lambda: not pair.push.is_live(pair.shard_id))


def channels(server: RedisServer) -> int:
    found = re.search(rb"pubsub_channels:(\d+)", server.command("INFO", "stats"))
    assert found is not None
    return int(found[1])


def test_channels_to_which_nothing_is_committed_any_more_are_left_too(pair: Pair) -> None:
    """Of shards that were deleted: no message comes that nothing listens to."""
    kept = News(StateWatch())
    pair.push.subscribe("kept", kept)
    for number in range(5 * KEYS_MIN):
        pair.push.subscribe(f"gone {number}", News(StateWatch()))
    assert pair.push.await_live("kept", 60)
    until(lambda: 0 < channels(pair.server) <= KEYS_MIN)
    assert len(pair.push._listeners) <= KEYS_MIN
    until(lambda: len(pair.push._heard) <= KEYS_MIN)
    assert pair.push.is_live("kept")


def test_regression_a_forked_process_does_not_rely_on_the_listener_of_its_parent(pair: Pair) -> None:
    """The thread stays in the parent: a waiter of the child polled as rarely as if it still got the news."""
    applier = pair.waiter.machine._applier
    applier.subscribe()
    until(applier.is_live)
    child = os.fork()
    if not child:
        code = 1
        try:
            assert not applier.is_live()
            applier.subscribe()
            until(applier.is_live)
            pair.push.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert applier.is_live()
