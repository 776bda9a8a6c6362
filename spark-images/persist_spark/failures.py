"""Converts an exception to the failure that the operator reads: a failure class, an exit code and one message without secrets.

An engine error on an executor reaches the driver only as text inside a Spark exception. `carried` therefore writes it as one marked JSON
line, and `classify` finds that line again, so that the class does not depend on where the error was raised.
"""

from __future__ import annotations

import enum
import json
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType

from persist_engine.base.errors import (
    BatchExpired,
    CorruptData,
    Fenced,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    StorageError,
    Unavailable,
    UnsafeStore,
    UpdateBeyondUpper,
    UpdateNotBeyondLower,
)
from persist_engine.base.secrets import without_secrets

#: A message becomes the text of a condition. The API server and the kubelet truncate longer ones (the termination log at 4 KiB).
MESSAGE_CHARS_MAX = 1800
#: The rest of the report takes some hundred bytes. A report that the kubelet truncates is not valid JSON.
MESSAGE_BYTES_MAX = 3000
_MARK = "PERSIST-FAILURE"
_CARRIED = re.compile(_MARK + r" (\{.*?\}) " + _MARK, re.DOTALL)
_SPARK_CONFIGURATION = (
    "AnalysisException",
    "ParseException",
    "PATH_NOT_FOUND",
    "DATA_SOURCE_NOT_FOUND",
    "ClassNotFoundException",
)


#: Data exceptions (22), errors in SQL (42) and errors that SQL raises on purpose (P0001). The same input fails again in the same way.
_SQLSTATE = re.compile(r"SQLSTATE: (?:22|42|P0001)")
#: Messages of file readers for files that do not have the format in input.format.
_MALFORMED_FILE = re.compile(
    r"is not a Parquet file|PARQUET_COLUMN_DATA_TYPE_MISMATCH|Malformed ORC file|Not an Avro data file|"
    r"CSV header does not conform to the schema|Number of column in CSV header is not equal"
)
#: Messages of readers of columnar files for a file that does not end as its format demands, with the file.
_NOT_WHOLE = re.compile(
    r"^(?:\w+: )?(?:(\S.*) is not a Parquet file|(?:Malformed|Not a valid) ORC file (\S.*?)(?:\. | \())", re.MULTILINE
)
#: Spark's error condition for a file that it listed and that is gone when a task reads it, with the file.
_FILE_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST\] Encountered error while reading file (.+?)\. File does not exist\."
)
#: What Hadoop and Spark say of a path that they do not read, and what to do.
_REMEDIES = (
    (
        "Relative path in absolute URI",
        "Hadoop cannot read the file, because its name has a colon: rename it",
    ),
    (
        "Option 'basePath' must be a directory",
        "a stream reads folders: name the folder in input.format.options, and a single file of it with the option pathGlobFilter",
    ),
)
#: Spark's error condition for a block of `localCheckpoint` whose executor is gone.
_LOST_COPY = "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND"
_CAUSED_BY, _CAUSES_MAX = "Caused by: ", 5
_JAVA_FRAMES = ("\tat ", "\t... ", "JVM stacktrace")
_PACKAGE = re.compile(r"^(?:[a-z]\w*\.)+(?=[A-Z])")


class FailureClass(enum.StrEnum):
    """The cause of a failure, as in the SparkSink's status. It shows what to check: the job's log (Application), the store (Storage),
    nothing because another run won (Fenced), or the resource (Configuration).
    """

    APPLICATION = "Application"
    STORAGE = "Storage"
    FENCED = "Fenced"
    CONFIGURATION = "Configuration"


class ExitCode(enum.IntEnum):
    """The exit codes of the driver process."""

    SUCCEEDED = 0
    APPLICATION = 1
    STORAGE = 70
    FENCED = 71
    CONFIGURATION = 72
    DIVERGENCE = 73
    """Durable bytes are damaged or violate an invariant. A retry does not help; a person must investigate. Reported as class Storage."""

    @property
    def failure_class(self) -> FailureClass | None:
        """The class to report; None for success."""
        return _CLASSES.get(self)


