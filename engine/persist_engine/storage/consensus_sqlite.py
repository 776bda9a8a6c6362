"""Consensus in one SQLite file, for one machine and any number of processes. Survives kill -9 and power loss.

The file has a write-ahead log with synchronous=FULL, so an acknowledged commit is on disk. Writers take the write lock first (BEGIN
IMMEDIATE), so they change exactly what they read. Readers never wait for writers.

A file that is deleted or replaced while it is open would continue to accept commits that no other process sees. So would its
write-ahead log. SQLite itself deletes this log when another process ends, after this process has lost its locks because it read the file
by other means. Every call therefore checks that the connection's files are still the files at their paths. After a deletion, calls raise
CorruptData until the file is put back. After a replacement, the new file counts, and a process that knew more than this file holds notices
that by its seqnos.

In a forked child, SQLite assumes what was true in the parent: which locks the process holds, and which files it has open. A connection that
was open at the fork, or even a new one beside it, could then acknowledge commits to a log that the parent has deleted. So no connection is
open during a fork (`_Forks`), and parent and child open their own.

This adapter is not for network file systems, where SQLite's locks do not work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from persist_engine.base.errors import (
    CorruptData,
    Determinate,
    Indeterminate,
    InvalidUsage,
    NoStore,
    PersistError,
    StorageError,
    StoreRefused,
    UnsafeStore,
)
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.checks import check_append, check_log_key, check_replace, check_scan, check_truncate
from persist_engine.storage.directories import is_full, make_directory, not_opened

#: How long a call waits for another process's commit. Commits take milliseconds; a longer wait means a stuck process.
BUSY_TIMEOUT_S = 10.0

#: How long a fork waits for calls of other threads. They end within BUSY_TIMEOUT_S, unless a disk hangs.
FORK_WAIT_S = 2 * BUSY_TIMEOUT_S

#: After this many commits, a process extends the write-ahead log's file once, for all commits up to SQLite's next checkpoint. A
#: commit that extends the file itself also waits for the file system's journal, which takes several times as long as overwriting.
LENGTHEN_EVERY = 16
#: SQLite makes a checkpoint when the log has this many pages (its own default), and the next commit starts at the front again.
_CHECKPOINT_PAGES = 1_000
_PAGE_BYTES = 4096
LOG_BYTES = _CHECKPOINT_PAGES * _PAGE_BYTES

_SCHEMA = """
CREATE TABLE IF NOT EXISTS consensus (
    shard TEXT NOT NULL,
    sequence_number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (shard, sequence_number)
)
"""
_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'consensus'"
_COLUMNS = "SELECT shard, sequence_number, data FROM consensus LIMIT 0"
_HEAD = "SELECT sequence_number, data FROM consensus WHERE shard = ? ORDER BY sequence_number DESC LIMIT 1"
_INSERT = "INSERT INTO consensus (shard, sequence_number, data) VALUES (?, ?, ?)"
_FILLER = "INSERT INTO consensus (shard, sequence_number, data) VALUES ('', 0, zeroblob(?))"
_SCAN = (
    "SELECT sequence_number, data FROM consensus WHERE shard = ? AND sequence_number >= ? "
    "ORDER BY sequence_number LIMIT ?"
)
_TRUNCATE = "DELETE FROM consensus WHERE shard = ? AND sequence_number < ?"
_KEYS = "SELECT DISTINCT shard FROM consensus"
#: The error codes of a full disk. The second one is for the files that SQLite keeps beside the log.
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
#: The error codes of a file or a folder that the process may not write. A file that was moved away has another code.
_READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_READONLY_DIRECTORY)
_ALL_WRITE = "every process, even one that only reads, writes its lease into the file, and other files beside it"


#: Identifies a file regardless of its name: device and inode.
_Identity = tuple[int, int]


@dataclass(slots=True)
class _Idle:
    """An unused connection, and the files that it has open."""

    connection: sqlite3.Connection
    identity: _Identity
    log: _Identity | None = None
    """The write-ahead log; None before the first call. SQLite deletes it with the last connection, so not while this one is open."""


class _Forks:
    """Keeps a fork and all calls of this process apart, and closes the connections that no call uses. Calls enter it as a context."""

    def __init__(self) -> None:
        self._stores: weakref.WeakSet[SqliteConsensus] = weakref.WeakSet()
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._one = threading.Lock()  # if two threads fork at once, one waits
        self._calls = 0
        self._is_forking = False

    def watch(self, store: SqliteConsensus) -> None:
        """Closes the idle connections of `store` before each fork from now on."""
        with self._changed:
            self._stores.add(store)

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_forking)
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def before(self) -> None:
        """Waits for the calls under way, at most FORK_WAIT_S, and lets none begin."""
        self._one.acquire()
        with self._changed:
            self._is_forking = True
            self._changed.wait_for(lambda: not self._calls, FORK_WAIT_S)
        for store in list(self._stores):
            store.close_idle()

    def after_in_parent(self) -> None:
        """Lets calls begin again."""
        with self._changed:
            self._is_forking = False
            self._changed.notify_all()
        self._one.release()

    def after_in_child(self) -> None:
        """Lets calls begin again, with new locks, because threads of the parent may have held the old ones."""
        self._begin()
        for store in list(self._stores):
            store.begin_locks()


class SqliteConsensus:
    """Opens the file at `path`. Thread-safe: each call borrows its own connection. Creates a missing file or table; without
    `create`, raises NoStore instead. Raises StoreRefused for an impossible path. A call waits up to `busy_timeout_s` for the
    commit of another process.
    """

    def __init__(self, path: Path, *, create: bool = True, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._idle: list[_Idle] = []
        self.begin_locks()
        self._closed = False
        self._commits = 0
        _FORKS.watch(self)
        if create:
            try:
                make_directory(path.parent)
                _check_no_directory(path)
                path.touch()  # the first sync of the write-ahead log covers the directory, and so makes the file durable
            except OSError as error:
                raise not_opened(self.address(), error) from error
        else:
            self._check_exists()
        with self._borrow("open") as connection:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise UnsafeStore(f"{self.address()}: no write-ahead log here ({mode}); use a local file system")
        with self._write("open") as connection:
            connection.execute(_SCHEMA)
            connection.execute(_COLUMNS)

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        check_log_key(key)
        with self._borrow("head", key) as connection:
            row = connection.execute(_HEAD, (key,)).fetchone()
            return None if row is None else self._entry(key, row)

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_append(key, expected, new)
        with self._write("compare_and_set", key) as connection:
            latest = connection.execute(_HEAD, (key,)).fetchone()
            if (None if latest is None else self._entry(key, latest).tip) != expected:
                return CasResult.EXPECTATION_MISMATCH
            connection.execute(_INSERT, (key, int(new.seqno), new.data))
        self._commits += 1  # a lost increment is harmless
        if self._commits % LENGTHEN_EVERY == 0:
            self._lengthen_log()
        return CasResult.COMMITTED

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        check_scan(key, limit)
        with self._borrow("scan", key) as connection:
            rows = connection.execute(_SCAN, (key, int(from_seqno), limit)).fetchall()
            return [self._entry(key, row) for row in rows]

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        check_truncate(key, before, known)
        with self._write("truncate", key) as connection:
            found = connection.execute(_SCAN, (key, int(known.seqno), 1)).fetchone()
            if found is None or (found[0] == known.seqno and self._entry(key, found).tip != known):
                return None
            return connection.execute(_TRUNCATE, (key, int(before))).rowcount

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_replace(key, expected, new)
        with self._write("replace", key) as connection:
            latest = connection.execute(_HEAD, (key,)).fetchone()
            if latest is None or self._entry(key, latest).tip != expected:
                return CasResult.EXPECTATION_MISMATCH
            connection.execute(_TRUNCATE, (key, int(new.seqno)))
            connection.execute(_INSERT, (key, int(new.seqno), new.data))
            return CasResult.COMMITTED

    def list_keys(self) -> Iterator[str]:
        """See Consensus. The listing is a snapshot of one moment."""
        with self._borrow("list_keys") as connection:
            rows = connection.execute(_KEYS).fetchall()
        return iter([key for (key,) in rows])

    def address(self) -> str:
        """See Consensus."""
        return f"sqlite://{self._path}"

    def _entry(self, key: str, row: tuple[int, bytes]) -> VersionedData:
        """An entry as it is stored. Raises CorruptData for values of other types, which SQLite accepts in any column."""
        seqno, data = row
        if type(seqno) is not int or type(data) is not bytes:
            kinds = f"{type(seqno).__name__} and {type(data).__name__}"
            raise CorruptData(f"{key} at {self.address()}: an entry is {kinds}, not a number and bytes", key=key)
        return VersionedData(SeqNo(seqno), data)

    def close(self) -> None:
        """See Consensus. Connections in use by other threads are closed when their calls end."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that no call uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.connection.close()

    def begin_locks(self) -> None:
        """Creates the locks, for a new store and in a forked process."""
        self._lock = threading.Lock()
        # Threads of this process wait here instead of polling SQLite's lock. So only processes contend for that one.
        self._write_lock = threading.Lock()

    def _check_exists(self) -> None:
        """Raises NoStore if no log was ever started here, and StoreRefused or Determinate if that cannot be determined. Changes
        nothing, because the file may belong to something else.
        """
        try:
            _check_no_directory(self._path)
            is_begun = self._path.stat().st_size > 0
        except FileNotFoundError:
            is_begun = False
        except OSError as error:
            raise not_opened(self.address(), error) from error
        if is_begun:
            # SQLite reports a file that may not be read as unavailable, and it opens a file that may not be written.
            if not os.access(self._path, os.R_OK | os.W_OK):
                raise StoreRefused(
                    f"open {self.address()}: Permission denied; give this user the right to read and write the file: {_ALL_WRITE}"
                )
            with self._borrow("open") as connection:
                is_begun = connection.execute(_TABLE).fetchone() is not None
                if is_begun:
                    connection.execute(_COLUMNS)
        if not is_begun:
            what = "holds no shards" if self._path.exists() else "is not there"
            raise NoStore(f"{self.address()} {what}: check the path; creating a table or shard there makes it")

    @contextmanager
    def _borrow(self, verb: str, key: str = "") -> Iterator[sqlite3.Connection]:
        """Lend a connection in autocommit mode. Errors are mapped as for a call that changed nothing, up to the end of the
        block; after that the outcome is uncertain.
        """
        with _FORKS, self._lent(verb, key) as connection:
            yield connection

    @contextmanager
    def _lent(self, verb: str, key: str) -> Iterator[sqlite3.Connection]:
        try:
            taken = self._take(verb, key)
        except sqlite3.Error as error:
            raise self._mapped(verb, key, error, Determinate) from error
        connection = taken.connection
        try:
            yield connection
            self._check_in_place(taken, verb, key)
        except sqlite3.Error as error:
            connection.close()
            raise self._mapped(verb, key, error, Determinate) from error
        except InvalidUsage:
            self._give_back(taken)
            raise
        except BaseException:
            connection.close()  # its state is unknown
            raise
        else:
            self._give_back(taken)

    @contextmanager
    def _write(self, verb: str, key: str = "") -> Iterator[sqlite3.Connection]:
        """Lend a write transaction, which any error rolls back. Only a failed COMMIT is Indeterminate."""
        with self._write_lock, self._borrow(verb, key) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:  # some errors have already rolled back
                    connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._mapped(verb, key, error, Indeterminate) from error

    def _lengthen_log(self) -> None:
        """Extends the log's file: see LENGTHEN_EVERY. SQLite writes what does not fit into its cache to the log before the
        transaction ends. This transaction writes more than that and is then rolled back. It leaves a longer file without valid
        frames and does not wait for the disk. Does nothing if the log is long enough, another process is writing, or an error
        occurs.
        """
        with contextlib.suppress(sqlite3.Error, OSError):
            if Path(f"{self._path}-wal").stat().st_size >= LOG_BYTES:
                return
            with _FORKS, contextlib.closing(self._connect(timeout_s=0)) as connection:
                connection.execute("PRAGMA cache_size=16")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_FILLER, (LOG_BYTES,))
                connection.execute("ROLLBACK")

    def _take(self, verb: str, key: str) -> _Idle:
        """Return a connection to the file that is now at the path."""
        with self._lock:
            if self._closed:
                # This is not a store error, because retry loops would repeat it without end.
                raise InvalidUsage(f"{verb} {key}".rstrip() + f" at {self.address()}: the store was closed")
            identity = self._identity(verb, key, Determinate)
            while self._idle:
                idle = self._idle.pop()
                if idle.identity == identity and idle.log == self._log_identity():
                    return idle
                # If no process has opened the file since, this moves the contents of a deleted log into the file.
                idle.connection.close()
        connection = self._connect(timeout_s=self._busy_timeout_s)
        connection.execute("PRAGMA synchronous=FULL")
        return _Idle(connection, identity)

    def _connect(self, *, timeout_s: float) -> sqlite3.Connection:
        """Never creates the file: an empty log in place of a lost one would look like a shard that never existed."""
        return sqlite3.connect(
            f"file:{quote(os.fsencode(self._path))}?mode=rw",
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )

    def _give_back(self, taken: _Idle) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(taken)
                return
        taken.connection.close()

    def _identity(self, verb: str, key: str, kind: type[StorageError]) -> _Identity:
        """Return the identity of the file at the path; raise `kind` if that cannot be determined."""
        try:
            found = self._path.stat()
        except FileNotFoundError as error:
            raise self._lost(verb, key, "the file was deleted") from error
        except OSError as error:
            raise kind(f"{verb} {key}".rstrip() + f" at {self.address()}: {error.strerror}", key=key) from error
        return found.st_dev, found.st_ino

    def _log_identity(self) -> _Identity | None:
        """Return the identity of the write-ahead log at its path; None if there is none."""
        try:
            found = Path(f"{self._path}-wal").stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _check_in_place(self, taken: _Idle, verb: str, key: str) -> None:
        """Raise CorruptData unless the files that the finished call used are still at their paths: otherwise its commit is lost with them.
        Raise Indeterminate if that cannot be determined, because the commit was made.
        """
        if self._identity(verb, key, Indeterminate) != taken.identity:
            raise self._lost(verb, key, "the file was replaced meanwhile")
        log = self._log_identity()
        if taken.log not in {None, log}:
            raise self._lost(verb, key, f"{self._path.name}-wal was deleted or replaced meanwhile")
        taken.log = log

    def _lost(self, verb: str, key: str, what: str) -> CorruptData:
        text = (
            f"{verb} {key}".rstrip()
            + f" at {self.address()}: {what}; acknowledged versions are lost unless the file is put back"
        )
        return CorruptData(text, key=key or str(self._path))

    def _mapped(self, verb: str, key: str, error: sqlite3.Error, kind: type[StorageError]) -> PersistError:
        text = f"{verb} {key}".rstrip() + f" at {self.address()}: {error}"
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return CorruptData(text, key=key or str(self._path))
        if "no such table" in str(error):  # the table exists since open, so another file is here now
            return self._lost(verb, key, "the file was replaced by an empty one")
        if "no such column" in str(error):
            return StoreRefused(
                f"{text}: this is not a log of persist, but it has a table named consensus: choose another file"
            )
        if verb == "open" and getattr(error, "sqlite_errorcode", 0) in _READ_ONLY:
            return StoreRefused(f"{text}: {_ALL_WRITE}")
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM and is_full(self._path.parent):
            text += f": the disk of {self._path.parent} is full, make room on it"
        return kind(text, key=key)


def _check_no_directory(path: Path) -> None:
    """Rejects a directory here, because SQLite's own error for a directory looks like a transient failure."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


_FORKS = _Forks()
os.register_at_fork(before=_FORKS.before, after_in_parent=_FORKS.after_in_parent, after_in_child=_FORKS.after_in_child)
