"""The whole path on one machine with real Spark: YAML, sinks, shards read back, and the state folder after `down`."""

import json
import subprocess
import sys

import pytest

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


@pytest.mark.slow
def test_append_from_yaml_to_rows(house):
    """The tutorial's test has a Mirror."""
    house.environ.pop("PYTHONPATH")  # the real driver instead of its stand-in
    (house.folder / "trips.csv").write_text("at,id\n" + "".join(f"{n // 10},{n}\n" for n in range(INPUT_ROWS)))
    file = house.write(
        house.shard("trips", schema={"key": "id BIGINT", "value": "at BIGINT"}),
        house.sink(
            "trips",
            "trips",
            input={
                "type": "Format",
                "format": {
                    "name": "csv",
                    "schema": "at BIGINT, id BIGINT",
                    "options": {"path": "trips.csv", "header": "true"},
                },
            },
            envelope={"type": "Append", "timestampColumn": "at"},
            spark={"executor": {"instances": 1, "memory": "512Mi"}, "driver": {"memory": "512Mi"}},
        ),
    )
    result = house.local("up", "-f", file)
    assert "WARN" not in result.stderr + result.stdout
    assert {(row["id"], row["at"]) for row in rows(house.state, "trips")} == {(n, n // 10) for n in range(INPUT_ROWS)}
    assert house.status("SparkSink", "trips")["progress"]["upper"] == str(INPUT_ROWS // 10)

    assert house.local("get", "ssink").stdout.count("Completed") == 1
    assert "500 rows read, 500 updates written" in house.local("describe", "ssink", "trips").stdout
    assert '"event": "appended"' in house.local("logs", "trips").stdout
    assert house.local("down").stdout == "nothing was running\n"
    assert len(rows(house.state, "trips")) == INPUT_ROWS
    house.local("down", "--purge")
    assert not list(house.state.rglob("*.parquet"))
    assert sorted(path.name for path in house.state.iterdir()) == ["lock"]
