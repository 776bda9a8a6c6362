"""Consensus on one Redis (or Valkey) primary, 6.2 or newer: a list and a meta hash per key, one Lua script per verb.

Layout, for key K under the location's prefix P: `P{K}:m` is a hash {e: epoch, run: id of the Redis process of the last
commit, h: head, l: lowest kept, t: head and tag of its entry}, `P{K}:l` the list of entries l..h. Braces keep both in one cluster slot.

Invariant, checked by every script: LLEN = h - l + 1. This client also remembers the highest head it has seen of each
key and hands it to every script, which refuses to work on a log that has fallen behind it: a commit that Redis lost
after acknowledging is reported (ForkedLog), never silently overwritten. With that head goes a tag of its entry, so that
a log that was wiped or rolled back, and has grown to the very same length since, is not taken for the one we know. A
restart that lost nothing is only logged.

Acknowledged means: Redis has it, so Redis must keep it; `redis_durability` refuses settings that do not, of the process that
was opened and of each that takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from persist_engine.base.errors import (
    CorruptData,
    Determinate,
    Fenced,
    ForkedLog,
    Indeterminate,
    InvalidUsage,
    PersistError,
    StorageError,
    StoreRefused,
    UnsafeStore,
)
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.addresses import REDIS_PASSWORD_FILE, RedisAddress
from persist_engine.storage.checks import check_append, check_log_key, check_replace, check_scan
from persist_engine.storage.notify import NEWS_BYTES_MAX
from persist_engine.storage.redis.durability import CLUSTER_NODE, RunWatch, check_durability, check_role
from persist_engine.storage.redis.notify import news_channel
from persist_engine.storage.refusals import is_untrusted

logger = logging.getLogger(__name__)

#: A TCP connect is one round trip; the rest is room for a lost SYN or two (1 s and 3 s).
CONNECT_TIMEOUT_S = 5.0
#: A script takes microseconds, an fsync at `always` milliseconds; a slower answer means a stalled disk or a lost peer.
ANSWER_TIMEOUT_S = 10.0
#: More threads than this in one process wait for a connection, at most CONNECTION_WAIT_S.
CONNECTIONS_MAX = 50
CONNECTION_WAIT_S = 60.0
#: A scan fetches pages of at most this, so that one long log does not hold up Redis for everybody else.
PAGE_ENTRIES_MAX = 500
PAGE_BYTES_MAX = 4 << 20
#: The journal in S3 that raises epochs comes with `ack=s3`; without it there is one epoch.
EPOCH = "0"

#: What to do about a server that has no memory left; stands after its own words.
_FULL = (
    "(redis is full and takes no commits: raise its maxmemory, or let `persist maintain gc` delete versions that no reader holds, "
    "which works all the same)"
)
#: First words of replies that Redis gives instead of running a command (and their classes in redis-py).
_REFUSALS = ("MISCONF", "BUSY", "NOREPLICAS", "NOAUTH", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN")
_REFUSAL_CLASSES = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoScriptError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.AuthenticationError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)


#: What a server answers to a password, a user or a database that it does not take.
_REFUSED_WORDS = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED", "DB index", "invalid DB index")
#: The name of no shard, so that no log has it.
_NO_LOG = "s00000000-0000-0000-0000-000000000000"


def open_redis_consensus(at: RedisAddress) -> RedisConsensus:
    """Connect, check that it is a primary on its own and, but for `unsafe`, that it keeps what it acknowledges; errors
    as of open_consensus, StoreRefused where Redis says that the address is wrong.
    """
    is_checked = not at.unsafe
    pool = redis_pool(at, watch=RunWatch(address=at.shown) if is_checked else None)
    consensus = RedisConsensus(pool, prefix=at.prefix, address=at.shown, push=at.push)
    try:
        notes = check_role(consensus.ask, address=at.shown)
        if is_checked:
            notes += check_durability(consensus.ask, address=at.shown)
        for note in notes:
            logger.warning("cannot verify a durability setting: %s", note, extra={"address": at.shown})
        consensus.head(_NO_LOG)  # whether the user may do what every verb does
    except StorageError as error:
        consensus.close()
        if _is_refusal(error.__cause__):
            raise StoreRefused(f"open consensus: {error}") from error
        raise
    except BaseException:
        consensus.close()
        raise
    return consensus


class RedisConsensus:
    """See the module. Thread-safe, and linearizable as long as one primary serves."""

    def __init__(self, pool: redis.BlockingConnectionPool, *, prefix: str, address: str, push: bool = True) -> None:
        if "{" in prefix or "}" in prefix:
            raise InvalidUsage(f"{address}: prefix {prefix!r} must not contain braces")
        self._pool = pool
        self._prefix = prefix
        self._address = address
        self._push = push
        self._seen: dict[str, tuple[SeqNo, str]] = {}
        self._seen_lock = threading.Lock()
        self._closed = False

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        check_log_key(key)
        answer = self._run(_HEAD, key)
        if answer[0] == b"ABSENT":
            return None
        head = VersionedData(SeqNo(int(answer[1])), answer[2])
        self._see(key, head.seqno, head.tip)
        return head

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_append(key, expected, new)
        channel = news_channel(self._prefix, key) if self._push else ""
        before, after = "" if expected is None else _told(expected), _told(new.tip)
        answer = self._run(_COMPARE_AND_SET, key, before, int(new.seqno), new.data, channel, NEWS_BYTES_MAX, after)
        if answer[0] == b"MISMATCH":
            if answer[1]:
                self._see(key, answer[1])
            return CasResult.EXPECTATION_MISMATCH
        if answer[1]:
            logger.info("redis was restarted since the last commit and kept the log", extra={"key": key})
        self._see(key, new.seqno, new.tip)
        return CasResult.COMMITTED

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus. Paged; equals what the log held when the last page was read."""
        check_scan(key, limit)
        entries: list[VersionedData] = []
        while len(entries) < limit:
            wanted = entries[-1].seqno + 1 if entries else from_seqno
            page_size = min(PAGE_ENTRIES_MAX, limit - len(entries))
            answer = self._run(_SCAN, key, int(wanted), page_size, PAGE_BYTES_MAX)
            if answer[0] == b"ABSENT":
                return []
            low, head = int(answer[1]), self._see(key, answer[2])
            # A truncate between two pages takes what it took from this scan, too: no holes, no entries of the past.
            entries = [entry for entry in entries if entry.seqno >= low]
            first = max(wanted, low)
            entries += [VersionedData(SeqNo(first + index), data) for index, data in enumerate(answer[3])]
            if not answer[3]:
                break
            if entries[-1].seqno == head:
                self._see(key, head, entries[-1].tip)
                break
        return entries

    def truncate(self, key: str, keep: Tip) -> int | None:
        """See Consensus. Scripts have no hash of ours: the entry is fetched, and must still be the same when it is cut at."""
        check_log_key(key)
        answer = self._run(_TRUNCATE, key, int(keep.seqno), "")
        if answer[0] == b"ENTRY":
            if VersionedData(keep.seqno, answer[1]).tip != keep:
                return None
            seen = hashlib.sha1(answer[1], usedforsecurity=False).hexdigest()
            answer = self._run(_TRUNCATE, key, int(keep.seqno), seen)
        return int(answer[1]) if answer[0] == b"OK" else None

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_replace(key, expected, new)
        answer = self._run(_REPLACE, key, _told(expected), int(new.seqno), new.data, _told(new.tip))
        if answer[0] == b"MISMATCH":
            return CasResult.EXPECTATION_MISMATCH
        self._see(key, new.seqno, new.tip)
        return CasResult.COMMITTED

    def list_keys(self) -> Iterator[str]:
        """See Consensus. Keys made while it runs may be missing; each is given once. Names that no log of ours can have are
        another application's.
        """
        start, end = f"{self._prefix}{{", "}:m"
        listed: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, names = self.ask("SCAN", cursor, "MATCH", f"{_glob_escaped(start)}*{end}", "COUNT", 1000)
            keys: list[str] = []
            for name in set(names) - listed:
                with contextlib.suppress(UnicodeDecodeError, InvalidUsage):
                    check_log_key(key := name.decode()[len(start) : -len(end)])
                    keys.append(key)
            yield from keys
            listed.update(names)
            if cursor == b"0":
                return

    def address(self) -> str:
        """See Consensus."""
        return self._address

    def close(self) -> None:
        """See Consensus. Connections in use by other threads are closed when their call ends: taken from under it they would
        end it with whatever the driver stumbles over.
        """
        self._closed = True
        self._pool.disconnect(inuse_connections=False)

    def ask(self, *command: str | bytes | int) -> Any:
        """Send one command, return its reply; errors mapped, with the command's name in the text."""
        return self._exchange(str(command[0]), "", command)

    def _run(self, script: _Script, key: str, *args: str | bytes | int) -> list[Any]:
        """Run a verb's script; its reply when the log is sound, else the error that says what is wrong with it."""
        # Taken before the call: only an answer that began after the head was seen must have it.
        seen, tag = self._seen.get(key, (None, ""))
        names = (f"{self._prefix}{{{key}}}:m", f"{self._prefix}{{{key}}}:l")
        tail = (2, *names, EPOCH, "" if seen is None else f"{int(seen)}{tag}", *args)
        try:
            answer = self._exchange(script.verb, key, ("EVALSHA", script.sha1, *tail))
        except _UnknownScript:
            answer = self._exchange(script.verb, key, ("EVAL", script.source, *tail))
        where = f"{script.verb} {key} at {self._address}"
        match answer[0]:
            case b"CORRUPT":
                head, low, count = answer[1].decode(), answer[2].decode(), answer[3]
                raise CorruptData(f"{where}: head {head} and lowest {low} do not fit {count} entries", key=key)
            case b"LOST":
                raise ForkedLog(
                    f"{where}: redis lost acknowledged entries: {seen} was seen, head is now {answer[1].decode()}; "
                    "restore its data, or restart this process to accept the loss",
                    key=key,
                )
            case b"OTHER":
                raise ForkedLog(
                    f"{where}: redis lost acknowledged entries: {answer[1].decode()} is not the entry that was seen, the log "
                    "was wiped or rolled back and written anew; restore its data, or restart this process to accept the loss",
                    key=key,
                )
            case b"EPOCH":
                raise Fenced(f"{where}: epoch is {answer[1].decode()}, this process works in {EPOCH}", key=key)
        return cast("list[Any]", answer)

    def _exchange(self, verb: str, key: str, command: tuple[str | bytes | int, ...]) -> Any:
        """One command, one reply, no retry. Determinate until the first byte may have left, Indeterminate after it."""
        where = f"{verb} {key}".rstrip() + f" at {self._address}"
        if self._closed:
            # Not an error of the store, which would be tried again, without end.
            raise InvalidUsage(f"{where}: it was closed")
        try:
            connection = self._pool.get_connection()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        except (redis.RedisError, OSError, UnicodeError) as error:
            # UnicodeError: a host that no name server could be asked for, a password file that is none.
            raise Determinate(f"{where}: {error}", key=key) from error
        answered = False
        try:
            connection.send_command(*command)
            reply = connection.read_response()
            answered = True
        except redis.exceptions.NoScriptError as error:
            answered = True
            raise _UnknownScript from error
        except (redis.RedisError, OSError, AttributeError) as error:
            # AttributeError: when another thread closes, the driver may drop its buffers under this call.
            answered = isinstance(error, redis.ResponseError)
            raise _mapped(where, key, error) from error
        else:
            return reply
        finally:
            if not answered or self._closed:
                connection.disconnect()  # a late reply must not meet the next command
            self._pool.release(connection)  # type: ignore[no-untyped-call]  # unannotated in redis-py

    def _see(self, key: str, head: SeqNo | bytes, tip: Tip | None = None) -> SeqNo:
        seqno = SeqNo(int(head))
        tag = "" if tip is None else f":{tip.tag.hex()}"
        with self._seen_lock:
            if (seqno, tag) > self._seen.get(key, (-1, "")):
                self._seen[key] = seqno, tag
        return seqno


