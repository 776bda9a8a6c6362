"""Handles and batches that do not belong to the shard: another schema, other codecs, another shard, a second time, damaged on the way."""

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Schema, UpperMismatch
from persist_engine.base.errors import (
    BatchNotFromThisShard,
    CodecMismatch,
    CorruptData,
    Incompatible,
    InvalidBatchBounds,
    InvalidUsage,
    SchemaMismatch,
)
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.codec.batch import decode_transmittable, encode_transmittable
from persist_engine.model.state import CodecNames
from persist_engine.shard.versions import StateVersions
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
INLINE = [pytest.param(0, id="blobs"), pytest.param(4096, id="inline")]


@pytest.fixture(params=INLINE)
def world(request):
    return World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=request.param)))


@pytest.fixture
def shard_id(world):
    """A shard with upper 5 and one row."""
    made = world.shard_id()
    with world.process().open_writer(made, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([row(0, "kept", 0)], expected_upper=A(0), new_upper=A(5))
    return made


@pytest.fixture
def writer(world, shard_id):
    return world.process().open_writer(shard_id, SCHEMA, purpose="test")


def rows(world, shard_id):
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        table = reader.snapshot(A(client.recent_upper(shard_id).time - 1)).to_table()
    return [(each["key"]["id"], each["val"]["name"], each["diff"]) for each in table.to_pylist()]


OTHER_SCHEMAS = {
    "renamed": (Schema.from_ddl("id BIGINT", "title STRING"), "val.name is missing; val.title is not in"),
    "retyped": (Schema.from_ddl("id INT", "name STRING"), "key.id is INT, the shard's is BIGINT"),
    "not null": (Schema.from_ddl("id BIGINT NOT NULL", "name STRING"), "key.id is NOT NULL, the shard's is nullable"),
    "no value": (Schema.from_ddl("id BIGINT"), "val.name is missing"),
    "wider key": (Schema.from_ddl("id BIGINT, x INT", "name STRING"), "key.x is not in"),
    "swapped": (Schema.from_ddl("name STRING", "id BIGINT"), "key.id is missing"),
}


@pytest.mark.parametrize("case", OTHER_SCHEMAS)
@pytest.mark.parametrize("known", [False, True], ids=["fresh process", "shard already open"])
def test_another_schema_is_refused_by_column_whatever_opens_the_shard(world, shard_id, case, known):
    schema, text = OTHER_SCHEMAS[case]
    client = world.process()
    if known:
        client.machine(shard_id)
    seqno = world.process().inspect(shard_id).seqno
    for open_ in (
        lambda: client.open_writer(shard_id, schema, purpose="test"),
        lambda: client.open_leased_reader(shard_id, schema, purpose="test"),
        lambda: client.initialise(shard_id, schema),
    ):
        with pytest.raises(SchemaMismatch, match=text):
            open_()
    assert world.process().inspect(shard_id).seqno == seqno
    assert world.process().schema(shard_id) == SCHEMA


@pytest.mark.parametrize("known", [False, True], ids=["fresh process", "after a refusal"])
def test_other_codecs_are_refused_whatever_opens_the_shard(world, known):
    """Spec 1.4, A.5."""
    shard_id = world.shard_id()
    codecs = CodecNames(key="json", val="struct")
    versions = StateVersions(world.blob, world.consensus, env=world.env, settings=world.settings, metrics=NoMetrics())
    versions.maybe_init_shard(shard_id, codecs, SCHEMA.to_pair())  # as code with other codecs makes it
    client = world.process()
    if known:
        with pytest.raises(CodecMismatch):
            client.machine(shard_id)
    for open_ in (
        lambda: client.open_writer(shard_id, SCHEMA, purpose="test"),
        lambda: client.open_leased_reader(shard_id, SCHEMA, purpose="test"),
        lambda: client.open_leased_reader(shard_id, purpose="test"),
        lambda: client.initialise(shard_id, SCHEMA),
        lambda: client.inspect(shard_id),
    ):
        with pytest.raises(CodecMismatch, match=f"{shard_id}.*json"):
            open_()


def test_batches_of_another_shard_are_refused_and_stay_usable_at_home(world, shard_id, writer):
    other = world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")
    stray = other.batch([row(1, "stray", 6)], lower=A(0), upper=A(9))
    own = writer.batch([row(2, "own", 6)], lower=A(5), upper=A(9))
    with pytest.raises(BatchNotFromThisShard, match=f"{other.shard_id}.*{shard_id}"):
        writer.compare_and_append_batch([own, stray], expected_upper=A(5), new_upper=A(9))
    assert rows(world, shard_id) == [(0, "kept", 1)]
    assert isinstance(writer.append_batch(own, A(5), A(9)), Appended)
    assert isinstance(other.append_batch(stray, A(0), A(9)), Appended)
    assert rows(world, shard_id) == [(0, "kept", 1), (2, "own", 1)]


def test_a_batch_is_appended_once_however_often_it_is_tried(world, shard_id, writer):
    batch = writer.batch([row(1, "once", 6)], lower=A(5), upper=A(9))
    data = writer.batch([row(2, "sent", 7)], lower=A(5), upper=A(9)).to_transmittable()
    first, second = (writer.batch_from_transmittable(data) for _ in range(2))
    with pytest.raises(InvalidUsage, match="twice in one call"):
        writer.compare_and_append_batch([first, second], expected_upper=A(5), new_upper=A(9))
    with pytest.raises(InvalidUsage, match="twice in one call"):
        writer.compare_and_append_batch([batch, batch], expected_upper=A(5), new_upper=A(9))
    assert isinstance(writer.compare_and_append_batch([batch, first], expected_upper=A(5), new_upper=A(9)), Appended)
    with pytest.raises(InvalidUsage, match="already appended"):
        writer.compare_and_append_batch([batch], expected_upper=A(9), new_upper=A(9))
    # The other copy is a batch of its own to its holder: no interval takes it a second time.
    again = writer.compare_and_append_batch([second], expected_upper=A(5), new_upper=A(9))
    assert again == UpperMismatch(current=A(9), expected=A(5))
    with pytest.raises(InvalidBatchBounds):
        writer.compare_and_append_batch([second], expected_upper=A(9), new_upper=A(12))
    second.mark_spent("left alone")
    assert rows(world, shard_id) == [(0, "kept", 1), (1, "once", 1), (2, "sent", 1)]


@pytest.fixture
def data(writer):
    return writer.batch([row(1, "sent", 6)], lower=A(5), upper=A(9)).to_transmittable()


def test_transmitted_bytes_are_refused_at_every_truncation_and_flip(writer, data):
    damaged = [data[:end] for end in range(len(data))]
    damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    damaged += [b"garbage", data + b"\x00", data[::-1], SCHEMA.key_ddl.encode()]
    for each in damaged:
        with pytest.raises((CorruptData, Incompatible), match="transmittable batch"):
            writer.batch_from_transmittable(each)
    assert isinstance(writer.append_batch(writer.batch_from_transmittable(data), A(5), A(9)), Appended)


def test_a_batch_of_newer_code_is_refused_and_may_be_taken_up_after_an_upgrade(world, shard_id, writer, data):
    _, _, hollow = decode_transmittable(data)
    major, minor, _ = (int(part) for part in APPLIER_VERSION.split("."))
    ahead = encode_transmittable(shard_id, f"{major}.{minor + 1}.0", hollow)
    too_new = encode_transmittable(shard_id, f"{major}.{minor + 2}.0", hollow)
    with pytest.raises(Incompatible, match=rf"{major}\.{minor + 2}\.0.*upgrade"):
        writer.batch_from_transmittable(too_new)
    assert rows(world, shard_id) == [(0, "kept", 1)]
    assert isinstance(writer.append_batch(writer.batch_from_transmittable(ahead), A(5), A(9)), Appended)


def test_a_read_at_no_time_or_behind_since_is_refused(world, shard_id):
    with world.process().open_leased_reader(shard_id, SCHEMA, purpose="test") as reader:
        for bad in (-1, 2**63, Antichain.empty()):
            with pytest.raises(InvalidUsage):
                reader.snapshot(bad)
        reader.downgrade_since(A(3))
        answer = reader.snapshot(A(2))
        with pytest.raises(InvalidUsage, match=r"as_of 2.*since \{3\}"):
            answer.to_table()
        assert isinstance(reader.snapshot(A(3)).to_table(), pa.Table)
