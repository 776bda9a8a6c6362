"""The list of the files that a stream over a folder has read. Spark keeps it in the checkpoint, and the position carries it.

The offset of such a source is the number of an entry of this list, so without the list a driver would read every file again. Spark's list
only grows. Spark ignores a file that is older than the newest file by more than `maxFileAge`, so the list need not contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated
from persist_engine.model.retention import retention_of

from persist_spark.spec import ConfigurationError, Input

#: Spark's default of `maxFileAge`.
MAX_FILE_AGE = "7d"
_HEAD, _COMPACT = "v1", ".compact"
#: A file beside Spark's own files, which Spark ignores because of its name. It has the time of the newest file that the list has forgotten.
_FORGOTTEN = ".forgotten"
#: The text that Spark writes instead of an offset for a folder without files.
_NO_OFFSET = "-"


def file_age_ms(source: Input) -> int:
    """The option `maxFileAge` of a folder of files, in milliseconds. Raises ConfigurationError for a value that is not a length of time,
    and for `latestFirst`: Spark then reads old files late, so no file can be forgotten.
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


def check_goes_on(logs: Mapping[str, str], *, age_ms: int, folders: Sequence[str]) -> None:
    """Checks that Spark reads no file again after `logs`, which `files_read` made. Raises ConfigurationError when a forgotten file is not
    too old for `age_ms`, or when a folder had another place among `folders`, the paths of all sources.
    """
    lists = {int(path.partition("/")[0]): text for path, text in logs.items() if path.endswith(_COMPACT)}
    for index, text in lists.items():
        entries = [json.loads(line) for line in text.splitlines()[1:]]
        newest, forgotten = max((each["timestamp"] for each in entries), default=0), logs.get(f"{index}/{_FORGOTTEN}")
        if forgotten is not None and newest - age_ms <= int(forgotten):
            raise ConfigurationError(
                "input.format.options.maxFileAge: it was lower before, and the sink has forgotten files that are now young enough to be "
                f"read again. Until the folder has newer files, set less than {newest - int(forgotten)}ms"
            )
        homes = {at for at, folder in enumerate(folders) if any(_is_in(each["path"], folder) for each in entries)}
        if homes and index not in homes:
            raise ConfigurationError(
                f"input.python: {folders[min(homes)]} was source {index} of the function and is source {min(homes)} now, so its files "
                "would be read again; unite the folders in the order in which the sink has read them, or create another sink"
            )


def check_times(logs: Mapping[str, str], *, after: Mapping[str, str], now_ms: int, age_ms: int) -> None:
    """Raises ConfigurationError when a file that `logs` has and `after`, of the batch before, has not is later than the clock by more
    than `age_ms`: Spark counts the age of files from the newest one, and would pass over every file that comes until then.
    """
    read = {line for text in after.values() for line in text.splitlines()[1:]}
    chosen = (json.loads(line) for text in logs.values() for line in text.splitlines()[1:] if line not in read)
    newest = max(chosen, key=lambda each: int(each["timestamp"]), default=None)
    if newest is not None and newest["timestamp"] > now_ms + age_ms:
        raise ConfigurationError(
            f"input.format: {newest['path']} has a time that is more than maxFileAge ({age_ms}ms) ahead of the clock: "
            f"{dated(newest['timestamp'])}, where the driver has {dated(now_ms)}. Spark would pass over all files that are older than "
            "maxFileAge before it. Nothing of this batch was written; correct the clock, or the time of the file, such as by a copy of it"
        )


def _is_in(file: str, folder: str) -> bool:
    """Whether a file is below a path. `file`: Spark's URI of the file. A path without a scheme matches any file system."""
    name, home = urlsplit(file), Path(folder)
    if "://" in folder or folder.startswith("file:"):
        at = urlsplit(folder)
        if (at.scheme, at.netloc) != (name.scheme, name.netloc):
            return False
        home = Path(at.path)
    return Path(unquote(name.path)).is_relative_to(home)


def files_read(root: Path, *, offsets: str, age_ms: int) -> dict[str, str]:
    """The files that Spark's folder `sources` must have for the batch after the one that ends at `offsets`. There is one file for each
    source that had files. It lists the files that were read and are not older than the newest one by more than `age_ms`.
    """
    lines, folders = offsets.splitlines()[2:], sum(1 for _ in root.iterdir())
    if 1 < folders < len(lines):
        raise ConfigurationError(
            "input.python: the function, or sql, names one folder twice beside another folder; name each folder once"
        )
    # SQL that names its one folder twice has two equal offsets.
    ends = {index: json.loads(line)["logOffset"] for index, line in enumerate(lines[:folders]) if line != _NO_OFFSET}
    found: dict[str, str] = {}
    for index, end in ends.items():
        folder = root / str(index)
        found[f"{index}/{end}{_COMPACT}"], forgotten_ms = _compacted(folder, end, age_ms)
        if (forgotten_ms := max(forgotten_ms, _forgotten_ms(folder))) >= 0:
            found[f"{index}/{_FORGOTTEN}"] = str(forgotten_ms)
    return found


def _compacted(folder: Path, end: int, age_ms: int) -> tuple[str, int]:
    """The list, and the time of the newest file that it forgets, or -1 if it forgets none.

    SUBTLE: Spark names the file of a batch after it has chosen the batch's files, and may have begun to choose the next ones.
    """
    entries = {entry["path"]: entry for entry in _entries(folder) if entry["batchId"] <= end}
    newest = max((entry["timestamp"] for entry in entries.values()), default=0)
    kept = [entry for entry in entries.values() if entry["timestamp"] >= newest - age_ms]
    kept.sort(key=lambda entry: (entry["batchId"], entry["path"]))
    forgotten_ms = max(
        (each["timestamp"] for each in entries.values() if each["timestamp"] < newest - age_ms), default=-1
    )
    return "\n".join([_HEAD, *(json.dumps(entry, separators=(",", ":")) for entry in kept)]), forgotten_ms


def _forgotten_ms(folder: Path) -> int:
    path = folder / _FORGOTTEN
    return int(path.read_text(encoding="utf-8")) if path.exists() else -1


def _entries(folder: Path) -> Iterator[dict[str, Any]]:
    """All entries of Spark's files. A file named `.compact` has the entries of all files before it. Spark keeps those files for ten
    minutes.
    """
    files = {int(path.name.removesuffix(_COMPACT)): path for path in folder.iterdir() if not path.name.startswith(".")}
    newest = max((batch for batch, path in files.items() if path.suffix == _COMPACT), default=-1)
    for path in (files[batch] for batch in sorted(files) if batch >= newest):
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        if head != _HEAD:
            raise ConfigurationError(
                f"this release of Spark writes its list of files as {head!r}, and not as {_HEAD!r}"
            )
        yield from map(json.loads, lines)