def _told(tip: Tip) -> str:
    """As scripts take and keep it."""
    return f"{int(tip.seqno)}:{tip.tag.hex()}"


class _UnknownScript(Exception):
    """Redis does not have the script (it was restarted): nothing ran."""


class _Script:
    """One verb: the prelude and the verb's own file."""

    def __init__(self, verb: str) -> None:
        folder = resources.files("persist_engine.storage.redis").joinpath("lua")
        self.verb = verb
        self.source = "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in ("prelude", verb))
        self.sha1 = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


_HEAD = _Script("head")
_COMPARE_AND_SET = _Script("compare_and_set")
_SCAN = _Script("scan")
_TRUNCATE = _Script("truncate")
_REPLACE = _Script("replace")


class _Credentials(redis.CredentialProvider):
    """Reads the password file anew for every connection, so that a rotated secret needs no restart."""

    def __init__(self, user: str | None, password_file: Path, *, optional: bool) -> None:
        """Without the file: no password when it is `optional`, else an OSError when it is wanted."""
        self._user = user
        self._password_file = password_file
        self._optional = optional

    def get_credentials(self) -> tuple[str, ...]:  # type: ignore[override]  # none at all is fine, too: nothing is sent
        if self._optional and not self._password_file.exists():
            return ()
        password = self._password_file.read_text().rstrip("\r\n")
        return (self._user, password) if self._user else (password,)


