"""Checks a sink's input before Spark starts: the files must exist and have the shard's columns. Also finds when the files last changed.

Reads files and changes nothing. Leaves inputs on other machines, and formats that are not files, to the run.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.sink_run import columns_beside, input_schema
from persist_engine.rows.schema import Schema

from persist_operator.api.sink import SinkSpec
from persist_operator.plan import schedule

_FILE_FORMATS = frozenset({"avro", "csv", "json", "orc", "parquet", "text", "xml"})
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):")
_DEFAULT_STORE = "spark.hadoop.fs.defaultFS"
#: The most files of a folder that are checked. More would take longer than a run that fails.
_FILES_MAX = 10_000
#: The longest header line that is read.
_LINE_CHARS_MAX = 1 << 20


def problems(sink: Mapping[str, Any], shard: Mapping[str, Any] | None, *, waits: bool) -> list[str]:
    """The errors with which the run would end, one line each: in the schedule, in the input's path, in its columns. `shard`: the
    PersistShard that the sink writes; None when it is unknown. With `waits` the input of a Scheduled sink may come later.
    """
    spec = SinkSpec.of(sink["spec"])
    found = list(_schedule_problems(spec))
    if spec.suspend or (waits and spec.schedule is not None):
        return found
    pattern, files = _pattern(spec), _files(spec)
    if pattern is not None and not files:
        found.append(
            f"spec.input.format.options.path: no such file or folder: {pattern} (looked for from {Path.cwd()}); correct the path, or "
            "run the command in the folder to which the path is relative"
        )
        return found
    found += _code_problems(spec)
    columns = _columns(spec, files)
    return found if columns is None or shard is None else [*found, *_column_problems(spec, shard["spec"], columns)]


def changed_ms(sink: Mapping[str, Any]) -> int | None:
    """When the input's files last changed or were moved into place; None when this is unknown."""
    spec = SinkSpec.of(sink["spec"])
    files = [*_files(spec), *([] if spec.code_config_map is None else [Path(spec.code_config_map)])]
    # The change of the inode also counts, because a file that is moved into place keeps its older time of modification.
    newest_ns = 0
    for path in _within(files):
        with contextlib.suppress(OSError):  # deleted meanwhile, or not readable by this user
            stat = path.stat()
            newest_ns = max(newest_ns, stat.st_mtime_ns, stat.st_ctime_ns)
    return newest_ns // 1_000_000 or None


def _schedule_problems(spec: SinkSpec) -> Iterator[str]:
    if spec.schedule is not None:
        try:
            schedule.next_tick_ms(spec.schedule, 0)
        except InvalidUsage as error:
            yield f"spec.{error}"


def _code_problems(spec: SinkSpec) -> Iterator[str]:
    name = spec.code_config_map
    if name is None:
        return
    if not Path(name).is_dir():
        yield (
            f"spec.input.python.configMapName: no such folder: {name} (looked for from {Path.cwd()}); make it, with the files of the "
            "ConfigMap, or run the command in the folder that has it"
        )
    elif not any(Path(name).glob("*.zip")) and not Path(name, module := f"{_top(spec)}.py").is_file():
        yield f"spec.input.python.module: no file {module} in the folder {name}; correct the module, or add the file"


def _top(spec: SinkSpec) -> str:
    return str(spec.input["python"]["module"]).partition(".")[0]


def _pattern(spec: SinkSpec) -> str | None:
    """The path of the input's files on this machine, possibly with wildcards; None for any other input."""
    source = spec.input.get("format") or {}
    path = (source.get("options") or {}).get("path")
    if source.get("name") not in _FILE_FORMATS or not path or _DEFAULT_STORE in spec.spark.conf:
        return None
    scheme = _SCHEME.match(path)
    if scheme is not None and scheme[1].lower() != "file":
        return None
    if scheme is not None:
        path = unquote("/" + path[len(scheme[0]) :].lstrip("/"))
    # Hadoop's glob has alternatives in braces, but Python's does not.
    return None if "{" in path or "\0" in path else str(path)


def _files(spec: SinkSpec) -> list[Path]:
    pattern = _pattern(spec)
    if pattern is None:
        return []
    with contextlib.suppress(OSError):  # a name that is too long for a file
        if Path(pattern).exists():
            return [Path(pattern)]
    return sorted(Path(one) for one in glob.glob(pattern))  # noqa: PTH207 - the pattern may be absolute


def _within(paths: Iterable[Path]) -> Iterator[Path]:
    """Each path and all paths below it, including folders, because a folder changes when an entry is added or removed."""
    left = _FILES_MAX
    for path in paths:
        yield path
        if path.is_dir():
            for below in path.rglob("*"):
                left -= 1
                if left < 0:
                    return
                yield below


def _columns(spec: SinkSpec, files: Sequence[Path]) -> Sequence[str] | None:
    """The names of the input's columns; None when only Spark can find them."""
    source = spec.input.get("format") or {}
    is_partitioned = any("=" in below.name for below in _within(files))
    if source.get("sql") or is_partitioned:  # names of folders are columns too
        return None
    if source.get("schema"):
        try:
            return list(Schema.from_ddl(source["schema"], "").key.names)
        except InvalidUsage:
            return None  # a type that no shard can have: left to the run
    first = files[0] if files and files[0].is_file() else None
    if first is None:
        return None
    try:
        if source["name"] == "parquet":
            return list(pq.read_schema(first).names)
        if source["name"] == "csv":
            return _header(first, source.get("options") or {})
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException):
        return None  # the run reports the error in the file
    return None


def _header(path: Path, options: Mapping[str, str]) -> Sequence[str] | None:
    lowered = {name.lower(): value for name, value in options.items()}
    separator = lowered.get("sep", lowered.get("delimiter", ","))
    is_plain = not {"encoding", "charset", "compression", "comment", "linesep"} & lowered.keys() and len(separator) == 1
    if lowered.get("header") != "true" or not is_plain or path.suffix in {".gz", ".bz2", ".zst", ".xz"}:
        return None
    with path.open(encoding="utf-8-sig", newline="") as file:
        line = file.readline(_LINE_CHARS_MAX)
    return next(csv.reader([line], delimiter=separator, quotechar=lowered.get("quote") or '"'), None)


def _column_problems(spec: SinkSpec, shard: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    """The differences between the columns of the input and of the shard, as the run would report them."""
    try:
        declared = Schema.from_ddl(shard["schema"]["key"], shard["schema"].get("value") or "")
        schema = input_schema(declared, spec.envelope, columns)
    except InvalidUsage:
        return  # the plan of the shard, or the run, reports it
    if spec.envelope["type"] == "Debezium":
        return  # the columns are those of a change event, and only Spark can look into them
    problem = schema.column_problem(columns, beside=columns_beside(spec.envelope))
    if problem is not None:
        yield f"spec.input: {problem}"
