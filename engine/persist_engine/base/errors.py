"""The whole error tree: what went wrong, told by what the caller can do about it.

Expected outcomes (a lost race, a since that moved on) are values, never raised. What is raised is one of:

    PersistError
    |- InvalidUsage        fix the call; nothing was done
    |- StorageError        a driver failed
    |  |- Determinate      it certainly did not happen: retry freely (but for NotKept: a deleted object has no copy)
    |  |- Indeterminate    it may have happened: retry only what is idempotent, or with the same token
    |- Unavailable         a limit of time or attempts ran out while the store failed; nothing is known to be wrong with the data
    |  |- StoreRefused     the store, or its network, says that what the location says is wrong
    |- Fenced              reopen the handle: its lease ran out, or a newer owner was seen
    |- Incompatible        the durable bytes were written by newer code: upgrade this binary
    |- CorruptData         durable bytes do not decode or do not match their checksum; names the key
    |  |- ForkedLog        a shard's log is not the one that was known: consensus lost versions
    |- SinkFailed          a worker of a running sink ended; its cause is chained
    |- InvariantViolated   durable bytes or a transition break a rule: stop and page someone

Texts are lower case, without a period, and name the thing and its id. Credentials never stand in a text.
"""

from __future__ import annotations

import enum
from typing import Any


class ErrorKind(enum.StrEnum):
    """Machine-readable codes. Append-only: a code is never renamed or reused."""

    INVALID_BOUNDS = "InvalidBounds"
    INVALID_EMPTY_TIME_INTERVAL = "InvalidEmptyTimeInterval"
    INVALID_BATCH_BOUNDS = "InvalidBatchBounds"
    UPDATE_NOT_BEYOND_LOWER = "UpdateNotBeyondLower"
    UPDATE_BEYOND_UPPER = "UpdateBeyondUpper"
    BATCH_NOT_FROM_THIS_SHARD = "BatchNotFromThisShard"
    INVALID_REWRITE = "InvalidRewrite"
    BATCH_EXPIRED = "BatchExpired"
    CODEC_MISMATCH = "CodecMismatch"
    SCHEMA_MISMATCH = "SchemaMismatch"
    FINALIZATION_ERROR = "FinalizationError"
    INVALID_ARGUMENT = "InvalidArgument"
    SHARD_NOT_FOUND = "ShardNotFound"
    UNSAFE_STORE = "UnsafeStore"
    STORE_LOST = "StoreLost"
    STORE_MISMATCH = "StoreMismatch"
    STORAGE = "Storage"
    UNAVAILABLE = "Unavailable"
    FENCED = "Fenced"
    SINK_FAILED = "SinkFailed"
    STORE_REFUSED = "StoreRefused"
    INCOMPATIBLE = "Incompatible"
    CORRUPT = "Corrupt"
    MISSING_BLOB = "MissingBlob"
    FORKED_LOG = "ForkedLog"
    INVARIANT = "Invariant"
    SHARD_LOST = "ShardLost"


class PersistError(Exception):
    """Root of everything this package raises on purpose.

    `kind` is stable and machine-readable; `detail` holds the named values of the text (frontiers, keys, ids).
    """

    kind: ErrorKind = ErrorKind.INVARIANT

    def __init__(self, message: str, *, kind: ErrorKind | None = None, **detail: Any) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind
        self.detail: dict[str, Any] = detail


class InvalidUsage(PersistError, ValueError):
    """The caller broke the contract. Deterministic; nothing was committed."""

    kind = ErrorKind.INVALID_ARGUMENT


class InvalidBounds(InvalidUsage):
    """`upper` is before `lower`."""

    kind = ErrorKind.INVALID_BOUNDS


class InvalidEmptyTimeInterval(InvalidUsage):
    """Updates were handed over for an empty interval [t, t). `detail`: lower, upper, parts (keys of those staged)."""

    kind = ErrorKind.INVALID_EMPTY_TIME_INTERVAL


class InvalidBatchBounds(InvalidUsage):
    """The bounds of a batch do not cover the bounds it is appended with."""

    kind = ErrorKind.INVALID_BATCH_BOUNDS


class UpdateNotBeyondLower(InvalidUsage):
    """An update's time is before the batch's lower."""

    kind = ErrorKind.UPDATE_NOT_BEYOND_LOWER


class UpdateBeyondUpper(InvalidUsage):
    """An update's time is not before the batch's upper."""

    kind = ErrorKind.UPDATE_BEYOND_UPPER


class BatchNotFromThisShard(InvalidUsage):
    """A batch was built for another shard."""

    kind = ErrorKind.BATCH_NOT_FROM_THIS_SHARD


class InvalidRewrite(InvalidUsage):
    """A timestamp rewrite does not fit the batch or its registered bounds."""

    kind = ErrorKind.INVALID_REWRITE