def redis_pool(at: RedisAddress, *, watch: RunWatch | None = None) -> redis.BlockingConnectionPool:
    """Connections to the address, made when they are needed; each meets `watch` before it is used."""
    options: dict[str, Any] = {
        "host": at.host.strip("[]"),
        "port": at.port,
        "db": at.database,
        "protocol": 2,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
    }
    if at.password_file:
        options["credential_provider"] = _Credentials(at.user, Path(at.password_file), optional=False)
    elif at.credentials_dir:
        password_file = Path(at.credentials_dir, REDIS_PASSWORD_FILE)
        options["credential_provider"] = _Credentials(at.user, password_file, optional=True)
    elif at.password or at.user:
        options |= {"username": at.user, "password": at.password}
    if at.tls:
        options |= {"connection_class": redis.SSLConnection, "ssl_ca_certs": at.ca_file}
        options["redis_connect_func"] = _greeted
    if watch is not None:
        options["redis_connect_func"] = partial(_watched, watch, at.shown)
    options |= {"max_connections": CONNECTIONS_MAX, "timeout": CONNECTION_WAIT_S}
    return redis.BlockingConnectionPool(**options)  # type: ignore[no-untyped-call]  # unannotated in redis-py


def _greeted(connection: redis.Connection) -> None:
    """As redis-py begins, and one exchange more: with TLS 1.3 a server's first bytes are session tickets, which are read with
    the first reply only. Until then the driver takes them for a late reply, and the connection for one that is unusable.
    """
    connection.on_connect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
    connection.send_command("PING", check_health=False)  # type: ignore[no-untyped-call]  # unannotated in redis-py
    with contextlib.suppress(redis.ResponseError):  # forbidden is an answer, too
        connection.read_response()


