"""Stands in for `python -m pyspark.daemon WORKER`: the workers that it forks have their modules already.

Spark forks a worker for each kind of work and each task beside others, and a worker imports pandas, pyarrow and the engine after the
fork: half a second of processor time. After each task it collects garbage among all that it has imported. Here both happen once, before
the first fork. Drivers that tests start as processes of their own use Spark's daemon, as a pod does.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

WARM = (
    "pandas",
    "pyarrow.parquet",
    "persist_spark.partitions",
    "persist_spark.datasource",
    "persist_engine.client.client",
)


def program(folder: Path) -> Path:
    """Writes a program for PYSPARK_PYTHON: this Python, with this daemon in place of Spark's. Returns its path."""
    made = folder / "python"
    made.write_text(
        f'#!/bin/sh\n[ "$2" = pyspark.daemon ] && exec "{sys.executable}" "{__file__}" "$3"\nexec "{sys.executable}" "$@"\n'
    )
    made.chmod(0o700)
    return made


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # as with -m
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads of numpy, which a fork would leave behind
    for name in (sys.argv[1], *WARM):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    from pyspark import daemon

    daemon.manager()
