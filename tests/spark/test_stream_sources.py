"""The sources of a Streaming sink: shards, files, tables beside them; and what is refused."""

import json
import os
import random
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine import Schema, ShardId
from persist_spark.failures import classify
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, OnError, PythonFunction
from persist_spark.streaming import stream
from pyspark.errors import StreamingQueryException
from stream_world import RATE, A, Acts, Died, World, both, die

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def world(local_spark, tmp_path):
    made = World(local_spark, tmp_path)
    yield made
    made.client.close()


def test_a_source_that_begins_with_now_chooses_once(world):
    """rate begins with the time of its start, which Spark keeps in sources/0/0. A driver that dies before its first batch has stored it."""
    rate = Input(format="rate", options={"rowsPerSecond": "100"}, sql="select value as id, 0 as n from input")
    with pytest.raises(Died):
        world.run_rate(Acts(die, "minted", 1), input=rate)
    began = world.position().logs if world.progress() else None
    stop = threading.Event()
    world.run_rate(Acts(stop.set, "batch", 2), stop=stop, input=rate)
    assert set(world.position().logs) == {"0/0"}
    assert began in (None, world.position().logs)
    rows = world.rows()
    assert rows == Counter((id_, 0) for id_ in range(len(rows)))


REFUSED = {
    "count": (RATE, "select count(*) as id, 0 as n from input", "Aggregate keeps a state"),
    "distinct": (RATE, "select distinct value as id, 0 as n from input", "Aggregate keeps a state"),
    "limit": (RATE, "select value as id, 0 as n from input limit 3", "Limit keeps a state"),
    "join": (RATE, "select a.value as id, 0 as n from input a join input b on a.value = b.value", "Join keeps a state"),
    "in": (RATE, "select value as id, 0 as n from input where value in (select value from input)", "not allowed in"),
    "files": (Input(format="json", schema="id BIGINT, n BIGINT", options={"latestFirst": "true"}), None, "latestFirst"),
    "no schema": (Input(format="json"), None, "input.format: "),
    "format": (Input(format="nonsense"), None, "input.format: "),
    "columns": (RATE, "select value as id from input", "n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_keep_its_promise_for_is_refused_and_nothing_is_written(world, tmp_path, name):
    source, sql, message = REFUSED[name]
    options = {**source.options, **({"path": str(tmp_path)} if source.format == "json" else {})}
    with pytest.raises(ConfigurationError, match=message):
        world.run(input=replace(source, sql=sql, options=options))
    assert world.progress() is None


def test_joins_with_tables_and_unions_are_streams(world):
    sql = (
        "with c as (select value from input) select c.value as id, r.id as n from c join range(3) r on c.value = r.id "
        "union all select value, 9 from c where value >= 8"
    )
    world.until(1, input=replace(RATE, sql=sql))
    assert set(world.rows()) == {(0, 0), (1, 1), (2, 2), (8, 9), (9, 9)}


def test_the_changes_of_another_shard_are_a_source(world):
    world.write(1, 2, 3)
    log = Acts()
    report = world.run(log)
    assert world.rows() == both(1, 2, 3)
    assert (report.batches, report.rows_read, report.updates_written, report.stopped) == (3, 6, 6, False)
    assert [line["batch"] for line in log.events("batch")] == [0, 1, 2]
    assert (world.position().batch, world.position().source) == (2, f"persist {world.source}")
    world.write(4)
    assert world.run().batches == 1
    assert world.rows() == both(1, 2, 3, 4)


@pytest.mark.parametrize("sql", [None, "select id + 0 as id, n from input where n < 100"])
@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT])
def test_bad_records_of_a_stream_are_errors_once_although_its_drivers_die(world, tmp_path, kind, sql):
    folder, dice = tmp_path / "in", random.Random(f"{kind} {sql}")
    folder.mkdir()
    schema = Schema.from_ddl("id BIGINT, err STRING", "n BIGINT")
    shard = ShardId.new()
    world.client.initialise(shard, schema)
    input_ = Input(
        format="json",
        schema="id BIGINT, n BIGINT",
        options={"path": str(folder), "maxFilesPerTrigger": "1"},
        sql=sql,
        keeps_malformed=True,
    )
    to = {"shard_id": shard, "key_ddl": schema.key_ddl, "value_ddl": schema.val_ddl, "input": input_}
    to["envelope"] = Envelope(type=kind, on_error=OnError.COLLECT)
    for numbers in (range(3), range(3, 5)):
        for number in numbers:
            (folder / f"{number}.json").write_text(
                f'{{"id": {number}, "n": 1}}\n{{"id": {number}, "n": "x{number}"}}\n'
            )
        before = "staged" if kind is EnvelopeType.APPEND else "decided"
        with pytest.raises(Died):
            world.run(Acts(die, dice.choice([before, "appended"]), 2), **to)
    log = Acts()
    report = world.run(log, **to)
    assert report.errors == sum(line["errors"] for line in log.events("batch")) > 0
    upper = world.client.recent_upper(shard).time
    with world.client.open_leased_reader(shard, purpose="t") as reader, reader.snapshot(A(upper - 1)) as found:
        rows = found.to_table().to_pylist()
    assert {row["diff"] for row in rows} == {1}
    assert sorted(row["key"]["id"] for row in rows if row["key"]["err"] is None) == list(range(5))
    errors = sorted(row["key"]["err"] for row in rows if row["key"]["err"])
    assert [f'"x{number}"' in error and f"/{number}.json" in error for number, error in enumerate(errors)] == [True] * 5


