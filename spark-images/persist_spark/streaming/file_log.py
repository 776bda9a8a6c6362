"""The list of the files that a stream over a folder has read. Spark keeps it in the checkpoint, and the position carries it.

The offset of such a source is the number of an entry of this list, so without the list a driver would read every file again. Spark's list
only grows. Spark itself ignores a file that is older than `maxFileAge` before the newest one, so such a file needs no place in the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.retention import retention_of

from persist_spark.spec import ConfigurationError, Input

#: Spark's default of `maxFileAge`.
MAX_FILE_AGE = "7d"
_HEAD, _COMPACT = "v1", ".compact"
#: What Spark writes in place of the offset of a folder that had no files yet.
_NO_OFFSET = "-"


def file_age_ms(source: Input) -> int:
    """The option `maxFileAge` of a folder of files. ConfigurationError for one that is no length of time, and for `latestFirst`, with which
    Spark reads old files late, so that none can be forgotten.
    """
    given = {name.lower(): (name, value) for name, value in source.options.items()}
    name, text = given.get("maxfileage", ("maxFileAge", MAX_FILE_AGE))
    latest = given.get("latestfirst")
    if latest is not None and latest[1].strip().lower() != "false":
        raise ConfigurationError(
            f"input.format.options.{latest[0]}: the sink would have to remember every file for ever; remove the option"
        )
    try:
        age_ms = retention_of(text)
    except InvalidUsage:
        age_ms = None
    if age_ms is None:
        raise ConfigurationError(
            f"input.format.options.{name}: {text[:40]!r} is not a length of time such as 7d, 12h or 30m"
        )
    return age_ms


def files_read(root: Path, *, offsets: str, age_ms: int) -> dict[str, str]:
    """Spark's folder `sources` as it must be for the batch after the one that ends at `offsets`: one file for each source that had files,
    with the files read until then that are not older than `age_ms` before the newest one.
    """
    ends = {
        index: json.loads(line)["logOffset"]
        for index, line in enumerate(offsets.splitlines()[2:])
        if line != _NO_OFFSET
    }
    return {f"{index}/{end}{_COMPACT}": _compacted(root / str(index), end, age_ms) for index, end in ends.items()}


def _compacted(folder: Path, end: int, age_ms: int) -> str:
    """SUBTLE: Spark names the file of a batch after it has chosen the batch's files, and may have begun to choose the next ones."""
    entries = {entry["path"]: entry for entry in _entries(folder) if entry["batchId"] <= end}
    newest = max((entry["timestamp"] for entry in entries.values()), default=0)
    kept = [entry for entry in entries.values() if entry["timestamp"] >= newest - age_ms]
    kept.sort(key=lambda entry: (entry["batchId"], entry["path"]))
    return "\n".join([_HEAD, *(json.dumps(entry, separators=(",", ":")) for entry in kept)])


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    """All entries of Spark's files. One named `.compact` has those of all files before it, of which Spark keeps many for ten minutes."""
    files = {int(path.name.removesuffix(_COMPACT)): path for path in folder.iterdir() if not path.name.startswith(".")}
    newest = max((batch for batch, path in files.items() if path.suffix == _COMPACT), default=-1)
    for path in (files[batch] for batch in sorted(files) if batch >= newest):
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        if head != _HEAD:
            raise ConfigurationError(
                f"this release of Spark writes its list of files as {head!r}, and not as {_HEAD!r}"
            )
        yield from map(json.loads, lines)
