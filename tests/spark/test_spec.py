"""sink.json: what is accepted, and that every refusal names the field."""

import copy
import json

import pytest
from persist_spark.spec import ConfigurationError, EnvelopeType, SinkSpec

DOCUMENT = {
    "sink_id": "ns/flights",
    "run_id": "u1-1",
    "shard_id": "s00000000-0000-0000-0000-000000000001",
    "schema": {"key": "id BIGINT", "value": "name STRING"},
    "location": {"blob": "file:///b", "consensus": "sqlite:///c"},
    "input": {
        "type": "Format",
        "format": {"name": "csv", "options": {"path": "/p", "password": "hunter2"}, "sql": "select 1"},
    },
    "envelope": {"type": "Append", "timestampColumn": "t"},
    "write": {"parallelism": 3, "targetBatchBytes": "1.5Mi"},
    "purpose": "sink ns/flights",
}


def changed(path: str, value) -> dict:
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path.split(".")
    at = document
    for parent in parents:
        at = at.setdefault(parent, {})
    if value is None:
        at.pop(last)
    else:
        at[last] = value
    return document


def test_a_whole_document(tmp_path):
    path = tmp_path / "sink.json"
    path.write_text(json.dumps(DOCUMENT))
    spec = SinkSpec.load(path)
    assert spec.envelope.type is EnvelopeType.APPEND
    assert spec.envelope.timestamp_column == "t"
    assert spec.write.parallelism == 3
    assert spec.write.target_part_bytes == 3 << 19
    assert spec.run_token == b"u1-1"
    assert spec.secrets() == ("hunter2",)
    assert spec.schema.key_ddl == "id BIGINT"
    assert not spec.input.allow_empty


def test_what_is_absent_has_a_default():
    document = changed("write", None)
    document["schema"] = {"key": "id BIGINT"}
    document["envelope"] = {"type": "Mirror"}
    del document["purpose"]
    spec = SinkSpec.parse(document)
    assert spec.write.parallelism is None
    assert spec.purpose == "sink ns/flights"
    assert len(spec.schema.val) == 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("sink_id", None, "sink_id is required"),
        ("shard_id", "nonsense", "shard_id: not a shard id"),
        ("location.blob", "", "location.blob is required"),
        ("location", 3, "location must be an object, not a whole number"),
        ("input.type", "Kafka", "input.type: 'Kafka' is not supported"),
        ("input.format.name", None, "input.format.name is required"),
        (
            "input.format.options.header",
            True,
            "input.format.options.header must be text, not true or false; put it in quotes",
        ),
        ("input.format.glob", "x", "unknown field: input.format.glob"),
        ("input.allowEmpty", "yes", "input.allowEmpty must be true or false, not text"),
        ("envelope.type", "Upsert", "envelope.type: 'Upsert' is not supported, must be one of Append, Mirror"),
        ("envelope.keyColumns", "x", "unknown field: envelope.keyColumns"),
        ("write.parallelism", 0, r"write.parallelism: 0 is outside \[1, 4096\]"),
        ("write.parallelism", True, "write.parallelism must be a whole number, not true or false"),
        ("write.targetBatchBytes", "many", "write.targetBatchBytes: 'many' is not a quantity"),
        ("write.targetBatchBytes", 1000, "write.targetBatchBytes: 1000 is less than 1Mi"),
        ("surprise", 1, "unknown field: surprise"),
    ],
)
def test_a_refusal_names_the_field(path, value, message):
    with pytest.raises(ConfigurationError, match=message):
        SinkSpec.parse(changed(path, value))


def test_only_an_append_has_times_of_its_own():
    with pytest.raises(ConfigurationError, match=r"envelope\.timestampColumn"):
        SinkSpec.parse(changed("envelope.type", "Mirror"))


def test_a_wrong_schema_names_the_field_of_the_shard():
    with pytest.raises(ConfigurationError, match=r"schema: .*BIGONT"):
        _ = SinkSpec.parse(changed("schema.key", "id BIGONT")).schema


def test_a_missing_or_broken_file_is_configuration(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        SinkSpec.load(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        SinkSpec.load(broken)
