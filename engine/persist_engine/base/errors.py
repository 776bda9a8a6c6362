"""The error tree, ordered by what the caller can do about each failure.

Expected outcomes (a lost race, a since that advanced) are values and are never raised. The exceptions are:

    PersistError
    |- InvalidUsage        fix the call; nothing was done
    |- StorageError        a driver failed
    |  |- Determinate      the operation certainly did not happen: retry freely (except NotKept: no copy of the object exists)
    |  |- Indeterminate    the operation may have happened: retry only if it is idempotent, or with the same token
    |- Unavailable         the store kept failing until a limit of time or attempts was reached; the data may well be intact
    |  |- StoreRefused     the store or the network rejects the location: fix the address or the credentials
    |- Conflict            another process wrote first: read what it wrote, then decide again
    |- Fenced              the lease expired or a newer owner took over: reopen the handle
    |- Incompatible        newer code wrote the durable bytes: upgrade this binary
    |- CorruptData         durable bytes do not decode or fail their checksum; the error names the key
    |  |- ForkedLog        a shard's log is not the log this process knew: consensus lost versions
    |- SinkFailed          a worker of a running sink ended; its cause is chained
    |- InvariantViolated   durable bytes or a transition break a rule: stop and alert an operator

Messages are lower case, end without a period, and name the object and its id. A message never contains credentials.
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
    CONFLICT = "Conflict"


class PersistError(Exception):
    """Base class of every error that this package raises on purpose.

    `kind` is stable and machine-readable. `detail` holds the named values of the message (frontiers, keys, ids).
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


class NoStore(InvalidUsage):
    """There is no store at this path of this machine yet. Nothing was created."""


class InvalidBounds(InvalidUsage):
    """`upper` is before `lower`."""

    kind = ErrorKind.INVALID_BOUNDS


class InvalidEmptyTimeInterval(InvalidUsage):
    """There are updates for the empty interval [t, t). `detail`: lower, upper, parts (keys of the parts already staged)."""

    kind = ErrorKind.INVALID_EMPTY_TIME_INTERVAL


class InvalidBatchBounds(InvalidUsage):
    """The bounds of a batch do not cover the bounds of the append."""

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
    """The requested codecs differ from the codecs of the shard, or this release has no such codecs. `detail`: requested, actual."""

    kind = ErrorKind.CODEC_MISMATCH


class SchemaMismatch(InvalidUsage):
    """The requested schema, or the schema of the given data, differs from the shard's. `detail`: requested, actual."""

    kind = ErrorKind.SCHEMA_MISMATCH


class FinalizationError(InvalidUsage):
    """Finalizing needs an empty since and an empty upper. `detail`: since, upper, and the obstacles if known."""

    kind = ErrorKind.FINALIZATION_ERROR


class ShardNotFound(InvalidUsage):
    """This consensus store has no such shard. `detail`: shard_id."""

    kind = ErrorKind.SHARD_NOT_FOUND


class UnsafeStore(InvalidUsage):
    """A store lacks a required guarantee (conditional writes, durability). The message names it and says what to change."""

    kind = ErrorKind.UNSAFE_STORE


class StoreLost(InvalidUsage):
    """One store of a pair knows the pair and the other does not: its data is gone, or its address belongs to another store.
    Nothing was written. `detail`: store_id, blob, consensus (addresses).
    """

    kind = ErrorKind.STORE_LOST


class StoreMismatch(InvalidUsage):
    """The blob store and the consensus store belong to two different pairs. Nothing was written. `detail`: those of
    StoreLost, where store_id is the id in consensus, and blob_store_id.
    """

    kind = ErrorKind.STORE_MISMATCH


class StorageError(PersistError):
    """A driver failed. Only storage adapters raise it, always chained to the driver's error."""

    kind = ErrorKind.STORAGE


class Determinate(StorageError):
    """The operation certainly did not happen."""


class NotKept(Determinate):
    """A deleted object cannot be restored: the store keeps no copy. A retry has the same result."""


class Indeterminate(StorageError):
    """The operation may have happened. Adapters map every unknown driver error to this."""


class Unavailable(PersistError):
    """The store kept failing until the caller's deadline. Acknowledged commits stand; the last cause is chained."""

    kind = ErrorKind.UNAVAILABLE


class StoreRefused(Unavailable):
    """A store did not open: the password, user, database, bucket, endpoint or path is wrong. The message quotes the store or
    the network. Nothing was done and nothing was retried. A fix outside this process, for example an updated mounted secret,
    can help.
    """

    kind = ErrorKind.STORE_REFUSED


class Fenced(PersistError):
    """This handle lost its right: its lease expired or a newer opaque took over. Open a new handle."""

    kind = ErrorKind.FENCED


class Conflict(PersistError):
    """A write was made for contents that another process has replaced since, or other writers won every attempt. Nothing was written: read
    the contents, then decide again. `detail`: expected and current (times).
    """

    kind = ErrorKind.CONFLICT


class SinkFailed(PersistError):
    """A component of a running sink, named in the message, failed with the chained cause. Appended data stands; open a new sink."""

    kind = ErrorKind.SINK_FAILED


class Incompatible(PersistError):
    """Durable bytes come from newer code, or are in a format that this code does not read. Nothing was changed."""

    kind = ErrorKind.INCOMPATIBLE


class CorruptData(PersistError):
    """Durable bytes are damaged. `detail['key']` names them. Nothing was guessed and nothing was deleted."""

    kind = ErrorKind.CORRUPT


class MissingBlob(CorruptData):
    """A blob that a live state references does not exist. `detail['key']` names it."""

    kind = ErrorKind.MISSING_BLOB


class ForkedLog(CorruptData):
    """A shard's log is not the log this process knew, or its entries do not follow one another: consensus was rolled back,
    wiped or split, and acknowledged versions may be lost. A retry does not help. The client's handles of this shard stop
    working: they read, write and delete nothing based on what they knew. `detail`: key, shard_id, seqno.
    """

    kind = ErrorKind.FORKED_LOG


class InvariantViolated(PersistError):
    """A rule of the data model does not hold. Continuing could lose data."""

    kind = ErrorKind.INVARIANT


class ShardLost(InvariantViolated):
    """Blobs of a shard exist, but consensus has no log of it. The shard is not created again over them; run
    `persist admin recover` to rebuild the log. `detail`: shard_id, key (the first blob found).
    """

    kind = ErrorKind.SHARD_LOST


class AmbiguousAppend(InvariantViolated):
    """An append may or may not have happened, and its outcome can no longer be determined: the attempt ended indeterminate, and
    since then the writer's lease lapsed or the writer was removed. Check the data before you append it again. Do not delete its
    blobs.
    """


def check(condition: bool, message: str, **detail: Any) -> None:  # noqa: FBT001 - reads as the assertion it is
    """Raise InvariantViolated unless `condition`. Guards durable bytes and transitions; `python -O` does not strip it."""
    if not condition:
        raise InvariantViolated(message, **detail)
