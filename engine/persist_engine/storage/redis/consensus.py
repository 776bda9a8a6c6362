"""Consensus on one Redis (or Valkey) primary, 6.2 or newer: a list and a meta hash per key, and one Lua script per verb.

Layout, for key K under the location's prefix P: `P{K}:m` is a hash {e: epoch, run: id of the Redis process of the last commit,
h: head, l: lowest kept, t: head and tag of its entry}; `P{K}:l` is the list of entries l..h. The braces keep both in one
cluster slot.

Invariant, checked by every script: LLEN = h - l + 1. This client also remembers the highest head of each key, with the tag of
its entry, and passes both to every script. The script refuses a log that has fallen behind that head. So if Redis lost a commit
after it acknowledged it, this is reported (ForkedLog), and the commit is never silently overwritten. The tag detects a log that
was wiped or rolled back and has since grown to the same length. A restart that lost nothing is only logged.

Each call has a name, and the answer of its script ends with this name. If a proxy between client and Redis mixes up answers, the
answer to another call is therefore never taken for a commit.

Acknowledged means that Redis has the commit, so Redis must keep it. `durability` refuses settings that do not guarantee this, for
the Redis process at opening and for each process that replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
from collections.abc import Iterator
from functools import partial
from importlib import resources
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from persist_engine.base.env import Env
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
from persist_engine.storage.addresses import RedisAddress
from persist_engine.storage.checks import check_append, check_log_key, check_replace, check_scan, check_truncate
from persist_engine.storage.notify import NEWS_BYTES_MAX
from persist_engine.storage.redis.access import access
from persist_engine.storage.redis.durability import CLUSTER_NODE, RunWatch, check_durability, check_role
from persist_engine.storage.redis.notify import news_channel
from persist_engine.storage.refusals import TRUST, is_untrusted, speaks_tls

logger = logging.getLogger(__name__)

#: A TCP connect takes one round trip. The rest is for one or two lost SYNs (1 s and 3 s).
CONNECT_TIMEOUT_S = 5.0
#: A script takes microseconds, and an fsync at `always` takes milliseconds. A slower answer means a stalled disk or a lost peer.
ANSWER_TIMEOUT_S = 10.0
#: The connections of a process. Further threads wait for one, at most CONNECTION_WAIT_S.
CONNECTIONS_MAX = 50
CONNECTION_WAIT_S = 60.0
#: The entries of one page of a scan. The limit keeps a long log from blocking Redis for its other clients.
PAGE_ENTRIES_MAX = 500
PAGE_BYTES_MAX = 4 << 20
#: The only epoch. Epochs will rise with a journal in S3 (`ack=s3`), which does not exist yet.
EPOCH = "0"

#: The advice for a server without free memory. It follows the server's own message.
_FULL = (
    "(redis is full and takes no commits: raise its maxmemory, or run `persist maintain gc`, which still works, to delete versions "
    "that no reader holds)"
)
#: The advice for a user that lacks rights.
_GRANT = "give the Redis user these commands, and the keys and channels of the location (docs/security.md)"
#: The replies when the user may run a script, but not a command in it: those of Redis up to 7.0, and of later versions.
_REFUSED_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
#: The first words of replies by which Redis refuses a command. redis-py has classes for some of them.
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


#: The first words of replies to a rejected password, user or database.
_REFUSED_WORDS = ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED", "DB index", "invalid DB index")
#: A key that no log has, because no shard has this id.
_NO_LOG = "s00000000-0000-0000-0000-000000000000"


def open_redis_consensus(at: RedisAddress, *, env: Env) -> RedisConsensus:
    """Connect and check that the server is a single primary and, except with `unsafe`, that it keeps what it acknowledges.
    Raises the errors of open_consensus, and StoreRefused if Redis rejects the address or the credentials.
    """
    is_checked = not at.unsafe
    pool = redis_pool(at, watch=RunWatch(address=at.shown) if is_checked else None)
    caller = env.random_bytes(6).hex()
    consensus = RedisConsensus(pool, prefix=at.prefix, address=at.shown, push=at.push, caller=caller)
    try:
        notes = check_role(consensus.ask, address=at.shown)
        if is_checked:
            notes += check_durability(consensus.ask, address=at.shown)
        for note in notes:
            logger.warning("cannot verify a durability setting: %s", note, extra={"address": at.shown})
        consensus.head(_NO_LOG)  # checks that the user may run the verbs
    except StorageError as error:
        consensus.close()
        if not at.tls and speaks_tls(at.host, at.port):
            raise StoreRefused(f"open consensus: {error}: the server speaks TLS; use rediss://") from error
        if _is_refusal(error.__cause__):
            remedy = _remedy(error.__cause__)
            raise StoreRefused(f"open consensus: {error}{f'; {remedy}' if remedy else ''}") from error
        raise
    except BaseException:
        consensus.close()
        raise
    return consensus


class RedisConsensus:
    """See the module. Thread-safe, and linearizable as long as one primary serves."""

    def __init__(
        self, pool: redis.BlockingConnectionPool, *, prefix: str, address: str, push: bool = True, caller: str = ""
    ) -> None:
        """`caller` distinguishes the calls of this client from those of others."""
        if "{" in prefix or "}" in prefix:
            raise InvalidUsage(f"{address}: prefix {prefix!r} must not contain braces")
        self._pool = pool
        self._prefix = prefix
        self._address = address
        self._push = push
        self._known: dict[str, tuple[SeqNo, str]] = {}
        self._known_lock = threading.Lock()
        self._closed = False
        self._caller, self._calls = caller, itertools.count()

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        check_log_key(key)
        answer = self._run(_HEAD, key)
        if answer[0] == b"ABSENT":
            return None
        head = VersionedData(SeqNo(int(answer[1])), answer[2])
        self._remember(key, head.seqno, head.tip)
        return head

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_append(key, expected, new)
        channel = news_channel(self._prefix, key) if self._push else ""
        before, after = "" if expected is None else _tip_text(expected), _tip_text(new.tip)
        answer = self._run(_COMPARE_AND_SET, key, before, int(new.seqno), new.data, channel, NEWS_BYTES_MAX, after)
        if answer[0] == b"MISMATCH":
            if answer[1]:
                self._remember(key, answer[1])
            return CasResult.EXPECTATION_MISMATCH
        if answer[1]:
            logger.info("redis was restarted since the last commit and kept the log", extra={"key": key})
        self._remember(key, new.seqno, new.tip)
        return CasResult.COMMITTED

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus. Paged; the result equals the log's content when the last page was read."""
        check_scan(key, limit)
        entries: list[VersionedData] = []
        while len(entries) < limit:
            wanted = entries[-1].seqno + 1 if entries else from_seqno
            page_size = min(PAGE_ENTRIES_MAX, limit - len(entries))
            answer = self._run(_SCAN, key, int(wanted), page_size, PAGE_BYTES_MAX)
            if answer[0] == b"ABSENT":
                return []
            low, head = int(answer[1]), self._remember(key, answer[2])
            # Entries that were truncated between two pages are dropped here, so that the result has no gaps and no deleted entries.
            entries = [entry for entry in entries if entry.seqno >= low]
            first = max(wanted, low)
            entries += [VersionedData(SeqNo(first + index), data) for index, data in enumerate(answer[3])]
            if not answer[3]:
                break
            if entries[-1].seqno == head:
                self._remember(key, head, entries[-1].tip)
                break
        return entries

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus. Scripts cannot compute the hash of a tag. So this client fetches the known entry, and the script truncates only
        if that entry is unchanged.
        """
        check_truncate(key, before, known)
        answer = self._run(_TRUNCATE, key, int(before), int(known.seqno), "")
        if answer[0] == b"ENTRY":
            if VersionedData(known.seqno, answer[1]).tip != known:
                return None
            sha1 = hashlib.sha1(answer[1], usedforsecurity=False).hexdigest()
            answer = self._run(_TRUNCATE, key, int(before), int(known.seqno), sha1)
        return int(answer[1]) if answer[0] == b"OK" else None

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_replace(key, expected, new)
        answer = self._run(_REPLACE, key, _tip_text(expected), int(new.seqno), new.data, _tip_text(new.tip))
        if answer[0] == b"MISMATCH":
            return CasResult.EXPECTATION_MISMATCH
        self._remember(key, new.seqno, new.tip)
        return CasResult.COMMITTED

    def list_keys(self) -> Iterator[str]:
        """See Consensus. Keys created during the listing may be missing; each key is returned once. Names that cannot be keys
        of a log belong to another application, and are skipped.
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
        """See Consensus. Connections in use by other threads are closed when their calls end. Closing them earlier would raise
        arbitrary driver errors in those calls.
        """
        self._closed = True
        self._pool.disconnect(inuse_connections=False)

    def ask(self, *command: str | bytes | int) -> Any:
        """Send one command and return its reply. Errors are mapped; their messages contain the command's name."""
        return self._exchange(str(command[0]), "", command)

    def _run(self, script: _Script, key: str, *args: str | bytes | int) -> list[Any]:
        """Runs a verb's script. Returns its reply if the log is sound; otherwise raises the error that describes the fault."""
        # Read the known head before the call: only a call that began after the head was known must find it.
        known, tag = self._known.get(key, (None, ""))
        names = (f"{self._prefix}{{{key}}}:m", f"{self._prefix}{{{key}}}:l")
        call = f"{self._caller}:{next(self._calls)}"
        tail = (2, *names, EPOCH, "" if known is None else f"{int(known)}{tag}", *args, call)
        try:
            answer = self._exchange(script.verb, key, ("EVALSHA", script.sha1, *tail), call=call)
        except _UnknownScript:
            answer = self._exchange(script.verb, key, ("EVAL", script.source, *tail), call=call)
        where = f"{script.verb} {key} at {self._address}"
        match answer[0]:
            case b"CORRUPT":
                head, low, count = answer[1].decode(), answer[2].decode(), answer[3]
                raise CorruptData(f"{where}: head {head} and lowest {low} do not match {count} entries", key=key)
            case b"LOST":
                raise ForkedLog(
                    f"{where}: redis lost acknowledged entries: the head was {known}, it is now {answer[1].decode()}; "
                    "restore its data, or restart this process to accept the loss",
                    key=key,
                )
            case b"OTHER":
                raise ForkedLog(
                    f"{where}: redis lost acknowledged entries: entry {answer[1].decode()} is not the one it was, the log "
                    "was wiped or rolled back and written anew; restore its data, or restart this process to accept the loss",
                    key=key,
                )
            case b"EPOCH":
                raise Fenced(f"{where}: the log's epoch is {answer[1].decode()}, this process uses {EPOCH}", key=key)
        return cast("list[Any]", answer)

    def _exchange(self, verb: str, key: str, command: tuple[str | bytes | int, ...], *, call: str | None = None) -> Any:
        """Send one command and return its reply, without retries. Errors are Determinate until the first byte may have been
        sent, then Indeterminate. So is a reply that does not end with the name `call`.
        """
        where = f"{verb} {key}".rstrip() + f" at {self._address}"
        if self._closed:
            # This is not a store error, because retry loops would repeat it without end.
            raise InvalidUsage(f"{where}: the store was closed")
        try:
            connection = self._pool.get_connection()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        except (redis.RedisError, OSError, UnicodeError) as error:
            # UnicodeError comes from a host that cannot be looked up, or a password file that is not text.
            raise Determinate(f"{where}: {error}", key=key) from error
        answered = False
        try:
            connection.send_command(*command)
            reply = connection.read_response()
            if call is not None and not (isinstance(reply, list) and reply and reply[-1] == call.encode()):
                raise redis.exceptions.InvalidResponse("the answer is that of another call")
            answered = True
        except redis.exceptions.NoScriptError as error:
            answered = True
            raise _UnknownScript from error
        except (redis.RedisError, OSError, AttributeError) as error:
            # AttributeError occurs if another thread closes the store: the driver may then drop the buffers of this call.
            answered = isinstance(error, redis.ResponseError)
            raise _mapped(where, key, error) from error
        else:
            return reply
        finally:
            if not answered or self._closed:
                connection.disconnect()  # the next command must not receive a late reply
            self._pool.release(connection)  # type: ignore[no-untyped-call]  # unannotated in redis-py

    def _remember(self, key: str, head: SeqNo | bytes, tip: Tip | None = None) -> SeqNo:
        seqno = SeqNo(int(head))
        tag = "" if tip is None else f":{tip.tag.hex()}"
        with self._known_lock:
            if (seqno, tag) > self._known.get(key, (-1, "")):
                self._known[key] = seqno, tag
        return seqno


