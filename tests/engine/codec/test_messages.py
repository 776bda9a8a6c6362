"""Envelopes, and messages that are whole but wrong: refused by key, never guessed at."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from persist_engine.base.errors import CorruptData, Incompatible, InvariantViolated
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.batch import (
    batch_to_pb,
    decode_batch,
    decode_run_listing,
    decode_transmittable,
    encode_batch,
    encode_run_listing,
    encode_transmittable,
)
from persist_engine.codec.deletions import Cause, Deletions, decode_deletions, encode_deletions
from persist_engine.codec.envelope import Kind, opened, sealed
from persist_engine.codec.registry import (
    Identity,
    decode_identity,
    decode_name,
    decode_shard_owner,
    encode_identity,
    encode_name,
    encode_shard_owner,
)
from persist_engine.codec.staging_note import JOB_BYTES, StagingNote, decode_staging_note, encode_staging_note
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup, state_to_pb
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.batch import HollowBatch, HollowPart, HollowRollup, InlinePart, PartStats, RunMeta
from persist_engine.model.diff.state_diff import Delete, Insert, StateDiff, Update
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import ShardId, StoreId
from persist_engine.model.ownership import Owner
from persist_engine.model.spine.flat import ThinMerge, ThinSpineBatch
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import (
    Claim,
    CodecNames,
    CriticalReader,
    DebugInfo,
    LeasedReader,
    SchemaPair,
    ShardState,
    SourceProgress,
    Writer,
)
from persist_engine.pb import batch_pb2, deletions_pb2, diff_pb2, state_pb2
from persist_engine.rows.schema import CODECS

SHARD = ShardId.from_bytes(b"s" * 16)
DESC = Description(Antichain(0), Antichain(5), Antichain(0))
BATCH = HollowBatch(DESC, 2, (InlinePart(b"data", 2, None),), (), (RunMeta(),))
BIRTH = b"b" * 16
STATE = ShardState(
    APPLIER_VERSION, SHARD, BIRTH, CODECS, SeqNo(3), 1000, "host", trace=Trace().push_without_requests(BATCH)
)
DIFF = StateDiff(
    APPLIER_VERSION,
    SHARD,
    BIRTH,
    SeqNo(2),
    SeqNo(3),
    1000,
    "v1/x",
    hostname=(Update(None, "a", "b"),),
    progress=(Delete("sink", SourceProgress(b"t", Antichain(1))),),
    legacy_batches=(Insert(BATCH, None),),
)
NEWER = "0.9.0"


def damaged_diff(change: Callable[[diff_pb2.FieldDiffs], None]) -> bytes:
    """A diff with columns that do not fit together, in a whole envelope."""
    message = diff_pb2.StateDiff()
    message.ParseFromString(encode_state_diff(DIFF)[10:])
    change(message.field_diffs)
    return sealed(Kind.STATE_DIFF, message)


def test_a_diff_is_laid_out_in_columns() -> None:
    message = diff_pb2.StateDiff()
    message.ParseFromString(encode_state_diff(DIFF)[10:])
    columns = message.field_diffs
    assert list(columns.fields) == [1, 10, 12]
    assert list(columns.types) == [1, 2, 0]
    assert len(columns.lens) == 3 + 2 + 2
    assert (columns.lens[0], columns.lens[-1]) == (0, 0), "unit keys and values take no bytes"
    assert sum(columns.lens) == len(columns.data)


@pytest.mark.parametrize(("size_bytes", "is_kept"), [(10, True), (5000, False)])
def test_a_small_value_that_several_diffs_name_is_decoded_once(size_bytes: int, is_kept: bool) -> None:
    batch = replace(BATCH, parts=(InlinePart(b"d" * size_bytes, 2, None),))
    adding, deleting = (replace(DIFF, legacy_batches=(change(batch, None),)) for change in (Insert, Delete))
    first, second = (
        decode_state_diff(encode_state_diff(diff), key="the-key").legacy_batches[0].key for diff in (adding, deleting)
    )
    assert first == second == batch
    assert (first is second) == is_kept, "large values are not held in memory"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda columns: columns.fields.append(1), "4 fields for 3 types"),
        (lambda columns: columns.types.pop(), "3 fields for 2 types"),
        (lambda columns: columns.lens.pop(), "6 slices where 7 belong"),
        (lambda columns: columns.lens.append(0), "8 slices where 7 belong"),
        (lambda columns: setattr(columns, "data", columns.data[:-1]), "bytes where slices add up to"),
        (lambda columns: setattr(columns, "data", columns.data + b"x"), "bytes where slices add up to"),
        (lambda columns: columns.fields.__setitem__(0, 99), "unknown field 99"),
        (lambda columns: columns.fields.__setitem__(0, 0), "unknown field 0"),
        (lambda columns: columns.types.__setitem__(0, 3), "unknown type of change 3"),
        (lambda columns: columns.fields.__setitem__(1, 13), "the state diff breaks a rule"),
        (lambda columns: columns.fields.__setitem__(2, 1), "bytes where a unit stands"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(
    change: Callable[[diff_pb2.FieldDiffs], None], message: str
) -> None:
    """Spec 8.3."""
    with pytest.raises(CorruptData, match=f"the-key.*{message}") as caught:
        decode_state_diff(damaged_diff(change), key="the-key")
    assert caught.value.detail["key"] == "the-key"


def without(message: Message, *path: str) -> Message:
    at = message
    for name in path[:-1]:
        found = getattr(at, name)
        at = found if isinstance(found, Message) else found[0]
    at.ClearField(path[-1])
    return message


@pytest.mark.parametrize(
    "path",
    [
        ("desc",),
        ("desc", "lower"),
        ("desc", "since"),
        ("run_metas",),
        ("run_metas", "order"),
        ("parts", "inline"),
    ],
)
def test_a_batch_with_a_piece_missing_is_corrupt(path: tuple[str, ...]) -> None:
    with pytest.raises(CorruptData, match="the-key"):
        decode_batch(sealed(Kind.BATCH, without(batch_to_pb(BATCH), *path)), key="the-key")


def rollup_message() -> state_pb2.Rollup:
    return state_pb2.Rollup(state=state_to_pb(STATE))


@pytest.mark.parametrize(
    "path",
    [("state",), ("state", "trace"), ("state", "codecs"), ("state", "shard_id"), ("state", "trace", "since")],
)
def test_a_rollup_with_a_piece_missing_is_corrupt(path: tuple[str, ...]) -> None:
    with pytest.raises(CorruptData, match="the-key"):
        decode_rollup(sealed(Kind.ROLLUP, without(rollup_message(), *path)), key="the-key")


def test_an_entry_that_comes_twice_is_corrupt() -> None:
    message = rollup_message()
    for _ in range(2):
        message.state.schemas.append(state_pb2.SchemaEntry(id=7, schema=state_pb2.SchemaPair(key=b"k")))
    with pytest.raises(CorruptData, match=r"the-key.*7 comes twice"):
        decode_rollup(sealed(Kind.ROLLUP, message), key="the-key")


def test_two_times_are_no_frontier() -> None:
    """Spec 2.10."""
    message = batch_to_pb(BATCH)
    message.desc.upper.elements.append(9)
    with pytest.raises(CorruptData, match="a frontier of 2 times"):
        decode_batch(sealed(Kind.BATCH, message), key="the-key")


def test_the_diffs_of_a_rollup_lead_to_its_state() -> None:
    good = Rollup(STATE, (VersionedData(SeqNo(2), b"a"), VersionedData(SeqNo(3), b"b")))
    assert decode_rollup(encode_rollup(good), key="k") == good
    for seqnos in ((2,), (4,), (1, 3), (3, 2)):
        with pytest.raises(InvariantViolated, match="in a rollup of v3"):
            encode_rollup(Rollup(STATE, tuple(VersionedData(SeqNo(seqno), b"") for seqno in seqnos)))


def test_one_kind_is_not_read_as_another() -> None:
    with pytest.raises(CorruptData, match="the-key: expected a rollup"):
        decode_rollup(encode_batch(BATCH), key="the-key")
    with pytest.raises(CorruptData, match="the-key: 3 bytes that are no rollup"):
        decode_rollup(b"abc", key="the-key")


DELETIONS = Deletions(
    shard_id=SHARD, cause=Cause.ROLLUP, seqno=SeqNo(3), hostname="h", begun_ms=1, gone_ms=2, keys=("v3/r",)
)


def test_an_unknown_cause_is_incompatible_with_the_key_of_the_record() -> None:
    message = opened(Kind.DELETIONS, encode_deletions(DELETIONS), deletions_pb2.Deletions(), "the-key")
    for cause in (0, 99):
        message.cause = cause  # type: ignore[assignment]
        with pytest.raises(Incompatible, match="the-key: .*unknown cause"):
            decode_deletions(sealed(Kind.DELETIONS, message), key="the-key", shard_id=SHARD)


NOTE = StagingNote(
    shard_id=SHARD,
    sink_id="ns/s",
    run=b"r-1",
    job=b"a" * JOB_BYTES,
    batch=b"batch",
    rows=2,
    errors=0,
    least_time=None,
    low=3,
    high=4,
    least=("1",),
    greatest=("2",),
)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"job": b"short"}, "a job of 5 bytes"),
        ({"least": ()}, "a least key of 0 fields and a greatest one of 1"),
        ({"greatest": ("2", "3")}, "a least key of 1 fields and a greatest one of 2"),
        ({"shard_id": ShardId.from_bytes(b"o" * 16)}, "it is of shard s6f6f6f6f"),
    ],
)
def test_a_staging_note_that_breaks_a_rule_is_corrupt(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptData, match=f"the-key: the staging note breaks a rule: {message}"):
        decode_staging_note(encode_staging_note(replace(NOTE, **broken)), key="the-key", shard_id=SHARD)


DECODERS: dict[Kind, tuple[Callable[[], bytes], Callable[[bytes], object]]] = {
    Kind.ROLLUP: (lambda: encode_rollup(Rollup(STATE)), lambda data: decode_rollup(data, key="the-key")),
    Kind.STATE_DIFF: (lambda: encode_state_diff(DIFF), lambda data: decode_state_diff(data, key="the-key")),
    Kind.BATCH: (lambda: encode_batch(BATCH), lambda data: decode_batch(data, key="the-key")),
    Kind.TRANSMITTABLE_BATCH: (
        lambda: encode_transmittable(SHARD, APPLIER_VERSION, BATCH),
        lambda data: decode_transmittable(data, key="the-key"),
    ),
    Kind.RUN_LISTING: (
        lambda: encode_run_listing(SHARD, BATCH.parts),
        lambda data: decode_run_listing(data, key="the-key", shard_id=SHARD),
    ),
    Kind.STORE_IDENTITY: (
        lambda: encode_identity(Identity(StoreId.from_bytes(b"i" * 16))),
        lambda data: decode_identity(data, key="the-key"),
    ),
    Kind.SHARD_OWNER: (
        lambda: encode_shard_owner(SHARD, None),
        lambda data: decode_shard_owner(data, key="the-key", shard_id=SHARD),
    ),
    Kind.REGISTERED_NAME: (
        lambda: encode_name(Owner("operator", "namespace", "name"), SHARD),
        lambda data: decode_name(data, key="the-key"),
    ),
    Kind.DELETIONS: (
        lambda: encode_deletions(DELETIONS),
        lambda data: decode_deletions(data, key="the-key", shard_id=SHARD),
    ),
    Kind.STAGING_NOTE: (
        lambda: encode_staging_note(NOTE),
        lambda data: decode_staging_note(data, key="the-key", shard_id=SHARD),
    ),
}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("version", [0, 2, 3, 0xFFFF])
def test_another_format_is_incompatible_and_a_damaged_one_corrupt(kind: Kind, version: int) -> None:
    encode, decode = DECODERS[kind]
    what = kind.name.lower().replace("_", " ")
    ours = encode()
    front, payload = ours[:4] + version.to_bytes(2, "little"), ours[10:]
    data = front + zlib.crc32(front + payload).to_bytes(4, "little") + payload
    with pytest.raises(
        Incompatible, match=f"the-key: the {what} has format {version}, this code reads format 1"
    ) as caught:
        decode(data)
    assert caught.value.detail["key"] == "the-key"
    damaged = bytearray(encode())
    damaged[4:6] = version.to_bytes(2, "little")
    with pytest.raises(CorruptData, match="the-key.*checksum"):
        decode(bytes(damaged))


def test_batches_stored_in_both_forms_are_corrupt() -> None:
    for add in (
        lambda trace: trace.legacy_batches.append(batch_to_pb(BATCH)),
        lambda trace: (trace.ClearField("stored"), trace.legacy_batches.append(batch_to_pb(BATCH)), trace.merges.add()),
    ):
        message = rollup_message()
        add(message.state.trace)
        with pytest.raises(CorruptData, match="the-key.*stored in two ways"):
            decode_rollup(sealed(Kind.ROLLUP, message), key="the-key")


def test_bytes_of_newer_code_are_incompatible() -> None:
    with pytest.raises(Incompatible, match=r"the-key: written by version 0.9.0"):
        decode_state_diff(encode_state_diff(replace(DIFF, applier_version=NEWER)), key="the-key")
    with pytest.raises(Incompatible, match="the-key"):
        decode_rollup(encode_rollup(Rollup(replace(STATE, applier_version=NEWER))), key="the-key")
    with pytest.raises(Incompatible, match="the-key"):
        decode_transmittable(encode_transmittable(SHARD, NEWER, BATCH), key="the-key")
    with pytest.raises(Incompatible, match="the-key"):
        decode_staging_note(encode_staging_note(replace(NOTE, version=NEWER)), key="the-key", shard_id=SHARD)


def test_protobuf_garbage_in_a_whole_envelope_is_corrupt() -> None:
    front = b"PSTB\x01\x00"
    payload = b"\xff\xff\xff"
    crc = zlib.crc32(payload, zlib.crc32(front))
    with pytest.raises(CorruptData, match="the-key: the batch does not decode"):
        decode_batch(front + crc.to_bytes(4, "little") + payload, key="the-key")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ShardState, state_pb2.ShardState),
        (CodecNames, state_pb2.CodecNames),
        (LeasedReader, state_pb2.LeasedReader),
        (CriticalReader, state_pb2.CriticalReader),
        (Writer, state_pb2.Writer),
        (DebugInfo, state_pb2.DebugInfo),
        (SchemaPair, state_pb2.SchemaPair),
        (Claim, state_pb2.Claim),
        (SourceProgress, state_pb2.SourceProgress),
        (HollowRollup, state_pb2.HollowRollup),
        (ThinSpineBatch, state_pb2.ThinSpineBatch),
        (ThinMerge, state_pb2.ThinMerge),
        (HollowBatch, batch_pb2.HollowBatch),
        (HollowPart, batch_pb2.HollowPart),
        (InlinePart, batch_pb2.InlinePart),
        (PartStats, batch_pb2.PartStats),
        (RunMeta, batch_pb2.RunMeta),
    ],
)
def test_no_field_of_a_durable_value_is_forgotten(value: type, message: type[Message]) -> None:
    """A new field of the model without one in its message would be lost in silence (spec 2.1)."""
    durable = {field.name for field in fields(value) if not field.name.startswith("_")}
    assert durable == {field.name for field in message.DESCRIPTOR.fields}


def test_no_collection_of_a_diff_is_forgotten() -> None:
    """Spec 8.1."""
    scalars = {
        "applier_version",
        "seqno_from",
        "seqno_to",
        "walltime_ms",
        "latest_rollup_key",
        "birth",
        "tag",
        "predecessor",
        "shard_id",
    }
    written = {value.name.removeprefix("STATE_FIELD_").lower() for value in diff_pb2.StateField.DESCRIPTOR.values} - {
        "unspecified"
    }
    assert {field.name for field in fields(StateDiff)} - scalars == written


def test_generated_code_is_what_the_protos_say() -> None:
    script = Path(__file__).parents[3] / "proto" / "generate.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
