"""The wheel of the engine in an environment of its own: what it brings, what it leaves to extras, and what importing it loads.

Environments come from uv.lock and from what `make setup` has fetched: nothing is asked of a network.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from persist_engine.base.extras import DISTRIBUTION, EXTRAS

ROOT = Path(__file__).resolve().parents[1]

SHOP = """
import sys, pyarrow as pa
from persist_engine import Appended, Location, PersistClient, Schema, ShardId
blob, consensus = sys.argv[1:]
schema = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("name", pa.string())]))
with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
    shard = ShardId.new()
    with client.open_writer(shard, schema, purpose="ingest") as writer:
        assert isinstance(writer.compare_and_append([(((1,), ("ada",)), 5, 1)], expected_upper=0, new_upper=10), Appended)
    with client.open_leased_reader(shard, purpose="report") as reader:
        print(reader.snapshot(as_of=9).to_table().to_pylist()[0]["val"]["name"])
"""

FROM_CONFORMANCE = "from persist_engine.testing.conformance import BlobTests"
UPSERT = """
import sys, tempfile, pyarrow as pa
from persist_engine import Location, PersistClient, Schema, ShardId, open_upsert
schema = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("name", pa.string())]))
client = PersistClient.open(Location(blob="mem:", consensus="mem:"))
open_upsert(client, ShardId.new(), schema, purpose="t", backend=sys.argv[1], directory=tempfile.mkdtemp())
"""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "UV_PROJECT_ENVIRONMENT": str(folder), "VIRTUAL_ENV": ""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    build = ["uv", "build", "--quiet", "--offline", "--wheel", str(ROOT / "engine"), "--out-dir", str(out)]
    subprocess.run(build, check=True, timeout=240)
    return next(out.glob("*.whl"))


def install(folder: Path, wheel: Path, *extras: str) -> Path:
    """The wheel and what it asks for, at the versions of the lock; the environment's Python."""
    sync = [
        "uv",
        "sync",
        "--quiet",
        "--frozen",
        "--offline",
        "--no-dev",
        "--no-install-workspace",
        "--package",
        DISTRIBUTION,
    ]
    wanted = [word for extra in extras for word in ("--extra", extra)]
    subprocess.run(
        [*sync, "--python", sys.executable, *wanted], cwd=ROOT, env=environment(folder), check=True, timeout=240
    )
    python = folder / "bin" / "python"
    add = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)]
    subprocess.run(add, check=True, timeout=240)
    subprocess.run(["uv", "pip", "check", "--quiet", "--python", str(python)], check=True, timeout=60)
    return python


@pytest.fixture(scope="module")
def bare(tmp_path_factory, wheel):
    return install(tmp_path_factory.mktemp("bare") / "env", wheel)


def run(python: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", "-c", code, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_bare_wheel_reads_and_writes_files(bare, tmp_path):
    ended = run(bare, SHOP, f"file://{tmp_path}/blobs", f"sqlite://{tmp_path}/log.db")
    assert (ended.stdout, ended.stderr) == ("ada\n", "")


def test_the_bare_environment_has_nothing_of_the_extras(bare):
    modules = sorted(set().union(*EXTRAS.values()))
    code = f"import importlib.util, json; print(json.dumps([m for m in {modules} if importlib.util.find_spec(m)]))"
    assert json.loads(run(bare, code).stdout) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "arguments", "extra"),
    [
        (SHOP, ("s3://bucket/prefix", "mem:"), "s3"),
        (SHOP, ("mem:", "redis://localhost:1/0"), "redis"),
        (UPSERT, ("rocksdb",), "rocksdb"),
        (UPSERT, ("auto",), "rocksdb"),
        (FROM_CONFORMANCE, (), "testing"),
    ],
    ids=["s3", "redis", "rocksdb", "auto", "testing"],
)
def test_what_is_missing_is_named_with_its_extra(bare, code, arguments, extra):
    ended = run(bare, code, *arguments)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("persist_engine.base.errors.InvalidUsage: ")
    assert last.endswith(f"is not installed: install persist-engine[{extra}]")