def _tip_text(tip: Tip) -> str:
    """Return a tip in the form that scripts receive and store."""
    return f"{int(tip.seqno)}:{tip.tag.hex()}"


class _UnknownScript(Exception):
    """Redis does not have the script, because it was restarted. Nothing ran."""


class _Script:
    """The script of one verb: the shared prelude, and the verb's own file as a function. The last argument is the name of the call. It
    becomes the last element of the reply, unless that is an error.
    """

    def __init__(self, verb: str) -> None:
        folder = resources.files("persist_engine.storage.redis").joinpath("lua")
        self.verb = verb
        body = "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in ("prelude", verb))
        self.source = (
            f"local function verb()\n{body}\nend\n"
            "local reply = verb()\nif not reply.err then\n  reply[#reply + 1] = ARGV[#ARGV]\nend\nreturn reply\n"
        )
        self.sha1 = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


_HEAD = _Script("head")
_COMPARE_AND_SET = _Script("compare_and_set")
_SCAN = _Script("scan")
_TRUNCATE = _Script("truncate")
_REPLACE = _Script("replace")


def redis_pool(at: RedisAddress, *, watch: RunWatch | None = None) -> redis.BlockingConnectionPool:
    """Return a pool of connections to the address, opened on demand. `watch` checks each before its first use."""
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
    options |= access(at)
    if at.tls:
        options["redis_connect_func"] = _greeted
    if watch is not None:
        options["redis_connect_func"] = partial(_watched, watch, at.shown)
    options |= {"max_connections": CONNECTIONS_MAX, "timeout": CONNECTION_WAIT_S}
    return redis.BlockingConnectionPool(**options)  # type: ignore[no-untyped-call]  # unannotated in redis-py


