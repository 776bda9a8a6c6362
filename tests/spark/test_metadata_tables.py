"""`option("table", ...)`: the metadata of a shard as frames, with the columns and the rows of the engine's tables."""

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage
from persist_spark.datasource import PersistDataSource, register
from persist_spark.options import Options

TABLES = ("batches", "runs", "parts", "versions", "holds", "usage")
SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
GIVEN = {"shard": "s00000000-0000-0000-0000-000000000001", "blob": "mem:", "consensus": "mem:"}


@pytest.fixture
def given(tmp_path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard = ShardId.new()
    with (
        PersistClient.open(location) as client,
        client.open_writer(shard, SCHEMA, purpose="ingest") as writer,
    ):
        rows = [(((i,), (f"n{i}",)), 0, 1) for i in range(3)]
        writer.compare_and_append(rows, expected_upper=Antichain.of(0), new_upper=Antichain.of(5))
        yield {"shard": shard, "blob": location.blob, "consensus": location.consensus}


@pytest.mark.parametrize("name", ["as_of", "splits", "updates", "where", "columns"])
def test_an_option_about_rows_does_not_go_with_a_table(name):
    with pytest.raises(InvalidUsage, match=f"option table does not go with {name}: a metadata table has none"):
        Options.parse({**GIVEN, "table": "batches", name: "true" if name == "updates" else "1"})


def test_a_table_has_columns_of_its_own(given):
    source = PersistDataSource({**given, "table": "usage"})
    row = source.schema()
    assert PersistDataSource({**given, "table": "usage"}).schema() == row
    with pytest.raises(InvalidUsage, match="option table: usage has columns of its own; load it without a schema"):
        PersistDataSource({**given, "table": "usage"}).reader(row)


@pytest.mark.spark
def test_frames_show_the_rows_of_the_engine(local_spark, given):
    register(local_spark)
    with PersistClient.open(Location(blob=given["blob"], consensus=given["consensus"])) as client:
        expected = {name: client.metadata(ShardId(given["shard"]), name) for name in TABLES}
        frames = {name: local_spark.read.format("persist").options(**given, table=name).load() for name in TABLES}
        for name, frame in frames.items():
            assert frame.columns == expected[name].column_names
            rows = expected[name].to_pylist()
            if name == "versions":
                rows = [row | {"changed": dict(row["changed"])} for row in rows]
            assert [row.asDict() for row in frame.collect()] == rows
        assert client.inspect(ShardId(given["shard"])).readers == (), "a metadata table holds nothing"
    versions = frames["versions"]
    changed = versions.selectExpr("seqno", "explode(changed)").where("key = 'writers'").select("seqno")
    assert changed.join(versions, "seqno").where("walltime_ms > 0").count() == 1
    with pytest.raises(Exception, match="no metadata table 'rows'; there are batches"):
        local_spark.read.format("persist").options(**given, table="rows").load()


@pytest.mark.spark
def test_a_frame_over_a_table_shows_the_shard_as_it_was_when_it_was_loaded(local_spark, given):
    register(local_spark)
    frame = local_spark.read.format("persist").options(**given, table="batches").load()
    with (
        PersistClient.open(Location(blob=given["blob"], consensus=given["consensus"])) as client,
        client.open_writer(ShardId(given["shard"]), SCHEMA, purpose="later") as writer,
    ):
        writer.compare_and_append([(((9,), ("n",)), 5, 1)], expected_upper=Antichain.of(5), new_upper=Antichain.of(6))
    assert frame.agg({"upper": "max"}).first()[0] == 5
    assert frame.union(frame).select("upper").distinct().count() == 1
