"""sink.json as a document: what is written is read again, and every refusal names the field."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.sink_run import SinkRun, SinkSource, decode_sink_run, encode_sink_run
from persist_engine.model.ids import ShardId

TEXTS = st.text(min_size=1, max_size=8)
BLOCKS = st.dictionaries(
    TEXTS, st.one_of(TEXTS, st.integers(), st.booleans(), st.dictionaries(TEXTS, TEXTS)), max_size=3
)
RUNS = st.builds(
    SinkRun,
    sink_id=TEXTS,
    run_id=TEXTS,
    shard_id=st.uuids().map(lambda one: ShardId(f"s{one}")),
    key_schema=TEXTS,
    val_schema=st.text(max_size=8),
    blob=TEXTS,
    consensus=TEXTS,
    input=BLOCKS,
    envelope=BLOCKS,
    write=BLOCKS,
    purpose=TEXTS,
    stream=st.none() | BLOCKS,
    source=st.none()
    | st.builds(SinkSource, shard_id=st.uuids().map(lambda one: ShardId(f"s{one}")), blob=TEXTS, consensus=TEXTS),
)
RUN = SinkRun(
    sink_id="team/load", run_id="uid-2", shard_id=ShardId("s00000000-0000-0000-0000-000000000001"), key_schema="id BIGINT",
    val_schema="", blob="file:///b", consensus="sqlite:///c", input={}, envelope={}, write={}, purpose="sink team/load",
)  # fmt: skip


@pytest.mark.slow
@given(RUNS)
def test_what_is_encoded_is_decoded(run):
    assert decode_sink_run(json.loads(json.dumps(encode_sink_run(run)))) == run


@pytest.mark.parametrize("name", ["sink_id", "run_id", "shard_id", "schema", "location", "input", "envelope"])
def test_what_is_missing_is_named(name):
    document = encode_sink_run(RUN)
    del document[name]
    with pytest.raises(InvalidUsage, match=f"^{name} is required"):
        decode_sink_run(document)


def test_what_may_be_absent_has_a_default():
    document = encode_sink_run(RUN)
    del document["write"], document["purpose"], document["schema"]["value"]
    assert decode_sink_run(document) == RUN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blobs": "x"}, "^unknown field: blobs$"),
        ({"location": {"blob": "b", "consensus": "c", "region": "r"}}, "^unknown field: location.region$"),
        ({"input": []}, "^input must be an object, not a list$"),
        ({"source": {"shard_id": "nonsense", "location": {}}}, "^source.shard_id: "),
        ({"source": {"shard_id": RUN.shard_id, "location": {"blob": "b"}}}, "^source.location.consensus is required$"),
        (
            {"source": {"shard_id": RUN.shard_id, "name": "n", "location": {"blob": "b", "consensus": "c"}}},
            "source.name$",
        ),
        ({"shard_id": "nonsense"}, "^shard_id: "),
        ({"purpose": 3}, "^purpose must be text, not a whole number$"),
    ],
)
def test_a_refusal_names_the_field(changes, message):
    with pytest.raises(InvalidUsage, match=message):
        decode_sink_run({**encode_sink_run(RUN), **changes})


def test_every_field_of_a_run_is_in_the_document():
    source = SinkSource(shard_id=RUN.shard_id, blob="b", consensus="c")
    document = encode_sink_run(
        dataclasses.replace(RUN, val_schema="v STRING", stream={}, source=source, write_mode="ReadOnly")
    )
    assert len(dataclasses.fields(SinkRun)) == len(document) + 2, (
        "the two schemas, and the two stores, share one field each"
    )