class BatchExpired(InvalidUsage):
    """The batch was staged so long ago that the orphan scan may have deleted its blobs: stage it again. Nothing was
    committed. `detail`: key, staged_ms, floor_ms.
    """

    kind = ErrorKind.BATCH_EXPIRED


class CodecMismatch(InvalidUsage):
    """The codecs asked for are not those the shard was made with. `detail`: requested, actual."""

    kind = ErrorKind.CODEC_MISMATCH


class SchemaMismatch(InvalidUsage):
    """The schema asked for, or the data given, is not the shard's. `detail`: requested, actual."""

    kind = ErrorKind.SCHEMA_MISMATCH


class FinalizationError(InvalidUsage):
    """A shard can be finalized only when since and upper are empty. `detail`: since, upper, and obstacles where known."""

    kind = ErrorKind.FINALIZATION_ERROR


class ShardNotFound(InvalidUsage):
    """No such shard in this consensus; `detail`: shard_id."""

    kind = ErrorKind.SHARD_NOT_FOUND


class UnsafeStore(InvalidUsage):
    """A store does not give the guarantees it must (conditional writes, durability). The text says which and what to change."""

    kind = ErrorKind.UNSAFE_STORE


class StoreLost(InvalidUsage):
    """One store of a pair does not know the pair, and the other does: its data is gone, or its address is another store's.
    Nothing was written. `detail`: store_id, blob, consensus (addresses).
    """

    kind = ErrorKind.STORE_LOST


class StoreMismatch(InvalidUsage):
    """The blob store and the consensus store belong to two different pairs. Nothing was written. `detail`: as of StoreLost,
    store_id that consensus tells, blob_store_id.
    """

    kind = ErrorKind.STORE_MISMATCH


class StorageError(PersistError):
    """A driver failed. Raised by storage adapters only, always chained to the driver's error."""

    kind = ErrorKind.STORAGE


class Determinate(StorageError):
    """The operation certainly did not happen."""


class NotKept(Determinate):
    """A deleted object cannot be restored: the store keeps no copy. Another attempt would find the same."""


class Indeterminate(StorageError):
    """The operation may have happened. The safe guess for every unknown driver error."""


class Unavailable(PersistError):
    """The store kept failing until the caller's deadline. What was acknowledged before stands; the last cause is chained."""

    kind = ErrorKind.UNAVAILABLE


class StoreRefused(Unavailable):
    """A store was not opened: its password, user, database, bucket, endpoint or path is wrong, in the words of who says so. Nothing was
    done, and no further attempt was made; what is wrong may be put right beside this process, as in a mounted secret.
    """

    kind = ErrorKind.STORE_REFUSED


class Fenced(PersistError):
    """This handle lost its right: the lease expired or a newer opaque was seen. Open a new handle."""

    kind = ErrorKind.FENCED


class SinkFailed(PersistError):
    """A part of a running sink, named in the text, ended by the chained cause. What was appended stands; open a new sink."""

    kind = ErrorKind.SINK_FAILED


class Incompatible(PersistError):
    """Durable bytes come from newer code, or are in a format that this code does not read. Nothing was changed."""

    kind = ErrorKind.INCOMPATIBLE


class CorruptData(PersistError):
    """Durable bytes are damaged. `detail['key']` names them; nothing was guessed and nothing was deleted."""

    kind = ErrorKind.CORRUPT


class MissingBlob(CorruptData):
    """A blob that a live state names does not exist. `detail['key']` names it."""

    kind = ErrorKind.MISSING_BLOB


class ForkedLog(CorruptData):
    """A shard's log is not the one that was known, or its entries do not follow one another: consensus was rolled back,
    wiped or split, and acknowledged versions may be lost. No retry helps. Handles of the shard are of no more use in this
    client: they read, write and delete nothing from what they know. `detail`: key, shard_id, seqno.
    """

    kind = ErrorKind.FORKED_LOG


class InvariantViolated(PersistError):
    """A rule of the data model does not hold. Continuing could lose data."""

    kind = ErrorKind.INVARIANT


class ShardLost(InvariantViolated):
    """Consensus has no log of a shard whose blobs are there. Nothing is created over them: `persist admin recover` makes the
    log anew. `detail`: shard_id, key (the first blob found).
    """

    kind = ErrorKind.SHARD_LOST


class AmbiguousAppend(InvariantViolated):
    """An append may or may not have happened, and nothing tells any more: its outcome was unknown and its writer's lease
    lapsed, or somebody removed the writer. Look at the data before appending it again; leave its blobs alone.
    """


def check(condition: bool, message: str, **detail: Any) -> None:  # noqa: FBT001 - reads as the assertion it is
    """Guard durable bytes and transitions: raises InvariantViolated unless `condition`. Not stripped by -O."""
    if not condition:
        raise InvariantViolated(message, **detail)
