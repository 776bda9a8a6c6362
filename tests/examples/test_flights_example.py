"""The flights example: its YAML is valid, its input is complete, and its comparison detects differences."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from persist_engine.rows.schema import Schema
from persist_operator.api.schema_check import load_schemas
from persist_operator.local.runner import read_documents

FLIGHTS = Path(__file__).resolve().parents[2] / "examples" / "flights"


def test_the_resources_are_valid_and_fit_together():
    documents = read_documents([FLIGHTS, FLIGHTS / "delays"])
    schemas = load_schemas()
    assert [error for one in documents for error in schemas.check(one)] == []
    shards = {one["metadata"]["name"] for one in documents if one["kind"] == "PersistShard"}
    assert {one["spec"]["shardRef"]["name"] for one in documents if one["kind"] == "SparkSink"} == shards


@pytest.mark.slow
def test_the_prepared_flights_are_complete_ordered_and_fit_the_shard(data):
    flights = pq.read_table(data / "flights.parquet")
    assert flights.num_rows == 336_776
    hours = flights["time_hour"]
    assert flights.schema.field("time_hour").type == pa.timestamp("us", tz="UTC")
    assert pc.all(pc.less_equal(hours.slice(0, len(hours) - 1), hours.slice(1))).as_py()
    shard = next(one for one in read_documents([FLIGHTS / "shards.yaml"]) if one["metadata"]["name"] == "flights")
    schema = Schema.from_ddl(shard["spec"]["schema"]["key"], shard["spec"]["schema"]["value"])
    assert set(schema.key.names) | set(schema.val.names) == set(flights.column_names)
    assert flights.select(schema.key.names).group_by(schema.key.names).aggregate([]).num_rows == flights.num_rows


@pytest.mark.slow
def test_each_hour_has_a_file_with_the_delays_that_became_known_in_it(script, data):
    reports, flights = script("reports"), pq.read_table(data / "flights.parquet")
    files = sorted((data / "delays").iterdir())
    assert [files[0].name, files[-1].name, len(files)] == ["2013-01-01T10.parquet", "2013-01-02T09.parquet", 24]
    (shard, _) = read_documents([FLIGHTS / "delays" / "shards.yaml"])
    schema = Schema.from_ddl(shard["spec"]["schema"]["key"], shard["spec"]["schema"]["value"])
    tables = [pq.read_table(file) for file in files]
    assert all(set(one.column_names) == {*schema.key.names, *schema.val.names} for one in tables)
    last = {}
    for table in tables:
        for row in sorted(table.to_pylist(), key=lambda one: one["reported"]):
            last[tuple(row[name] for name in schema.key.names)] = row
    known = reports.known(flights, hours=24)
    assert sorted(map(str, known.to_pylist())) == sorted(map(str, last.values()))
    assert 0 < known["arr_delay"].null_count < len(known)
    every = reports.known(flights, hours=24 * 400)
    assert len(every) == len(flights) - flights["dep_delay"].null_count
    assert every["arr_delay"].null_count == flights["arr_delay"].null_count - flights["dep_delay"].null_count
    days = reports.carrier_days(known)
    assert pc.sum(days["departed"]).as_py() == len(known)
    assert pc.sum(days["arr_minutes"]) == pc.sum(known["arr_delay"])


def test_preparing_again_changes_nothing(script, data, monkeypatch, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(data)])
    script("prepare").main()
    assert {path.name: path.stat().st_mtime_ns for path in data.iterdir()} == before
    assert "wrote" not in capsys.readouterr().out


ROWS = pa.table({"a": ["x", "y", None, "x"], "n": pa.array([1, 2, 3, 1], pa.int32())})


@pytest.fixture
def digest(script):
    hashing = script("hashing")
    return lambda table, **options: hashing.content_hash(table.to_batches(**options), ["a", "n"])


def test_the_hash_ignores_row_order_and_batch_boundaries(digest):
    assert digest(ROWS)[0] == 4
    assert digest(ROWS.take([3, 1, 2, 0]), max_chunksize=1) == digest(ROWS)
    assert digest(ROWS.select(["n", "a"])) == digest(ROWS)


@pytest.mark.parametrize(
    "other",
    [
        ROWS.slice(1),
        ROWS.set_column(0, "a", [["x", "y", "", "x"]]),
        ROWS.set_column(0, "a", [["x", "y", None, "y"]]),
        ROWS.set_column(1, "n", [[1, 2, 3, 4]]),
        pa.concat_tables([ROWS, ROWS.slice(0, 1)]),
    ],
)
def test_the_hash_differs_for_other_contents(digest, other):
    assert digest(other) != digest(ROWS)
