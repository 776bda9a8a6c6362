"""sink.json: accepted documents, and refusals that name the field."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from persist_operator.api.resource import Meta
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import ShardSchema, StoreLocation
from persist_operator.api.sink import SinkSpec as DeclaredSink
from persist_operator.manifests.sink_files import json_text, sink_document
from persist_operator.plan.actions import StartDriver
from persist_operator.plan.observed import DriverSource
from persist_spark.spec import PARALLELISM_MAX, ConfigurationError, EnvelopeType, SinkSpec, Stream

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


def test_every_field_of_a_document_is_read(tmp_path):
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


def test_the_password_within_the_login_of_a_kafka_client_is_a_secret():
    login = 'PlainLoginModule required username="u" password="hunter2" storeKey="true";'
    options = {"kafka.sasl.jaas.config": login, "kafka.ssl.keystore.key": "PEM", "subscribe": "t"}
    spec = SinkSpec.parse(changed("input.format.options", options))
    assert set(spec.secrets()) == {login, "hunter2", "PEM"}


def test_absent_fields_have_defaults():
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
        ("input", {"type": "Shard"}, "input.shard is required"),
        (
            "input",
            {"type": "Shard", "shard": {"name": "s", "columns": "id"}},
            "input.shard.columns must be a list, not text",
        ),
        (
            "input",
            {"type": "Shard", "shard": {"name": "s", "columns": [1]}},
            "input.shard.columns must be a list of texts",
        ),
        ("input", {"type": "Shard", "shard": {"name": "s", "table": "x"}}, "unknown field: input.shard.table"),
        ("input.allowEmpty", "yes", "input.allowEmpty must be true or false, not text"),
        (
            "envelope.type",
            "Replace",
            "envelope.type: 'Replace' is not supported, must be one of Append, Diff, Mirror, Ups",
        ),
        ("envelope.type", "Diff", "envelope.diffColumn is required for Diff"),
        (
            "envelope.type",
            "Debezium",
            "envelope.timestampColumn: it has no meaning for Debezium, only for Append and Diff",
        ),
        (
            "envelope.orderColumn",
            "t",
            "envelope.orderColumn: it has no meaning for Append, only for Upsert and Debezium",
        ),
        (
            "envelope.deleteColumn",
            "t",
            "envelope.deleteColumn: it has no meaning for Append, only for Upsert; remove it",
        ),
        ("envelope.onError", "Ignore", "envelope.onError: 'Ignore' is not supported, must be one of Fail, Collect"),
        ("envelope.onError", True, "envelope.onError must be text, not true or false"),
        ("envelope.keyColumns", "x", "unknown field: envelope.keyColumns"),
        ("write_mode", "DryRun", "writeMode: 'DryRun' is not supported, must be one of ReadWrite, ReadOnly"),
        ("write_mode", "ReadOnly", "writeMode: an Append adds its rows to what the shard holds"),
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


def test_a_mirror_cannot_have_a_timestamp_column():
    with pytest.raises(ConfigurationError, match=r"envelope\.timestampColumn"):
        SinkSpec.parse(changed("envelope.type", "Mirror"))


def test_a_wrong_schema_names_the_field_of_the_shard():
    with pytest.raises(ConfigurationError, match=r"schema: .*BIGONT"):
        _ = SinkSpec.parse(changed("schema.key", "id BIGONT")).schema


def test_a_missing_or_broken_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        SinkSpec.load(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        SinkSpec.load(broken)


CSV = {"type": "Format", "format": {"name": "csv"}}
#: Blocks of a SparkSink that the driver reads: with every field of the resource definition but those of other envelopes, with the required
#: fields only, and with the fields of each envelope.
SHARD = {"name": "trips", "asOf": "-1h", "where": "n > 1", "columns": ["id", "n"], "sql": "select 1"}
READ = DriverSource(
    shard_id=DOCUMENT["shard_id"].replace("1", "2"),
    location=StoreLocation(blob="s3://other", consensus="redis://o:6379/0"),
)
#: The shard as a format of Spark.
OF_SHARD = {
    "name": "persist",
    "options": {
        "shard": READ.shard_id,
        "blob": "s3://other",
        "consensus": "redis://o:6379/0",
        "as_of": "-1h",
        "where": "n > 1",
        "columns": "id,n",
    },
    "sql": "select 1",
}
FUNCTION = {
    "module": "team.orders",
    "function": "recent",
    "arguments": {"days": "7"},
    "configMapName": "orders-input",
    "sql": "select 1",
}
DECLARED = {
    "every field": {
        "input": {
            "type": "Format",
            "allowEmpty": True,
            "format": {
                "name": "csv",
                "options": {"path": "/p", "header": "true"},
                "schema": "id BIGINT",
                "sql": "select 1",
            },
        },
        "envelope": {"type": "Append", "timestampColumn": "t"},
        "write": {"parallelism": PARALLELISM_MAX, "targetBatchBytes": "128Mi"},
    },
    "shard": {"input": {"type": "Shard", "shard": SHARD}, "envelope": {"type": "Mirror"}},
    "function": {"input": {"type": "Python", "python": FUNCTION}, "envelope": {"type": "Mirror"}},
    "required fields": {"input": CSV, "envelope": {"type": "Mirror"}},
    "comparison": {"input": CSV, "envelope": {"type": "Mirror"}, "writeMode": "ReadOnly"},
    "upsert": {"input": CSV, "envelope": {"type": "Upsert", "orderColumn": "lsn", "deleteColumn": "gone"}},
    "diff": {"input": CSV, "envelope": {"type": "Diff", "diffColumn": "n"}},
    "debezium": {"input": CSV, "envelope": {"type": "Debezium", "orderColumn": "source.lsn", "onError": "Collect"}},
}


def properties(schema, *path):
    for name in path:
        schema = schema["properties"][name]
    return set(schema["properties"])


@pytest.mark.parametrize("blocks", DECLARED.values(), ids=list(DECLARED))
def test_the_driver_reads_what_the_operator_writes(blocks):
    resource = {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "SparkSink",
        "metadata": {"name": "load", "namespace": "team"},
        "spec": {"shardRef": {"name": "flights"}, **blocks},
    }
    assert load_schemas().check(resource) == []
    defaulted = load_schemas().default(resource)
    action = StartDriver(
        name="load-00000000-3", attempt=3, run_number=2, run_id="uid-2", scheduled_ms=None, executor_prefix="load-x",
        shard_id=DOCUMENT["shard_id"], schema=ShardSchema(key="id BIGINT", value="name STRING"),
        location=StoreLocation(blob="s3://b/p", consensus="redis://r:6379/0", secret_name="persist-store"),
        spec=DeclaredSink.of(defaulted["spec"]), source=READ if "shard" in blocks["input"] else None,
    )  # fmt: skip
    written = json.loads(json_text(sink_document(action, Meta.of(resource), credentials_dir="/c")))
    read = SinkSpec.parse(written)
    assert (read.sink_id, read.run_id, read.shard_id) == ("team/load", "uid-2", DOCUMENT["shard_id"])
    assert (read.key_ddl, read.value_ddl, read.purpose) == ("id BIGINT", "name STRING", "sink team/load")
    assert (read.blob, read.consensus) == ("s3://b/p?credentials_dir=/c", "redis://r:6379/0?credentials_dir=/c")
    source = blocks["input"].get("format", OF_SHARD)
    if "python" in blocks["input"]:
        source = {"name": "python", "options": FUNCTION["arguments"], "sql": FUNCTION["sql"]}
        made = read.input.python
        assert (made.module, made.function, made.config_map) == tuple(
            FUNCTION[name] for name in ("module", "function", "configMapName")
        )
    assert (read.input.format, read.input.options) == (source["name"], source.get("options", {}))
    assert read.input.is_shard == (source is OF_SHARD)
    assert (read.input.schema, read.input.sql) == (source.get("schema"), source.get("sql"))
    assert read.input.allow_empty == blocks["input"].get("allowEmpty", False)
    envelope = read.envelope
    columns = (envelope.timestamp_column, envelope.diff_column, envelope.order_column, envelope.delete_column)
    names = ("type", "timestampColumn", "diffColumn", "orderColumn", "deleteColumn")
    assert (envelope.type, *columns) == tuple(blocks["envelope"].get(name) for name in names)
    assert envelope.on_error == blocks["envelope"].get("onError", "Fail")
    assert read.input.keeps_malformed == (envelope.on_error == "Collect")
    assert read.write_mode == blocks.get("writeMode", "ReadWrite")
    assert read.write.parallelism == blocks.get("write", {}).get("parallelism")
    assert read.write.target_part_bytes == (128 if "write" in blocks else 64) << 20


def test_the_sinks_of_this_file_have_every_field_of_the_resource_definition():
    path = Path(__file__).parents[2] / "crds" / "sparksinks.yaml"
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    widest = DECLARED["every field"]
    assert properties(spec, "input") == {*widest["input"], "shard", "python"}
    assert properties(spec, "input", "python") == {*FUNCTION, "optionsSecretName"}
    assert properties(spec, "input", "shard") == {*SHARD, "refresh"}
    # test_secret_options.py has the other one.
    assert properties(spec, "input", "format") == {*widest["input"]["format"], "optionsSecretName"}
    assert properties(spec, "envelope") == {name for blocks in DECLARED.values() for name in blocks["envelope"]}
    assert properties(spec, "write") == set(widest["write"])


def test_a_shard_is_named_by_a_document_without_its_source_and_as_a_stream_shows_updates():
    document = changed("input", {"type": "Shard", "shard": {"name": "flights"}})
    given = {"shard": "flights", "blob": "file:///b", "consensus": "sqlite:///c"}
    assert SinkSpec.parse(document).input.options == given
    document["envelope"] = {"type": "Diff", "diffColumn": "_diff"}
    assert SinkSpec.parse({**document, "stream": {}}).input.options == {**given, "rows": "updates"}
    document["input"]["shard"]["refresh"] = {"everySeconds": 60, "alignedTo": "2026-01-01T00:00:30Z"}
    times = {"refreshEvery": "60s", "refreshAlignedTo": "2026-01-01T00:00:30Z"}
    assert SinkSpec.parse({**document, "stream": {}}).input.options == {**given, "rows": "updates", **times}
    with pytest.raises(ConfigurationError, match=r"input.shard.refresh: .*only has a meaning for a stream"):
        SinkSpec.parse(document)
    document["input"]["shard"]["refresh"] = {"at": ["2026-01-01T00:00:30Z", "2026-01-01T00:01:30Z"]}
    assert (
        SinkSpec.parse({**document, "stream": {}}).input.options["refreshAt"]
        == "2026-01-01T00:00:30Z,2026-01-01T00:01:30Z"
    )
    document["input"]["shard"]["asOf"] = "5"
    with pytest.raises(ConfigurationError, match="input.shard.asOf: it has no meaning for a stream"):
        SinkSpec.parse({**document, "stream": {}})


def test_a_stream_has_defaults():
    assert SinkSpec.parse(changed("stream", {})).stream == Stream(commit_interval_s=10, is_bounded=False, stop_s=30)
    given = {"commitIntervalSeconds": 2, "bounded": True, "stopSeconds": 0}
    assert SinkSpec.parse(changed("stream", given)).stream == Stream(commit_interval_s=2, is_bounded=True, stop_s=0)
    assert SinkSpec.parse(DOCUMENT).stream is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"envelope": {"type": "Mirror"}}, "envelope.type: a Streaming sink cannot be a Mirror, because"),
        ({"input.format.options.failOnDataLoss": " False"}, "failOnDataLoss: must not be false, because"),
        ({"stream.commitIntervalSeconds": 3601}, r"stream.commitIntervalSeconds: 3601 is outside \[1, 3600\]"),
        ({"stream.stopSeconds": -1}, r"stream.stopSeconds: -1 is outside \[0, 3600\]"),
        ({"stream.more": 1}, "unknown field: stream.more"),
        (
            {"stream.standby": True, "write_mode": "ReadOnly", "envelope": {"type": "Upsert"}},
            "rollout.strategy: a ReadOnly stream commits nothing that a second driver could follow",
        ),
        ({"write_mode": "ReadOnly"}, "writeMode: an Append adds its rows to what the shard holds"),
        (
            {"input": {"type": "Shard", "shard": {"name": "s"}}},
            "envelope.type: Append would lose the rows that are taken",
        ),
    ],
)
def test_what_a_stream_cannot_be_is_refused(changes, message):
    document = changed("stream", {})
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = document
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    with pytest.raises(ConfigurationError, match=message):
        SinkSpec.parse(document)
