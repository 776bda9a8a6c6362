"""A sink whose input does not fit its declaration fails as Configuration, names what to change, and leaves the shard unchanged."""

import re
from dataclasses import replace

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_spark import sink
from persist_spark.failures import ExitCode, FailureClass, classify
from persist_spark.spec import Envelope, EnvelopeType, Input, SinkSpec, Write

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MIRROR, APPEND = Envelope(type=EnvelopeType.MIRROR), Envelope(type=EnvelopeType.APPEND)
TIMED = Envelope(type=EnvelopeType.APPEND, timestamp_column="t")
KEY, VALUE = "id BIGINT NOT NULL", "name STRING, score DOUBLE"
UPPER = 1000
#: A query of ten rows that fit.
GOOD = "select id, concat('n', id) as name, id / 2d as score, 5000 + id as t from range(10)"


class Shard:
    """A shard on files with a row at time 0 and the upper 1000, and sinks over the input `source`."""

    def __init__(self, folder, spark, source):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.folder, self.spark, self.id = folder, spark, ShardId.new()
        self.client = PersistClient.open(self.location)
        with self.client.open_writer(self.id, Schema.from_ddl(KEY, VALUE), purpose="test") as writer:
            kept = [(((7,), ("kept", 7.0)), 0, 1)]
            writer.compare_and_append(kept, expected_upper=Antichain.of(0), new_upper=Antichain.of(UPPER))
        self.input = source

    def spec(self, envelope, *, sql=None, **source):
        given = {"format": "parquet", "options": {"path": self.input}, "sql": sql, **source}
        return SinkSpec(
            sink_id="ns/s",
            run_id="r1",
            shard_id=self.id,
            key_ddl=KEY,
            value_ddl=VALUE,
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=Input(**given),
            envelope=envelope,
            write=Write(parallelism=2),
        )

    def rows(self):
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            table = reader.snapshot(self.client.recent_upper(self.id).time - 1).to_table()
        return sorted((row["key"]["id"], row["val"]["name"], row["diff"]) for row in table.to_pylist())

    def footprint(self):
        """Everything that a failed run must leave unchanged."""
        found = self.client.inspect(self.id)
        parts = {path.name for path in (self.folder / "blobs" / self.id).glob("n*/*")}
        return found.upper, found.updates, len(found.readers), len(found.writers), dict(found.progress), parts


@pytest.fixture(scope="module")
def source(local_spark, tmp_path_factory):
    """The folder of an input of ten rows that fit."""
    folder = str(tmp_path_factory.mktemp("input") / "rows")
    local_spark.sql(GOOD).write.parquet(folder)
    return folder


@pytest.fixture
def shard(tmp_path, local_spark, source):
    made = Shard(tmp_path, local_spark, source)
    yield made
    made.client.close()