_CLASSES = {
    ExitCode.APPLICATION: FailureClass.APPLICATION,
    ExitCode.STORAGE: FailureClass.STORAGE,
    ExitCode.FENCED: FailureClass.FENCED,
    ExitCode.CONFIGURATION: FailureClass.CONFIGURATION,
    ExitCode.DIVERGENCE: FailureClass.STORAGE,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure to report."""

    exit_code: ExitCode
    message: str

    @property
    def failure_class(self) -> FailureClass:
        """The failure class in the report."""
        return self.exit_code.failure_class or FailureClass.APPLICATION


class TaskFailure(Exception):
    """An engine error on an executor, on its way to the driver."""


class UserCodeFailed(Exception):
    """An exception of the user's code, as a message, with the exit code that it implies."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM. The run appended nothing after that.

    A KeyboardInterrupt, because py4j takes any other exception within a call for an error of its connection: it raises another one in its
    place, or sends the call again and drops the stop.
    """

    def __init__(self) -> None:
        super().__init__("stopped by SIGTERM; the run was not finished")


def ignore_stop(_signal: int, _frame: FrameType | None) -> None:
    """The handler of SIGTERM after the first one."""


def is_stopped() -> bool:
    """Whether the process got SIGTERM, and must end by Terminated."""
    return signal.getsignal(signal.SIGTERM) is ignore_stop


def carried(error: PersistError) -> TaskFailure:
    """`error` as text that Spark passes on unchanged."""
    payload = json.dumps({"exit_code": int(_exit_code_of(error)), "message": str(error)})
    return TaskFailure(f"{_MARK} {payload} {_MARK}")


def is_lost_copy(error: Exception) -> bool:
    """Whether Spark lost, with an executor, rows that a run had copied there (`localCheckpoint`). A new run of the same input finds the
    same rows. Spark itself cannot compute them again.
    """
    return _LOST_COPY in str(error)


def classify(error: BaseException, *, secrets: Iterable[str] = ()) -> Failure:
    """The failure for `error`. Total: an unknown error has the class Application."""
    exit_code, text = explained(error)
    return Failure(exit_code, redact(text, secrets=secrets))


def explained(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the full message of `error`, with its secrets."""
    if isinstance(error, UserCodeFailed):
        return error.exit_code, str(error)
    if isinstance(error, PersistError):
        return _exit_code_of(error), str(error)
    text = str(error)
    found = _carried_in(text)
    if found is not None:
        return found
    name = type(error).__name__
    causes = _causes(text)
    if gone := _FILE_GONE.search("\n".join(causes)):
        return ExitCode.APPLICATION, (
            f"{gone[1]}: gone after the input was listed and before the file was read. Nothing of these rows was written, and the next "
            "attempt lists the input again; remove or rename files only while nothing reads them"
        )
    if not_whole := _NOT_WHOLE.search("\n".join(causes)):
        return ExitCode.CONFIGURATION, (
            f"{not_whole[1] or not_whole[2]}: the file is damaged, or still being written, or has another format than input.format.name. "
            f"Nothing was written; mend or remove the file, and move only whole files into place: {_summary(name, text, causes)}"
        )
    remedies = [remedy for said, remedy in _REMEDIES if any(said in one for one in causes)]
    is_given = _is_spark_configuration(name, text) or _is_malformed_input(causes) or bool(remedies)
    exit_code = ExitCode.CONFIGURATION if is_given else ExitCode.APPLICATION
    return exit_code, "; ".join([_summary(name, text, causes), *remedies])


def redact(text: str, *, secrets: Iterable[str] = ()) -> str:
    """`text` without secrets (`without_secrets`), shortened in the middle to the length of a message. As in a Python traceback, the
    beginning shows what failed and the end shows why.
    """
    text = without_secrets(text, secrets=secrets).encode(errors="replace").decode()
    room = MESSAGE_CHARS_MAX
    while (size := len(json.dumps(cut := _cut(text, room), ensure_ascii=False).encode())) > MESSAGE_BYTES_MAX:
        room = min(room, len(text)) * MESSAGE_BYTES_MAX // size
    return cut


def _cut(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    head = room // 3
    return f"{text[:head]}…{text[len(text) - (room - 1 - head) :]}"


def _exit_code_of(error: PersistError) -> ExitCode:
    match error:
        case Fenced():
            return ExitCode.FENCED
        case StorageError() | Unavailable() | UnsafeStore():
            return ExitCode.STORAGE
        case InvariantViolated() | CorruptData():
            return ExitCode.DIVERGENCE
        # The input changed while it was read, or an orphan scan deleted a batch that was staged too long ago: a retry may succeed.
        case UpdateBeyondUpper() | UpdateNotBeyondLower() | BatchExpired():
            return ExitCode.APPLICATION
        case InvalidUsage() | Incompatible():
            return ExitCode.CONFIGURATION
        case _:
            return ExitCode.APPLICATION


def _carried_in(text: str) -> tuple[ExitCode, str] | None:
    """The failure that `carried` wrote into `text`. None when it is missing or truncated: the JVM prints the Python traceback verbatim, but
    a log line may be cut.
    """
    found = _CARRIED.search(text)
    if found is None:
        return None
    try:
        payload = json.loads(found[1])
        return ExitCode(payload["exit_code"]), str(payload["message"])
    except (ValueError, KeyError):
        return None


def _is_spark_configuration(name: str, text: str) -> bool:
    head = text[:2000]
    return name in _SPARK_CONFIGURATION[:2] or any(
        f"[{mark}" in head or f".{mark}" in head for mark in _SPARK_CONFIGURATION
    )


def _is_malformed_input(causes: list[str]) -> bool:
    return any(_SQLSTATE.search(one) or _MALFORMED_FILE.search(one) for one in causes)


def _summary(name: str, text: str, causes: list[str]) -> str:
    """The error without Java's stack frames. A chain of causes becomes one line, with the innermost last, which names the file, record
    or value.
    """
    if len(causes) > 1:
        return "; caused by ".join(" ".join(one.split()) for one in causes)
    return f"{name}: {causes[0] if causes else text}" if text else name


def _causes(text: str) -> list[str]:
    """The messages of a Java stack trace: the one before its first frame, and one after each `Caused by`. Each appears once. If there are
    more than _CAUSES_MAX, only the last ones.
    """
    found: list[list[str]] = [[]]
    is_message = True
    for line in text.splitlines():
        if line.startswith(_CAUSED_BY):
            found.append([_PACKAGE.sub("", line.removeprefix(_CAUSED_BY))])
            is_message = True
        elif line.startswith(_JAVA_FRAMES):
            is_message = False
        elif is_message and not line.startswith("An error occurred while calling "):
            # py4j writes a colon before the Java exception.
            found[-1].append(_PACKAGE.sub("", line.removeprefix(": ")) if line.startswith(": ") else line)
    causes = dict.fromkeys("\n".join(lines).strip() for lines in found)
    return [one for one in causes if one][-_CAUSES_MAX:]
