"""`python -m bench [NAME...] [--quick] [--json]`: measures hot paths as ratios. Prints the results and asserts nothing."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table as Report

from bench.measure import Row

Run = Callable[[Path, bool], Iterable[Row]]

#: Each bench is a module here with a function `run`. It is imported when it runs, because `peers` and `table` need further packages.
BENCHES = (
    "commit",
    "throughput",
    "append",
    "encode",
    "snapshot",
    "compaction",
    "history",
    "large",
    "lookup",
    "maintained",
    "mirror",
    "sink",
    "spark",
    "spark_compaction",
    "spark_iceberg",
    "spark_s3",
    "stream",
    "write_task",
    "upsert",
    "peers",
    "scale",
    "table",
)


#: The benches that run only by name. Four need their own packages, and two take many minutes.
ALONE = frozenset({"large", "peers", "scale", "spark_iceberg", "spark_s3", "table"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"which of {', '.join(BENCHES)} (default: all but {', '.join(sorted(ALONE))})"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, as a smoke test")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHES)
    if unknown:
        parser.error(f"no such bench: {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    rows: list[Row] = []
    for name in options.names or [name for name in BENCHES if name not in ALONE]:
        print(f"bench {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="persist-bench-") as folder:
            run: Run = import_module(f"bench.{name}").run
            for row in run(Path(folder), options.quick):
                text = f"  {row.what}: {row.ours} against {row.baseline}, ratio {row.ratio:.2f}"
                print(text, file=sys.stderr, flush=True)
                rows.append(row)
    if options.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
        return
    report = Report("what", "ours", "baseline", "ratio", "better is")
    for row in rows:
        report.add_row(row.what, row.ours, row.baseline, f"{row.ratio:.2f}", row.better)
    Console(width=140).print(report)


if __name__ == "__main__":
    main()