SQL, FLAT = "select {} from input", "id, name, score"
CASES = {
    "missing path": (APPEND, {"options": {"path": "/nowhere/at/all"}}, r"input\.format: .*/nowhere/at/all"),
    "missing path, mirror": (MIRROR, {"options": {"path": "/nowhere/at/all"}}, r"input\.format: .*/nowhere/at/all"),
    "unknown format": (APPEND, {"format": "nonsense"}, r"input\.format: .*nonsense"),
    "not that format": (APPEND, {"format": "avro"}, r"input\.format: .*avro"),
    "empty": (APPEND, {"sql": SQL.format(FLAT) + " where false"}, "input is empty.*input.allowEmpty"),
    "empty, timed": (TIMED, {"sql": SQL.format("*") + " where false"}, "input is empty.*input.allowEmpty"),
    "empty, mirror": (MIRROR, {"sql": SQL.format(FLAT) + " where false"}, "input is empty.*input.allowEmpty"),
    "other columns": (APPEND, {"sql": SQL.format("t as a, t as b")}, "id.*name.*score.*the input has: a, b"),
    "missing value": (APPEND, {"sql": SQL.format("id, name")}, "score.*the input has: id, name"),
    "missing key": (MIRROR, {"sql": SQL.format("name, score")}, "id.*the input has: name, score"),
    "other case": (APPEND, {"sql": SQL.format("id as ID, name, score")}, "id.*the input has: ID, name, score"),
    "given twice": (APPEND, {"sql": SQL.format("id, name, name, score")}, "name"),
    "text for a number": (APPEND, {"sql": SQL.format("name as id, name, score")}, "id.*input.format.sql"),
    "fractions for whole numbers": (APPEND, {"sql": SQL.format("score as id, name, score")}, "id.*input.format.sql"),
    "wider numbers": (
        APPEND,
        {"sql": SQL.format("cast(id as decimal(20)) as id, name, score")},
        "id.*input.format.sql",
    ),
    "struct for text": (APPEND, {"sql": SQL.format("id, struct(name) as name, score")}, "name.*input.format.sql"),
    "text that is no number": (
        APPEND,
        {"sql": SQL.format("cast(name as bigint) as id, name, score")},
        "The value 'n[0-9]'",
    ),
    "text that is no number, mirror": (
        MIRROR,
        {"sql": SQL.format("cast(name as bigint) as id, name, score")},
        "The value 'n[0-9]'",
    ),
    "malformed records": (
        APPEND,
        {
            "format": "csv",
            "options": {"path": "{malformed}", "mode": "FAILFAST"},
            "schema": "id BIGINT, name STRING, score DOUBLE",
        },
        r"rows\.csv.*\[null,b,2\.0\].*For input string: \"x2\"",
    ),
    "null in NOT NULL": (
        APPEND,
        {"sql": SQL.format("if(id = 3, null, id) as id, name, score")},
        "id is NOT NULL and null in 1 rows",
    ),
    "null in NOT NULL, mirror": (
        MIRROR,
        {"sql": SQL.format("if(id = 3, null, id) as id, name, score")},
        "id is NOT NULL and null",
    ),
    "sql that does not parse": (APPEND, {"sql": "selekt 1"}, r"input\.format\.sql: "),
    "sql of another table": (APPEND, {"sql": "select * from orders"}, r"input\.format\.sql: .*orders"),
    "sql of another column": (MIRROR, {"sql": "select nope from input"}, r"input\.format\.sql: .*nope"),
    "late rows": (
        TIMED,
        {"sql": SQL.format("id, name, score, id * 300 as t")},
        "4 rows have a time before the shard's upper 1000, the first at 0",
    ),
    "negative times": (TIMED, {"sql": SQL.format("id, name, score, t - 9000 as t")}, "before the shard's upper 1000"),
    "null times": (
        TIMED,
        {"sql": SQL.format("id, name, score, if(id < 2, null, t) as t")},
        "timestampColumn: t is null in 2 of 10 rows",
    ),
    "no such time column": (TIMED, {"sql": SQL.format("id, name, score")}, "t"),
    "times that are texts": (TIMED, {"sql": SQL.format("id, name, score, name as t")}, "timestampColumn: t is string"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sink_whose_input_does_not_fit_is_a_configuration_failure_and_changes_nothing(shard, case):
    envelope, source, text = CASES[case]
    if case == "malformed records":
        rows = shard.folder / "rows.csv"
        rows.write_text("1,a,1.0\nx2,b,2.0\n")
        source = {**source, "options": {**source["options"], "path": str(rows)}}
    before = shard.footprint()
    with pytest.raises(Exception, match=".") as raised:
        sink.run_sink(shard.spark, shard.spec(envelope, **source))
    failure = classify(raised.value)
    assert (failure.exit_code, failure.failure_class) == (ExitCode.CONFIGURATION, FailureClass.CONFIGURATION), (
        failure.message
    )
    assert re.search(text, failure.message), failure.message
    assert "Traceback" not in failure.message
    assert shard.footprint() == before


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=["append", "mirror"])
def test_a_failed_run_succeeds_under_its_run_id_once_the_input_is_mended(shard, envelope):
    with pytest.raises(Exception, match="null in 1 rows"):
        sink.run_sink(shard.spark, shard.spec(envelope, sql=SQL.format("if(id = 3, null, id) as id, name, score")))
    assert not sink.run_sink(shard.spark, shard.spec(envelope, sql=SQL.format(FLAT))).already_done
    expected = [(id_, f"n{id_}", 1) for id_ in range(10)]
    assert shard.rows() == (expected if envelope is MIRROR else sorted([*expected, (7, "kept", 1)]))


def test_an_allowed_empty_input_empties_a_mirror_and_appends_nothing(shard):
    nothing = {"sql": SQL.format(FLAT) + " where false", "allow_empty": True}
    sink.run_sink(shard.spark, shard.spec(APPEND, **nothing))
    assert shard.rows() == [(7, "kept", 1)]
    upper = shard.client.recent_upper(shard.id)
    timed = replace(shard.spec(TIMED, **{**nothing, "sql": SQL.format("*") + " where false"}), run_id="r2")
    assert sink.run_sink(shard.spark, timed).updates_written == 0
    assert shard.client.recent_upper(shard.id) == upper, "without rows there is no time to move the upper to"
    sink.run_sink(shard.spark, replace(shard.spec(MIRROR, **nothing), run_id="r3"))
    assert shard.rows() == []


def test_a_shard_with_another_schema_is_refused_by_column(shard):
    spec = replace(shard.spec(APPEND), value_ddl="name STRING, rank INT")
    before = shard.footprint()
    with pytest.raises(Exception, match=r"val\.score is missing; val\.rank is not in") as raised:
        sink.run_sink(shard.spark, spec)
    assert classify(raised.value).exit_code is ExitCode.CONFIGURATION
    assert shard.footprint() == before