def test_the_command_without_its_extra_says_so_in_one_line(bare):
    for command in ([bare.parent / "persist", "--help"], [bare, "-m", "persist_engine.cli", "read"]):
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (64, "")
        (line,) = ended.stderr.splitlines()
        assert line.endswith(
            "the command line needs the Python module typer, which is not installed: install persist-engine[cli]"
        )


@pytest.mark.slow
def test_the_command_runs_with_its_extra(tmp_path, wheel):
    python = install(tmp_path / "env", wheel, "cli")
    stores = f"file://{tmp_path}/blobs", f"sqlite://{tmp_path}/log.db"
    assert run(python, SHOP, *stores).stdout == "ada\n"
    command = [python.parent / "persist", "inspect", "shards", "--blob", stores[0], "--consensus", stores[1]]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_first_program_and_the_tutorial_run_from_the_wheel(tmp_path, wheel):
    """In an environment that has the wheel, its command line and pandas, and of this workspace nothing."""
    python = install(tmp_path / "env", wheel, "cli")
    add = ["uv", "sync", "--quiet", "--frozen", "--offline", "--inexact", "--only-group", "frames"]
    subprocess.run(add, cwd=ROOT, env=environment(tmp_path / "env"), check=True, timeout=240)

    def ran(*command: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PERSIST_", "PYTHON"))}
        environ = {**clean, "PATH": os.pathsep.join((str(python.parent), os.environ["PATH"]))}
        ended = subprocess.run(
            command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True, timeout=240
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert ran("python", "-c", "import persist_engine; print(persist_engine.__file__)").startswith(str(tmp_path))
    (program,) = blocks((ROOT / "README.md").read_text(), "python")
    assert "file:///tmp/shop" in program
    out = ran("python", "-c", program.replace("file:///tmp/shop", f"file://{tmp_path}/readme"))
    assert "   id  price\n0   2  10.00\n" in out
    assert "delete {'id': 1, 'name': 'ada', 'price': Decimal('1.50')} None" in out
    laptop = (ROOT / "docs/tutorial.md").read_text().partition("## On a laptop")[2].partition("## On a cluster")[0]
    out = ran("bash", "-euo", "pipefail", "-c", "\n".join(blocks(laptop, "sh")))
    assert "id\tname\tprice\n1\tapple\t120\n2\tpear\t150\n3\tplum\t90\n" in out
    assert "  update  id=1  price: 120 -> 110\n" in out


@pytest.mark.slow
def test_importing_loads_arrow_and_little_else():
    """In this environment, which has everything: what an import loads is what it takes its time for."""
    code = "import sys, json, {0}\n{1}\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"

    def loaded(first: str, then: str) -> set[str]:
        ended = run(Path(sys.executable), code.format(first, then))
        return set(json.loads(ended.stdout))

    assert not loaded("persist_engine", "") & {"pyarrow", "numpy", "google"}
    handles = "from persist_engine import *"
    own = {"persist_engine", "google", "rpds"}
    more = loaded("pyarrow.compute, pyarrow.parquet", handles) - loaded("pyarrow.compute, pyarrow.parquet", "") - own
    assert more <= sys.stdlib_module_names
    assert not more & {"asyncio", "http", "wsgiref", "pdb", "unittest", "xml"}


def test_the_extras_of_the_code_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "engine/pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: {re.match(r"[\w-]+", line)[0] for line in lines} for extra, lines in extras.items()}
    assert {extra: names | ({"botocore"} if extra == "s3" else set()) for extra, names in named.items()} == {
        extra: set(modules) for extra, modules in EXTRAS.items()
    }


def test_one_version_everywhere(wheel):
    command = [sys.executable, ROOT / ".ci" / "version.py", "--check"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert wheel.name.startswith(f"persist_engine-{ended.stdout.strip()}-")
