"""The commands that README and demo print work on the state folder that the demo leaves, with its shards and rows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from persist_engine import Appended, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_kit.command_line import persist
from persist_operator.local.objects import Objects
from pyarrow import csv

ROOT = Path(__file__).resolve().parents[2]
FLIGHTS = ROOT / "examples" / "flights"
ROWS = 2000


def blocks():
    """The lines of each block of commands in the README."""
    found = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [[line.partition("   #")[0].strip() for line in one.splitlines()] for one in found]


def commands_of_readme():
    (block,) = [one for one in blocks() if "export PERSIST_LOCAL_STATE=.persist/demo" in one]
    return [line for line in block if line.startswith("persist ")]


def commands_of_demo():
    text = (FLIGHTS / "demo.py").read_text()
    table = text[text.index("LOOK_AROUND = (") : text.index("\n)\n", text.index("LOOK_AROUND"))]
    return [eval(line.strip().rstrip(",")) for line in table.splitlines()[1:]]


@pytest.fixture(scope="module")
def left(data, tmp_path_factory):
    """The state folder after the demo. Instead of Spark runs, the engine writes the rows."""
    folder = tmp_path_factory.mktemp("demo")
    state = folder / "state"
    run(f"persist local up -f {FLIGHTS / 'shards.yaml'}", state)
    types = {"lat": pa.float64(), "lon": pa.float64(), "alt": pa.int32(), "tz": pa.int32()}
    options = csv.ConvertOptions(column_types=types, null_values=["NA", ""], strings_can_be_null=True)
    tables = {name: csv.read_csv(data / f"{name}.csv", convert_options=options) for name in ("airlines", "airports")}
    tables["flights"] = pq.read_table(data / "flights.parquet").slice(0, ROWS)
    documents = {one["metadata"]["name"]: one for one in Objects(state, SystemEnv()).every("PersistShard")}
    location = Location(blob=f"file://{state}/store/blobs", consensus=f"sqlite://{state}/store/consensus.db")
    with PersistClient.open(location) as client:
        for name, table in tables.items():
            fill(client, ShardId(documents[name]["status"]["shardId"]), documents[name]["spec"]["schema"], table)
    run(f"persist local up -f {FLIGHTS / 'shards.yaml'}", state)
    return state


def fill(client, shard_id, ddl, table):
    schema = Schema.from_ddl(ddl["key"], ddl["value"])
    sides = []
    for side in (schema.key, schema.val):
        columns = [table[field.name].combine_chunks().cast(field.type) for field in side]
        sides.append(pa.StructArray.from_arrays(columns, fields=list(side)))
    upper = SystemEnv().now_ms()
    times, diffs = pa.array([upper - 1] * len(table), pa.int64()), pa.array([1] * len(table), pa.int64())
    rows = pa.table({"key": sides[0], "val": sides[1], "time": times, "diff": diffs})
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        assert isinstance(writer.compare_and_append(rows, expected_upper=0, new_upper=upper), Appended)
        for time in range(upper, upper + 4):  # enough versions that a rollup is due
            assert isinstance(writer.compare_and_append([], expected_upper=time, new_upper=time + 1), Appended)


def run(command, state):
    """Run the command in this process as a shell does in the checkout. Returns its output."""
    program, *arguments = shlex.split(command)
    assert program == "persist"
    done = persist(*arguments, folder=ROOT, environ={**os.environ, "PERSIST_LOCAL_STATE": str(state)})
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of_readme())
def test_a_command_of_the_readme_works_on_what_the_demo_left(left, command):
    assert len(run(command, left).splitlines()) > 1


@pytest.mark.slow
def test_a_shell_finds_the_command_in_the_environment_and_prints_the_same(left):
    command = commands_of_readme()[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "PERSIST_LOCAL_STATE": str(left)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environ, check=True)
    assert done.stdout.splitlines()[0].split() == run(command, left).splitlines()[0].split()


def test_readme_and_demo_print_the_same_commands():
    assert commands_of_demo() == commands_of_readme()


def test_the_demos_shards_keep_days_of_history():
    shards = list(yaml.safe_load_all((FLIGHTS / "shards.yaml").read_text()))
    assert [one["spec"]["retention"]["sinceLagSeconds"] for one in shards] == [7 * 86_400] * 3


def test_the_demo_installs_no_test_servers():
    """`make demo` has a setup target of its own."""
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: setup-demo ", text, re.MULTILINE)
    recipe = text[text.index("\nsetup-demo:") :].split("\n\t")[1]
    assert recipe.split("tools.sh")[1].split() == ["uv", "java"]
