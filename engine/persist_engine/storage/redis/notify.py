"""News of commits through Redis: the committing script publishes, and this module listens.

Each location has one connection and one thread, started by the first subscription. The channel of key K under prefix P is
`P{K}:n`. A message is the seqno and, for entries that are not too large, a space and their bytes. Any other message is dropped.
If the connection fails, it is reopened with growing pauses, and all listeners are notified that they may have missed news. Until
then no key is live and all listeners poll.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import redis

from persist_engine.base.env import Env
from persist_engine.base.metrics import Metrics
from persist_engine.base.versioned import SEQNO_MAX, SeqNo, VersionedData
from persist_engine.storage.notify import Listener, Listeners

logger = logging.getLogger(__name__)

#: How long the thread waits for a message before it checks whether to end and whether Redis still responds.
_IDLE_S = 1.0
#: The number of idle rounds until Redis is pinged. After as many more without an answer, the connection counts as lost.
_PING_ROUNDS = 5
_RECONNECT_S, _RECONNECT_MAX_S = 0.1, 5.0
_CLOSE_S = 2.0


def news_channel(prefix: str, key: str) -> str:
    """Return the channel for news of commits to `key`."""
    return f"{prefix}{{{key}}}:n"


class RedisPush:
    """See the module and Push. Only listens: the commit script publishes."""

    def __init__(self, pool: redis.ConnectionPool, *, prefix: str, address: str, env: Env, metrics: Metrics) -> None:
        self._pool, self._prefix, self._address = pool, prefix, address
        self._env, self._metrics = env, metrics
        self._closing = threading.Event()
        self._begin()

    def _begin(self) -> None:
        """Initialises the state for this process, which receives no news yet."""
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the fields below, and sending
        self._listeners = Listeners()
        self._heard: set[str] = set()
        self._heard_more = threading.Condition()
        self._connection: redis.Connection | None = None
        self._thread: threading.Thread | None = None

    def subscribe(self, key: str, listener: Listener) -> None:
        """See Push."""
        channel = news_channel(self._prefix, key)
        if self._is_forked:
            self._begin()
        with self._lock:
            if self._closing.is_set():
                return
            is_new = channel not in self._listeners
            self._leave(self._listeners.add(channel, listener))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="persist-push", daemon=True)
                self._thread.start()
            elif is_new:
                self._send("SUBSCRIBE", channel)

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        """See Push."""
        if not self.is_live(key) and news_channel(self._prefix, key) in self._listeners:
            with self._heard_more:
                limit_s = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
                self._heard_more.wait_for(lambda: self._closing.is_set() or self.is_live(key), limit_s)
        return self.is_live(key)

    def publish(self, key: str, new: VersionedData) -> None:
        """Does nothing: the commit script has already published it."""

    def is_live(self, key: str) -> bool:
        """See Push."""
        return not self._is_forked and news_channel(self._prefix, key) in self._heard

    def close(self) -> None:
        """See Push. Waits briefly for the thread. If the thread is connecting to a Redis that does not answer, it ends later."""
        self._closing.set()
        if self._is_forked:
            return
        with self._heard_more:
            self._heard_more.notify_all()
        with self._lock:
            thread = self._thread
            self._send("PING")  # the answer wakes the thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    @property
    def _is_forked(self) -> bool:
        """Whether this is a copy of the object in a forked child. The child has no thread, and the connection belongs to the parent."""
        return self._pid != os.getpid()

    def _leave(self, channels: list[str]) -> None:
        """Unsubscribes from channels that no longer have a listener. The caller holds the lock."""
        self._heard.difference_update(channels)
        if channels:
            self._send("UNSUBSCRIBE", *channels)

    def _send(self, *command: str) -> None:
        """Sends a command. The caller holds the lock. If the connection failed, the thread notices that and reopens it."""
        if self._connection is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                self._connection.send_command(*command)  # type: ignore[no-untyped-call]  # unannotated in redis-py

    def _run(self) -> None:
        pause_s = _RECONNECT_S
        while not self._closing.is_set():
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            try:
                self._listen(connection)
            except Exception as error:  # noqa: BLE001 - nothing else connects again, and a wait costs little
                # Other errors than the driver's occur, too: the password file may not be text while it is being replaced, and when sending
                # fails in another thread, the driver drops the buffers that this thread uses.
                if self._heard:
                    pause_s = _RECONNECT_S  # the connection had worked, so begin with a short pause again
                self._metrics.count("push_disconnected")
                logger.info("push from %s failed: %s", self._address, error, extra={"address": self._address})
            finally:
                with self._lock:
                    self._connection, self._heard = None, set()
                    listeners = [listener for some in self._listeners.values() for listener in some]
                connection.disconnect()
            for listener in listeners:
                listener.hear(None)
            self._env.wait(self._closing, pause_s)
            pause_s = min(2 * pause_s, _RECONNECT_MAX_S)

    def _listen(self, connection: redis.Connection) -> None:
        connection.connect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        with self._lock:
            self._connection = connection
            if self._listeners:
                self._send("SUBSCRIBE", *self._listeners)
        idle_rounds = 0
        while not self._closing.is_set():
            if connection.can_read(timeout=_IDLE_S):
                idle_rounds = 0
                self._take(connection.read_response())
                continue
            idle_rounds += 1
            if idle_rounds == 2 * _PING_ROUNDS:
                raise redis.ConnectionError("no sign of life")
            if idle_rounds == _PING_ROUNDS:
                with self._lock:
                    self._send("PING")

    def _take(self, reply: object) -> None:
        match reply:
            case [b"message", bytes() as name, bytes() as message]:
                self._tell(name.decode(errors="replace"), message)
            case [b"subscribe", bytes() as name, _]:
                channel = name.decode()
                for listener in self._listeners_of(channel):
                    listener.hear(None)  # earlier commits were not received
                with self._lock:
                    if channel not in self._listeners:  # this process has unsubscribed since
                        return
                    self._heard.add(channel)  # in place, because thousands of shards may subscribe at once
                with self._heard_more:
                    self._heard_more.notify_all()

    def _tell(self, channel: str, message: bytes) -> None:
        seqno, _, data = message.partition(b" ")
        if not (seqno.isdigit() and len(seqno) <= 19 and int(seqno) <= SEQNO_MAX):
            self._metrics.count("push", outcome="foreign")
            return
        listeners = self._listeners_of(channel)
        for listener in listeners:
            listener.hear(VersionedData(SeqNo(int(seqno)), data))
        if not listeners:
            with self._lock:
                if not self._listeners.get(channel):
                    self._listeners.pop(channel, None)
                    self._leave([channel])

    def _listeners_of(self, channel: str) -> list[Listener]:
        with self._lock:
            return self._listeners.of(channel)