def _greeted(connection: redis.Connection) -> None:
    """Greets like redis-py, and then makes one exchange. With TLS 1.3, a server's first bytes are session tickets, which are read
    only with the first reply. Until then, the driver takes them for a late reply and considers the connection unusable.
    """
    connection.on_connect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
    connection.send_command("PING", check_health=False)  # type: ignore[no-untyped-call]  # unannotated in redis-py
    with contextlib.suppress(redis.ResponseError):  # a refused PING is an answer, too
        connection.read_response()


def _watched(watch: RunWatch, address: str, connection: redis.Connection) -> None:
    """Greets like redis-py, then identifies the server process. That is an exchange, too: see _greeted."""

    def ask(*command: str) -> Any:
        try:
            connection.send_command(*command, check_health=False)  # type: ignore[no-untyped-call]  # unannotated in redis-py
            return connection.read_response()
        except (redis.RedisError, OSError) as error:
            # Any error is Determinate, because the command that needs the connection was not sent yet.
            raise Determinate(f"{command[0]} at {address}: {error}") from error

    try:
        connection.on_connect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        watch.meet(ask)
    except BaseException:
        # Otherwise the pool would reuse the connection as if it had been checked.
        connection.disconnect()  # type: ignore[no-untyped-call]  # unannotated in redis-py
        raise


