"""The demo: sinks, maintenance and reads on this machine, without cluster or container.

Runs `persist local up` with the sinks of this folder and of `delays/` in a fresh state folder, shows the maintenance, and compares each
shard with its source by a hash of the contents that ignores order. Then a day of delays arrives, an input is edited, the past is read,
and a writer is killed (`special.py`). Ends with an error at the first difference.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import prepare  # noqa: E402 - neighbours of this script, not a package
import reports  # noqa: E402
import special  # noqa: E402
from hashing import content_hash  # noqa: E402
from persist_engine import Antichain, Location, PersistClient, ShardId  # noqa: E402
from persist_engine.base.env import SystemEnv  # noqa: E402
from persist_engine.base.wording import sized  # noqa: E402
from persist_operator.local.objects import Objects  # noqa: E402

#: The shards of the folder `delays`: the delays as they are reported, and what they add up to.
LATE = ("delays", "carrier-days")
#: The demo's Spark drivers live for seconds: Java's second compiler and its parallel collector cost more than they bring. (Measured: 134 s
#: of processor time for the whole demo, and 209 s without.)
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: Commands to try after the demo. The README has them too, and a test runs them.
LOOK_AROUND = (
    "persist local get",
    "persist local get runs",
    "persist local describe pshard flights",
    "persist local read airlines --from start",
    "persist local read flights --limit 5 --where \"carrier = 'UA' AND dep_delay > 300\"",
    "persist local inspect flights",
    "persist local admin verify airports",
)


def location_of(state: Path) -> Location:
    """The location of the shards of a state folder of the local runner."""
    store = state.resolve() / "store"
    return Location(blob=f"file://{store}/blobs", consensus=f"sqlite://{store}/consensus.db")


def source_of(name: str, hours: int) -> pa.Table:
    """What the shard should hold, in its types. `hours`: how many hours of delays are known."""
    if name in ("flights", *LATE):
        flights = pq.read_table(HERE / "data" / "flights.parquet")
        known = flights if name == "flights" else reports.known(flights, hours=hours)
        return reports.carrier_days(known) if name == "carrier-days" else known
    types = {"lat": pa.float64(), "lon": pa.float64(), "alt": pa.int32(), "tz": pa.int32()}
    options = csv.ConvertOptions(column_types=types, null_values=["NA", ""], strings_can_be_null=True)
    return csv.read_csv(HERE / "data" / f"{name}.csv", convert_options=options)


def read_back(client: PersistClient, shard_id: ShardId) -> pa.Table:
    """All rows at the newest readable time, with the fields of key and value side by side."""
    upper = client.recent_upper(shard_id)
    assert upper.time is not None
    with client.open_leased_reader(shard_id, purpose="demo") as reader:
        table = reader.snapshot(as_of=Antichain.of(upper.time - 1)).to_table()
    if set(table["diff"].unique().to_pylist()) - {1}:
        raise SystemExit(f"error: {shard_id} holds a row more than once")
    key, val = table["key"].combine_chunks(), table["val"].combine_chunks()
    columns = {field.name: struct.field(i) for struct in (key, val) for i, field in enumerate(struct.type)}
    return pa.table(columns)


def compare(state: Path, console: Console, *, hours: int, names: Collection[str] | None = None) -> None:
    """Compare the shards of these names (None: each one) with their sources, and print a table. A difference ends the demo."""
    table = Table("shard", "rows", "source rows", "content hash", "source hash", "equal")
    equal = True
    with PersistClient.open(location_of(state)) as client:
        for document in Objects(state, SystemEnv()).every("PersistShard"):
            name, shard_id = document["metadata"]["name"], ShardId(document["status"]["shardId"])
            if names is not None and name not in names:
                continue
            ours, source = read_back(client, shard_id), source_of(name, hours)
            columns = source.column_names
            rows, digest = content_hash(ours.to_batches(), columns)
            source_rows, source_digest = content_hash(source.cast(ours.select(columns).schema).to_batches(), columns)
            same = (rows, digest) == (source_rows, source_digest)
            equal = equal and same
            table.add_row(
                name, f"{rows:,}", f"{source_rows:,}", digest[:16], source_digest[:16], "yes" if same else "NO"
            )
    console.print(table)
    if not equal:
        raise SystemExit("error: a shard differs from its source")


def upkeep(state: Path, console: Console) -> None:
    """Print the maintenance of each shard from its status: bytes that compactions read and wrote, blobs and versions that GC removed."""
    table = Table("shard", "before compaction", "after", "blobs deleted", "versions cut", "runs")
    for document in Objects(state, SystemEnv()).every("PersistShard"):
        history = [one for one in document["status"].get("history", []) if one["outcome"] == "Succeeded"]
        compactions = [one for one in history if one["type"] == "Compaction"]
        before, after = (sum(one.get(key, 0) for one in compactions) for key in ("bytesRead", "bytesWritten"))
        deleted, cut = (sum(one.get(key, 0) for one in history) for key in ("blobsDeleted", "diffsTruncated"))
        kinds = [one["type"] for one in reversed(history)]
        runs = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        table.add_row(document["metadata"]["name"], sized(before), sized(after), str(deleted), str(cut), runs)
    console.print(table)


def local(*arguments: str, state: Path) -> None:
    """Run `persist local ...` in a process of its own. A failure ends the demo with the same exit code."""
    command = [sys.executable, "-m", "persist_engine.cli", "local", *arguments, "--state", str(state)]
    process = subprocess.Popen(command, cwd=HERE.parents[1])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()  # the interrupt reaches it too, and it stops its runs
    if code:
        raise SystemExit(code)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--state", type=Path, default=Path(".persist/demo"), help="state folder, emptied first (default: .persist/demo)"
    )
    state: Path = parser.parse_args().state.resolve()
    os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED)  # noqa: TID251 - this is a main
    console, began = Console(width=120), time.monotonic()
    if state.exists():
        local("down", "--purge", state=state)
    console.rule("the input")
    (HERE / "data" / "airlines.csv").unlink(missing_ok=True)  # an earlier demo edited it
    shutil.rmtree(HERE / "data" / "delays", ignore_errors=True)  # and dropped more files here
    subprocess.run([sys.executable, str(HERE / "prepare.py")], check=True)
    console.rule("persist local up -f examples/flights/ -f examples/flights/delays/")
    local("up", "-f", "examples/flights/", "-f", "examples/flights/delays/", state=state)
    console.rule("maintenance")
    local("get", "runs", state=state)
    upkeep(state, console)
    console.rule("read back and compared with the source")
    compare(state, console, hours=prepare.FIRST_HOURS)
    shown = os.path.relpath(state)
    console.rule("a day of delays arrives")
    special.arrived(console, prepare.FIRST_HOURS, state=shown)
    compare(state, console, hours=2 * prepare.FIRST_HOURS, names=LATE)
    console.rule("an input edited, and the past")
    airlines = Objects(state, SystemEnv()).get("PersistShard", "airlines")
    assert airlines is not None, "it was compared"
    special.corrected(console, location_of(state), ShardId(airlines["status"]["shardId"]), state=shown)
    console.rule("a writer killed with -9")
    special.survived(console, state / "store" / "writer")
    console.rule(f"all checks passed; {time.monotonic() - began:.0f} s")
    console.print("Look around:  . .venv/bin/activate", highlight=False)
    for command in LOOK_AROUND:
        console.print(f"  {command} --state {shown}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
