"""The whole path on one machine with real Spark: YAML, sinks, shards read back, and the state folder after `down`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from persist_engine import Antichain, PersistClient, Schema, ShardId

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # a JVM starts, possibly on a busy machine
INPUT_ROWS = 500


def rows(state, name):
    """The rows that the `persist` command line reads back."""
    status = json.loads((state / "objects" / "PersistShard" / f"{name}.json").read_text())["status"]
    store = state.resolve() / "store"
    location = ["--blob", f"file://{store}/blobs", "--consensus", f"sqlite://{store}/consensus.db"]
    command = [sys.executable, "-m", "persist_engine.cli", "read", status["shardId"], *location, "--format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_function_that_the_manual_prints(house):
    """docs/spark.md: its resources and its module, in the folder that they name."""
    house.environ.pop("PYTHONPATH")
    page = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    text = page.split("### Sinks over a function")[1]
    module, resources = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml"))
    (house.folder / "tides-v1").mkdir()
    (house.folder / "tides-v1" / "tides.py").write_text(module)
    (house.folder / "tides.yaml").write_text(resources)
    house.local("up", "-f", "tides.yaml")
    found = rows(house.state, "tides")
    assert all(row["height"] > 0 for row in found)
    assert {row["harbour"] for row in found} == {"brest", "cuxhaven"}
    assert (found[0]["hour"], found[0]["height"]) == (0, 3.9)


def csv_input(house, name, fields):
    return {
        "type": "Format",
        "format": {"name": "csv", "schema": fields, "options": {"path": f"{name}.csv", "header": "true"}},
    }


def append(house, count):
    """`count` rows in as many batches, so that there is something to compact."""
    shard_id = ShardId(house.status("PersistShard", "trips")["shardId"])
    schema = Schema.from_ddl("id BIGINT", "at BIGINT")
    with PersistClient.open(house.location) as client, client.open_writer(shard_id, schema, purpose="test") as writer:
        for number in range(count):
            upper = writer.fetch_recent_upper()
            row = (((INPUT_ROWS + number,), (upper.time,)), upper.time, 1)
            writer.compare_and_append([row], expected_upper=upper, new_upper=Antichain.of(upper.time + 1))


@pytest.mark.slow
def test_sinks_from_yaml_to_rows(house):
    """The tutorial's test has a Mirror. Then a compaction on Spark."""
    house.environ.pop("PYTHONPATH")  # the real driver instead of its stand-in
    (house.folder / "trips.csv").write_text("at,id\n" + "".join(f"{n // 10},{n}\n" for n in range(INPUT_ROWS)))
    (house.folder / "prices.csv").write_text("id,price,lsn,gone\n1,5,2,\n1,4,1,\n2,7,3,true\n2,6,1,\n3,8,1,false\n")
    spark = {"executor": {"instances": 1, "memory": "512Mi"}, "driver": {"memory": "512Mi"}}
    file = house.write(
        house.shard(
            "trips",
            schema={"key": "id BIGINT", "value": "at BIGINT"},
            compaction={"maxUncompactedBatches": 1, "runner": "Spark"},
        ),
        house.shard("prices", schema={"key": "id BIGINT", "value": "price BIGINT"}),
        house.sink(
            "prices",
            "prices",
            input=csv_input(house, "prices", "id BIGINT, price BIGINT, lsn BIGINT, gone BOOLEAN"),
            envelope={"type": "Upsert", "orderColumn": "lsn", "deleteColumn": "gone"},
            spark=spark,
        ),
        house.sink(
            "trips",
            "trips",
            input=csv_input(house, "trips", "at BIGINT, id BIGINT"),
            envelope={"type": "Append", "timestampColumn": "at"},
            spark=spark,
        ),
    )
    result = house.local("up", "-f", file)
    assert "WARN" not in result.stderr + result.stdout
    assert {(row["id"], row["at"]) for row in rows(house.state, "trips")} == {(n, n // 10) for n in range(INPUT_ROWS)}
    assert house.status("SparkSink", "trips")["progress"]["upper"] == str(INPUT_ROWS // 10)

    assert {(row["id"], row["price"]) for row in rows(house.state, "prices")} == {(1, 5), (3, 8)}
    assert (
        "Upsert to PersistShard/prices in the order of lsn, once" in house.local("describe", "ssink", "prices").stdout
    )

    assert house.local("get", "ssink").stdout.count("Completed") == 2
    assert "500 rows read, 500 updates written" in house.local("describe", "ssink", "trips").stdout
    assert '"event": "appended"' in house.local("logs", "trips").stdout
    append(house, 8)
    house.local("up", "-f", file)
    compaction = house.status("PersistShard", "trips")["maintenance"]["compaction"]
    assert (compaction["runner"], compaction["lastResult"]) == ("Spark", "Succeeded"), compaction
    assert "Compaction (Spark)" in house.local("describe", "pshard", "trips").stdout
    assert house.status("PersistShard", "trips")["storage"]["uncompactedBatches"] == 0
    assert house.local("down").stdout == "nothing was running\n"
    assert len(rows(house.state, "trips")) == INPUT_ROWS + 8
    house.local("down", "--purge")
    assert not list(house.state.rglob("*.parquet"))
    assert sorted(path.name for path in house.state.iterdir()) == ["lock"]