def _mapped(where: str, key: str, error: Exception) -> PersistError:
    text = f"{where}: {error}"
    if isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE"):
        return CorruptData(f"{where}: the key holds another application's data", key=key)
    if isinstance(error, redis.exceptions.AskError):  # MOVED too
        return UnsafeStore(f"{where}: redis {CLUSTER_NODE}", key=key)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Determinate(f"{text} {_FULL}", key=key)
    if _is_forbidden(error):
        # In a script, commands before the refused one may have had their effect.
        is_direct = isinstance(error, redis.exceptions.NoPermissionError)
        return (Determinate if is_direct else Indeterminate)(f"{text} ({_GRANT})", key=key)
    if isinstance(error, _REFUSAL_CLASSES) or str(error).startswith(_REFUSALS):
        return Determinate(text, key=key)
    return Indeterminate(text, key=key)


def _is_forbidden(cause: BaseException | None) -> bool:
    """Whether an ACL refused the command, or a command in a script."""
    return isinstance(cause, redis.exceptions.NoPermissionError) or str(cause).startswith(_REFUSED_IN_SCRIPT)


def _is_refusal(cause: BaseException | None) -> bool:
    """Whether the URL, or a file that it names, is wrong, so that a retry would not help."""
    if _is_forbidden(cause):
        return True
    match cause:
        case redis.exceptions.AuthenticationError():
            return True
        case redis.exceptions.InvalidResponse():  # the answering server is not Redis
            return True
        case FileNotFoundError() | PermissionError() | IsADirectoryError() | NotADirectoryError() | UnicodeError():
            return True  # an unreadable password file, as the driver wraps it, or an invalid host name
    return str(cause).startswith(_REFUSED_WORDS) or is_untrusted(cause)


def _remedy(cause: BaseException | None) -> str:
    """What a person must do about a refusal; empty if the error's own text says it."""
    if _is_forbidden(cause):
        return ""
    match cause:
        case redis.exceptions.InvalidResponse():
            return "no Redis answers there: correct host and port"
        case FileNotFoundError() | PermissionError() | IsADirectoryError() | NotADirectoryError():
            return "correct the path of the password's file, or mount it"
        case UnicodeDecodeError():
            return "write the password as UTF-8 text into its file"
        case UnicodeError():
            return "correct the host name"
    if is_untrusted(cause):
        return TRUST
    if "DB index" in str(cause):
        return "correct the number of the database, or raise `databases` of the Redis server"
    return "give the location the user and password of the Redis server, as in redis://user@host/0?password_file=..."


def _glob_escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]^\\" else char for char in text)