def _watched(watch: RunWatch, address: str, connection: redis.Connection) -> None:
    """As redis-py begins, then the question which process this is. That is an exchange, too: see _greeted."""

    def ask(*command: str) -> Any:
        try:
            connection.send_command(*command, check_health=False)  # type: ignore[no-untyped-call]  # unannotated in redis-py
            return connection.read_response()
        except (redis.RedisError, OSError) as error:
            # Whatever it is: what the connection is wanted for was not sent yet.
            raise Determinate(f"{command[0]} at {address}: {error}") from error

    try:
        connection.on_connect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        watch.meet(ask)
    except BaseException:
        # Or the pool would hand it out as one that was met.
        connection.disconnect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        raise


def _mapped(where: str, key: str, error: Exception) -> PersistError:
    text = f"{where}: {error}"
    if isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE"):
        return CorruptData(f"{where}: another application's data stands in its place", key=key)
    if isinstance(error, redis.exceptions.AskError):  # MOVED too
        return UnsafeStore(f"{where}: redis {CLUSTER_NODE}", key=key)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Determinate(f"{text} {_FULL}", key=key)
    if isinstance(error, _REFUSAL_CLASSES) or str(error).startswith(_REFUSALS):
        return Determinate(text, key=key)
    return Indeterminate(text, key=key)


def _is_refusal(cause: BaseException | None) -> bool:
    """Whether the URL is wrong, or what it names: to try again would not help."""
    match cause:
        case redis.exceptions.AuthenticationError() | redis.exceptions.NoPermissionError():
            return True
        case redis.exceptions.InvalidResponse():  # what answers is no Redis
            return True
        case FileNotFoundError() | PermissionError() | IsADirectoryError() | NotADirectoryError() | UnicodeError():
            return True  # the password file, as the driver wraps what its sockets raise; or a host that is no name
    return str(cause).startswith(_REFUSED_WORDS) or is_untrusted(cause)


def _glob_escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]^\\" else char for char in text)
