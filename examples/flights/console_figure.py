"""The picture of the console in the README: the page of the shard `delays` after the demo, with further hours of delays and a reader.

Works on a copy of the demo's state folder. Needs a Chromium: `--chromium`, or one on PATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine import Antichain, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_operator.local.objects import Objects
from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import reports  # noqa: E402 - neighbours of this script, not a package
from demo import location_of  # noqa: E402

#: The demo reads the first hours of delays, and these follow.
FIRST_HOUR, HOURS = 30, 11
_WIDTH, _HEIGHT = 1240, 660
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_FIELDS = ("dep_delay", "arr_delay", "reported")


@contextmanager
def appended(state: Path) -> Iterator[None]:
    """Append the reports of some hours to the shard, an append for each hour. Meanwhile a reader holds the first of them."""
    document = Objects(state, SystemEnv()).get("PersistShard", "delays")
    assert document is not None, "the demo made it"
    shard_id = ShardId(document["status"]["shardId"])
    every = reports.reports(pq.read_table(HERE / "data" / "flights.parquet"))
    with PersistClient.open(location_of(state)) as client:
        schema, begin = client.schema(shard_id), client.recent_upper(shard_id).time
        assert begin is not None, "the shard is open"
        step_ms = max(1, (SystemEnv().now_ms() - begin) // HOURS)
        with (
            client.open_writer(shard_id, schema, purpose="delays") as writer,
            client.open_leased_reader(shard_id, purpose="weekly report") as reader,
        ):
            for hour in range(HOURS):
                start = reports.BEGIN + timedelta(hours=FIRST_HOUR + hour)
                found = reports.between(every, start, start + timedelta(hours=1))
                time, upper = begin + hour * step_ms, begin + (hour + 1) * step_ms
                batch = _updates(found.cast(pa.schema([*schema.key, *schema.val])), time)
                writer.compare_and_append(batch, expected_upper=Antichain.of(time), new_upper=Antichain.of(upper))
            reader.downgrade_since(Antichain.of(begin))
            yield


def _updates(rows: pa.Table, time: int) -> pa.Table:
    rows = rows.combine_chunks()
    names = [name for name in rows.column_names if name not in _FIELDS]

    def struct(columns: list[str]) -> pa.Array:
        chosen = rows.select(columns)
        return chosen.to_struct_array().combine_chunks()

    count = len(rows)
    times, diffs = pa.array([time] * count, pa.int64()), pa.array([1] * count, pa.int64())
    return pa.table({"key": struct(names), "val": struct(list(_FIELDS)), "time": times, "diff": diffs})


def shoot(folder: Path, out: Path, chromium: str) -> None:
    """Run `persist local ui` in `folder` and write the picture of the page."""
    command = [sys.executable, "-m", "persist_engine.cli", "local", "ui", "--state", ".persist/demo", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "it was asked for"
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
                page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
                page.goto(f"{url}shards/local/delays")
                page.screenshot(path=out)
                browser.close()
        finally:
            server.terminate()


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=Path(".persist/demo"), help="state folder of the demo")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/console-shard.png"))
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args()
    if not (options.state / "objects").is_dir():
        raise SystemExit(f"no demo in {options.state}: run `make demo` first")
    if options.chromium is None:
        raise SystemExit("no Chromium on PATH: install one, or name it with --chromium")
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / ".persist" / "demo"
        shutil.copytree(options.state, state)
        with appended(state):
            shoot(Path(folder), options.out.resolve(), options.chromium)


if __name__ == "__main__":
    main()
