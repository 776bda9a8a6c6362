"""The keys of all blobs. No other module makes or parses a blob key (spec 6).

    part    <shard>/n<MMmmmpp>/p<uuid>      partial key: n<MMmmmpp>/p<uuid>
    rollup  <shard>/v<seqno>/r<uuid>        partial key: v<seqno>/r<uuid>
    mark    <shard>/created                 an empty object: the shard's log has begun
    record  <shard>/d<expires>/d<uuid>      which blobs were deleted, kept until that time (`codec.deletions`)
    note    <shard>/n0000000/p<uuid>        what a write task staged, for another driver of its run (`codec.staging_note`)

No state names marks, records and notes. State holds partial keys. `n...` is the version of the code that wrote the part, with padded
digits, so that keys sort by version. A note has the key of a part of version 0, which no code has. So code that finds, counts or deletes
parts that no version names treats notes in the same way. A shard's consensus key is its textual id; `codec.registry` has the other
consensus keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.version import writer_key
from persist_engine.base.versioned import SeqNo
from persist_engine.model.ids import DeletionId, PartId, RollupId, ShardId

_EXPIRES_DIGITS = 15
#: The version in the keys of notes. No code has it.
_NOTES_VERSION = (0, 0, 0)
_EXPIRES = re.compile(rf"d\d{{{_EXPIRES_DIGITS}}}", re.ASCII)
_NOTES_FOLDER = writer_key(".".join(map(str, _NOTES_VERSION)))
_WRITER_KEY = re.compile(r"n(\d{2})(\d{3})(\d{2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartKey:
    """The key of a part, and the version of the code that wrote it."""

    shard_id: ShardId
    version: tuple[int, int, int]
    part_id: PartId
    partial: str

    @property
    def is_staging_note(self) -> bool:
        """Whether this is the key of a staging note."""
        return self.version == _NOTES_VERSION


@dataclass(frozen=True, slots=True)
class RollupKey:
    """The key of a rollup, and the seqno of its state."""

    shard_id: ShardId
    seqno: SeqNo
    rollup_id: RollupId
    partial: str


@dataclass(frozen=True, slots=True)
class DeletionsKey:
    """The key of a record of deletions, and the time until which it is kept."""

    expires_ms: int
    record_id: DeletionId
    partial: str


def part_key(version: str, part_id: PartId) -> str:
    """The partial key of a part written by `version`."""
    return f"{writer_key(version)}/{part_id}"


def rollup_key(seqno: SeqNo, rollup_id: RollupId) -> str:
    """The partial key of a rollup of `seqno`."""
    return f"{seqno}/{rollup_id}"


def is_rollup_key(partial: str) -> bool:
    """Whether `partial` is the partial key of some rollup."""
    seqno, _, rollup_id = partial.partition("/")
    try:
        return rollup_key(SeqNo.parse(seqno), RollupId(rollup_id)) == partial
    except InvalidUsage:
        return False


def blob_key(shard_id: ShardId, partial: str) -> str:
    """The whole key for a partial key."""
    return f"{shard_id}/{partial}"


def shard_prefix(shard_id: ShardId) -> str:
    """The prefix of all of a shard's blobs."""
    return f"{shard_id}/"


def created_key(shard_id: ShardId) -> str:
    """The key of the mark, the empty object that proves that the shard's log has begun. No state names it, and it is never deleted."""
    return f"{shard_id}/created"


def deletions_prefix(shard_id: ShardId) -> str:
    """The prefix of a shard's records of deletions. Their keys sort by the time until which they are kept."""
    return f"{shard_id}/d"


def deletions_key(expires_ms: int, record_id: DeletionId) -> str:
    """The partial key of a record of deletions that is kept until `expires_ms`."""
    return f"d{expires_ms:0{_EXPIRES_DIGITS}}/{record_id}"


def parse_deletions_key(key: str) -> DeletionsKey | None:
    """The parsed whole `key`; None when it is not the key of a record of deletions."""
    shard_id, _, partial = key.partition("/")
    expires, _, record_id = partial.partition("/")
    if not ShardId.is_valid(shard_id) or _EXPIRES.fullmatch(expires) is None or not DeletionId.is_valid(record_id):
        return None
    return DeletionsKey(int(expires[1:]), DeletionId(record_id), partial)


def belongs_to_no_version(key: str, shard_id: ShardId) -> bool:
    """Whether the whole `key` is that of the shard's mark or of a record of deletions, which belong to the shard but to no version."""
    return key == created_key(shard_id) or parse_deletions_key(key) is not None


def is_first_rollup(key: str) -> bool:
    """Whether `key` is that of a rollup of the first version, the only blob that may exist before its log."""
    return key.split("/")[1:2] == ["v1"]


def rollups_prefix(shard_id: ShardId) -> str:
    """The prefix of a shard's rollups."""
    return f"{shard_id}/v"


def parts_prefix(shard_id: ShardId) -> str:
    """The prefix of a shard's parts."""
    return f"{shard_id}/n"


def staging_note_key(note_id: PartId) -> str:
    """The partial key of a staging note."""
    return f"{_NOTES_FOLDER}/{note_id}"


def staging_notes_prefix(shard_id: ShardId) -> str:
    """The prefix of a shard's staging notes."""
    return f"{shard_id}/{_NOTES_FOLDER}/"


def parse_blob_key(key: str) -> PartKey | RollupKey:
    """The parsed `key`. Inverse of `blob_key`. Raises InvalidUsage for a key that this code would not make."""
    pieces = key.split("/")
    if len(pieces) != 3:
        raise InvalidUsage(f"not a blob key: {key!r}, expected <shard>/<version or seqno>/<id>")
    try:
        return _parsed(ShardId(pieces[0]), pieces[1], pieces[2])
    except InvalidUsage as error:
        raise InvalidUsage(f"not a blob key: {key!r}: {error}") from error


def _parsed(shard_id: ShardId, middle: str, last: str) -> PartKey | RollupKey:
    partial = f"{middle}/{last}"
    if middle.startswith("v"):
        return RollupKey(shard_id, SeqNo.parse(middle), RollupId(last), partial)
    if (found := _WRITER_KEY.fullmatch(middle)) is not None:
        return PartKey(shard_id, (int(found[1]), int(found[2]), int(found[3])), PartId(last), partial)
    raise InvalidUsage(f"{middle!r} is neither a seqno nor a writer key")