def test_a_folder_of_files_is_read_once_although_its_drivers_die(world, tmp_path):
    """More files than Spark lists before it compacts its list, over several drivers that share nothing but the shard."""
    folder, dice = tmp_path / "in", random.Random(5)
    folder.mkdir()
    options = {"path": str(folder), "maxFilesPerTrigger": "1"}
    source = Input(format="json", schema="id BIGINT, n BIGINT", options=options)
    for numbers in (range(6), range(6, 14), range(14, 16)):
        for number in numbers:
            (folder / f"{number:02}.json").write_text(json.dumps({"id": number, "n": 0}))
        log = Acts(die, dice.choice(["staged", "appended"]), 2)
        with pytest.raises(Died):
            world.run(log, input=source)
    world.run(input=source)
    assert world.rows() == Counter((number, 0) for number in range(16))
    (folder / "99.json").write_text(json.dumps({"id": 99, "n": 0}))
    assert world.run(input=source).updates_written == 1


def test_folders_are_united_although_one_of_them_is_empty_yet(world, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two, tmp_path / "code"):
        folder.mkdir()
    (tmp_path / "code" / "united_folders.py").write_text(
        "def load(spark, arguments):\n"
        "    read = spark.readStream.format('json').schema('id BIGINT, n BIGINT')\n"
        "    return read.load(arguments['one']).union(read.load(arguments['two']))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    source = Input(
        format="python",
        options={"one": str(one), "two": str(two)},
        python=PythonFunction(module="united_folders"),
    )
    for number, folder in enumerate([one, one, two, one, two]):
        (folder / f"{number}.json").write_text(json.dumps({"id": number, "n": 0}))
        world.run(input=source)
        assert world.rows() == Counter((each, 0) for each in range(number + 1))


def test_the_source_keeps_the_files_of_a_batch_that_failed(world, tmp_path, monkeypatch):
    """Spark deletes files of batches that it takes for committed."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        value = 1 << 40 if number == 1 else number
        (folder / f"{number}.json").write_text(json.dumps({"id": number, "n": value}))
        os.utime(folder / f"{number}.json", (1_700_000_000 + number,) * 2)
    options = {"path": str(folder), "maxFilesPerTrigger": "1", "cleanSource": "delete"}
    source = Input(
        format="json", schema="id BIGINT, n BIGINT", options=options, sql="select id, bigint(int(n)) as n from input"
    )

    def let_it_run_on(_, query):
        with suppress(StreamingQueryException):
            query.awaitTermination(60)

    monkeypatch.setattr(stream._Driver, "_stop", let_it_run_on)
    with pytest.raises(Exception, match="CAST_OVERFLOW"):
        world.run(input=source)
    assert world.rows() == Counter([(0, 0)])
    assert {path.name for path in folder.iterdir()} >= {"1.json", "2.json", "3.json", "4.json"}


def test_a_file_of_another_schema_stops_a_stream_by_its_name_and_the_next_driver_goes_on_there(world, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()

    def drop(number, n):
        pq.write_table(pa.table({"id": [number], "n": [n]}), folder / f".{number}")
        os.utime(folder / f".{number}", (1_700_000_000 + number,) * 2)
        (folder / f".{number}").rename(folder / f"{number}.parquet")

    for number, n in enumerate([0, 1, "two", 3]):
        drop(number, n)
    source = Input(
        format="parquet", schema="id BIGINT, n BIGINT", options={"path": str(folder), "maxFilesPerTrigger": "1"}
    )
    for _ in range(2):
        with pytest.raises(Exception, match="MISMATCH") as raised:
            world.run(input=source)
        failure = classify(raised.value)
        assert (failure.failure_class, "2.parquet" in failure.message) == ("Configuration", True)
        assert world.rows() == Counter([(0, 0), (1, 1)])
    drop(2, 2)
    assert world.run(input=source).batches == 2
    assert world.rows() == Counter((number, number) for number in range(4))
