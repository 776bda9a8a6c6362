"""Converts the notes of staged batches to bytes and back (docs/adr/0006-sinks.md, spec 10.12).

<shard>/n0000000/p<uuid>      what one write task of a run staged
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import check
from persist_engine.base.version import APPLIER_VERSION, check_readable
from persist_engine.codec.envelope import Kind, decoding, opened, sealed
from persist_engine.model.ids import ShardId
from persist_engine.pb import staging_note_pb2 as pb

JOB_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingNote:
    """What one write task of a run staged, so that another driver of the same run need not stage it again."""

    shard_id: ShardId
    sink_id: str
    run: bytes
    """The name of the run, as in its token."""
    job: bytes
    """The id of the task's job: JOB_BYTES random bytes. The tasks of a job have disjoint ranges of keys."""
    batch: bytes
    """The staged batch, transmittable."""
    rows: int
    """The number of the user's rows."""
    errors: int
    """The number of these rows that are errors."""
    least_time: int | None
    low: int
    """The sum of the lower 32 bits of the hashes of these rows, modulo 2^63. `high` is the same for the upper 32 bits."""
    high: int
    least: tuple[str, ...]
    """The least key of these rows, field by field, as text that SQL can cast to the field's type. `greatest` is the greatest key."""
    greatest: tuple[str, ...]
    version: str = APPLIER_VERSION
    """The version of the code that wrote the note."""


def encode_staging_note(note: StagingNote) -> bytes:
    """The note as a blob."""
    message = pb.StagingNote(
        shard_id=note.shard_id.to_bytes(),
        applier_version=note.version,
        sink_id=note.sink_id,
        run=note.run,
        job=note.job,
        batch=note.batch,
        rows=note.rows,
        errors=note.errors,
        least_time=note.least_time,
        low=note.low,
        high=note.high,
        least=note.least,
        greatest=note.greatest,
    )
    return sealed(Kind.STAGING_NOTE, message)


def decode_staging_note(data: bytes, *, key: str, shard_id: ShardId) -> StagingNote:
    """Inverse of `encode_staging_note`. Raises CorruptData (also for the note of another shard) or Incompatible (also for newer code) with
    `key`. Does not decode the batch in it: `WriteHandle.batch_from_transmittable` does.
    """
    message = opened(Kind.STAGING_NOTE, data, pb.StagingNote(), key)
    check_readable(message.applier_version, key)
    with decoding("the staging note", key):
        found = ShardId.from_bytes(message.shard_id)
        check(found == shard_id, f"it is of shard {found}")
        check(len(message.job) == JOB_BYTES, f"a job of {len(message.job)} bytes")
        check(
            bool(message.least) and len(message.least) == len(message.greatest),
            f"a least key of {len(message.least)} fields and a greatest one of {len(message.greatest)}",
        )
        return StagingNote(
            shard_id=found,
            sink_id=message.sink_id,
            run=message.run,
            job=message.job,
            batch=message.batch,
            rows=message.rows,
            errors=message.errors,
            least_time=message.least_time if message.HasField("least_time") else None,
            low=message.low,
            high=message.high,
            least=tuple(message.least),
            greatest=tuple(message.greatest),
            version=message.applier_version,
        )
