"""Answers of Redis that come late, in pages, or after the log has changed between two of them."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import threading

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Indeterminate
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo, VersionedData
from persist_engine.storage.addresses import RedisAddress
from persist_engine.storage.open import open_consensus
from persist_engine.storage.redis import consensus as consensus_redis
from persist_engine.testing.conformance import entry, fill
from persist_kit.fault_proxy import FINE, FaultProxy
from redis import Connection

pytestmark = pytest.mark.redis


def opened(url, prefix):
    return open_consensus(f"{url}?prefix={prefix}", env=SystemEnv(), metrics=NoMetrics())


@pytest.fixture
def consensus(redis, fresh_name):
    consensus = opened(redis.url, fresh_name)
    yield consensus
    consensus.close()


def test_a_missing_answer_is_indeterminate_and_a_late_answer_is_dropped(redis, fresh_name):
    """The append does happen once the server wakes up; a later call must get its own reply, not that one."""
    pool = consensus_redis.redis_pool(RedisAddress.parse(redis.url))
    consensus = consensus_redis.RedisConsensus(pool, prefix=fresh_name, address=f"redis://{redis.address}/0")
    fill(consensus, "s1", 1, 3)
    # Only the connection of the call that cannot be answered is in a hurry. The next call has another one.
    (connection,) = (one for one in pool._connections if one._sock is not None)
    connection._sock.settimeout(0.2)
    with redis.paused(), pytest.raises(Indeterminate, match="s1 at redis://"):
        consensus.compare_and_set("s1", entry(3).tip, entry(4))
    assert consensus.scan("s1", SeqNo(3), SCAN_ALL) == [entry(3), entry(4)]
    assert consensus.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.EXPECTATION_MISMATCH
    consensus.close()


def test_the_reply_to_an_interrupted_call_is_dropped(redis, consensus, monkeypatch):
    """Ctrl-C between request and reply: the reply comes later, and the next call must not take it for its own."""
    fill(consensus, "s1", 1, 3)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    pid = redis.pid
    os.kill(pid, signal.SIGSTOP)
    waker = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
    waker.start()
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "read_response", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consensus.compare_and_set("s1", entry(3).tip, entry(4))
    assert consensus.head("s1") in (entry(3), entry(4))
    waker.join()


@pytest.fixture(params=["taken", "not taken"])
def mixed_up(redis, request):
    """The port of a proxy to `redis`, and a list: the proxy answers the next script with each of its bytes, in place of Redis, which
    gets the script or does not.
    """
    answers: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", redis.port)) as server:
                while asked := self.request.recv(1 << 16):
                    wrong = answers.pop(0) if answers and b"EVALSHA" in asked else None
                    if wrong is None or request.param == "taken":
                        server.sendall(asked)
                        right = server.recv(1 << 16)
                    self.request.sendall(right if wrong is None else wrong)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield proxy.server_address[1], answers
        proxy.shutdown()
        thread.join()


FOREIGN = [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*-1\r\n", b"*2\r\n$2\r\nOK\r\n:0\r\n"]


@pytest.mark.parametrize("answer", [*FOREIGN, b"*3\r\n$2\r\nOK\r\n:0\r\n$6\r\nother0\r\n"])
def test_an_answer_to_another_call_is_no_commit(redis, consensus, fresh_name, mixed_up, answer):
    """Such as a proxy gives that mixes up its connections. The next call has its own answer."""
    fill(consensus, "s1", 1, 3)
    port, answers = mixed_up
    other = opened(redis.url.replace(str(redis.port), str(port)), fresh_name)
    assert other.head("s1") == entry(3)
    answers.append(answer)
    with pytest.raises(Indeterminate, match="compare_and_set s1 at redis://.*the answer is that of another call"):
        other.compare_and_set("s1", entry(3).tip, entry(4))
    for read in (other.head, lambda key: other.scan(key, SeqNo(0), SCAN_ALL)):
        answers.append(answer)
        with pytest.raises(Indeterminate, match="the answer is that of another call"):
            read("s1")
    assert other.head("s1") in (entry(3), entry(4))
    other.close()


@pytest.fixture
def proxied(redis, fresh_name):
    """A consensus whose exchanges pass a proxy, and the proxy."""
    with FaultProxy(redis.port) as proxy:
        consensus = opened(redis.url.replace(str(redis.port), str(proxy.port)), fresh_name)
        yield consensus, proxy
        consensus.close()


def filled_with(consensus, log):
    tip = None
    for new in log:
        assert consensus.compare_and_set("s1", tip, new) is CasResult.COMMITTED
        tip = new.tip
    return log


#: Two of them fill a page, so that a third begins the next one.
BIG_BYTES = consensus_redis.PAGE_BYTES_MAX // 2


def test_a_scan_survives_a_truncate_between_its_pages(consensus, proxied):
    """What the truncate took is gone from the scan's first pages, too."""
    log = filled_with(consensus, [entry(seqno, b"%d" % seqno * (BIG_BYTES // 2)) for seqno in range(1, 10)])
    scanning, proxy = proxied
    pages = []

    def truncate_before_the_second_page(number):
        pages.append(number)
        if len(pages) == 2:
            assert consensus.truncate("s1", log[5].seqno, log[5].tip) == 5

    proxy.begin(FINE, seed=0, on_exchange=truncate_before_the_second_page)
    assert scanning.scan("s1", SeqNo(0), SCAN_ALL) == log[5:]
    assert len(pages) > 1


def test_a_log_that_is_replaced_as_it_is_truncated_is_left_alone(redis, consensus, proxied, fresh_name):
    """The entry that is kept is looked at first, and cut at by a second call."""
    fill(consensus, "s1", 1, 5)
    truncating, proxy = proxied
    calls = []

    def replace_before_the_second_call(number):
        calls.append(number)
        if len(calls) == 2:
            redis.command("LSET", f"{fresh_name}{{s1}}:l", "2", "another third")

    proxy.begin(FINE, seed=0, on_exchange=replace_before_the_second_call)
    assert truncating.truncate("s1", SeqNo(3), entry(3).tip) is None
    assert len(calls) == 2
    assert redis.command("LLEN", f"{fresh_name}{{s1}}:l") == b":5\r\n"
    assert truncating.truncate("s1", SeqNo(3), VersionedData(SeqNo(3), b"another third").tip) == 2


def test_big_entries_make_small_pages(consensus, proxied):
    log = filled_with(consensus, [entry(seqno, b"x" * BIG_BYTES) for seqno in range(1, 6)])
    scanning, proxy = proxied
    assert scanning.scan("s1", SeqNo(0), SCAN_ALL) == log
    pages = proxy.exchanges
    assert scanning.scan("s1", SeqNo(3), 3) == log[2:5]
    assert proxy.exchanges - pages == 2
