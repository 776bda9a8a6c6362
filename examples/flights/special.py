"""The end of the demo: delays that arrive, an edited input, a read in the past, a writer killed with -9. Each function ends the demo when a
result is wrong.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import reports
import writer
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.wording import iso_text
from rich.console import Console

HERE = Path(__file__).resolve().parent
#: The writer is killed after so many acknowledgements, of 53.
_KILL_AFTER_WEEKS = 20


def persist(console: Console, *arguments: str, state: str) -> list[list[str]]:
    """Run a command of `persist`, and print it and its output. Returns the cells of the output's lines."""
    command = ["persist", *arguments, "--state", state]
    shown = " ".join(f'"{one}"' if " " in one else one for one in command)
    console.print(f"$ {shown}", style="bold", highlight=False, markup=False, soft_wrap=True)
    run = [sys.executable, "-m", "persist_engine.cli", *command[1:]]
    done = subprocess.run(run, check=False, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1])
    if done.returncode:
        raise SystemExit(done.returncode)
    console.print(done.stdout, highlight=False, markup=False, soft_wrap=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


def arrived(console: Console, hours: int, *, state: str) -> None:
    """Drop the files of the next hours. The stream reads these files alone, and the sums by carrier and day follow."""
    count = reports.drop(
        pq.read_table(HERE / "data" / "flights.parquet"), HERE / "data" / "delays", first_hour=hours, hours=hours
    )
    console.print(
        f"{hours} more files in examples/flights/data/delays, with {count:,} reports; the two sinks run again:"
    )
    for sink in ("delays", "carrier-days"):
        persist(console, "local", "run", sink, state=state)
    persist(console, "local", "read", "carrier-days", "--where", "carrier = 'UA'", state=state)


def corrected(console: Console, location: Location, shard_id: ShardId, *, state: str) -> None:
    """Edit three lines of the airlines' file. The Mirror corrects these rows and no others, and the time before the edit stays readable."""
    with PersistClient.open(location) as client:
        before = iso_text(client.recent_upper(shard_id).newest_complete)
    assert before is not None, "a Mirror's times are milliseconds since 1970"
    path = HERE / "data" / "airlines.csv"
    old = path.read_text(encoding="utf-8").splitlines()
    new = [line.replace("US Airways Inc.", "American Airlines") for line in old if not line.startswith("HA,")]
    path.write_text("\n".join([*new, "ZZ,Zeppelin Air"]) + "\n", encoding="utf-8")
    console.print("edited examples/flights/data/airlines.csv: US renamed, HA removed, ZZ added; the sink runs again:")
    persist(console, "local", "run", "airlines", state=state)
    console.print("the changes since then, row by row:")
    changes = persist(console, "local", "read", "airlines", "--from", before, state=state)[1:]
    expected = {("update_before", "US"), ("update_after", "US"), ("delete", "HA"), ("insert", "ZZ")}
    if len(changes) != len(expected) or {(row[1], row[2]) for row in changes} != expected:
        raise SystemExit("error: the Mirror's corrections are not the edits")
    console.print("the same rows before the edit:")
    where = "carrier IN ('HA', 'US', 'ZZ')"
    past = persist(console, "local", "read", "airlines", "--as-of", before, "--where", where, state=state)[1:]
    if past != [["HA", "Hawaiian Airlines Inc."], ["US", "US Airways Inc."]]:
        raise SystemExit("error: a read in the past shows other rows than before the edit")


def survived(console: Console, folder: Path) -> None:
    """Kill a writer with -9 between two appends, and start it again. All acknowledged flights are in the shard after the kill, and in the
    end all flights are in it once.
    """
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    shard_id = ShardId.new()
    stores = ["--blob", location.blob, "--consensus", location.consensus, "--shard", shard_id]
    command = [sys.executable, str(HERE / "writer.py"), *stores]
    acknowledged = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        for weeks, line in enumerate(process.stdout, 1):
            acknowledged = int(line)
            if weeks == _KILL_AFTER_WEEKS:
                process.send_signal(signal.SIGKILL)
    found = _read(location, shard_id)
    console.print(f"killed with -9 after {acknowledged:,} acknowledged flights: the shard holds {found.num_rows:,}")
    source = writer.flights()
    if process.returncode != -signal.SIGKILL or not acknowledged <= found.num_rows < source.num_rows:
        raise SystemExit("error: acknowledged flights are lost, or the writer ended before the kill")
    if not found.equals(source.slice(0, found.num_rows).sort_by(_ORDER)):
        raise SystemExit("error: the shard holds other flights than were written")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = _read(location, shard_id)
    if not found.equals(source.sort_by(_ORDER)):
        raise SystemExit("error: after the restart flights are missing or double")
    console.print(f"started again, it went on after them: {found.num_rows:,} flights, equal to the source")


_ORDER = [(name, "ascending") for name in writer.KEY]


def _read(location: Location, shard_id: ShardId) -> pa.Table:
    """The newest contents of the writer's shard, sorted by key."""
    with PersistClient.open(location) as client, client.open_leased_reader(shard_id, purpose="demo") as reader:
        table = reader.snapshot(client.recent_upper(shard_id).newest_complete).to_table()
    sides = [table[name].combine_chunks() for name in ("key", "val")]
    columns = [column for side in sides for column in side.flatten()]
    return pa.table(columns, names=[*writer.KEY, *writer.VALUE]).sort_by(_ORDER)
