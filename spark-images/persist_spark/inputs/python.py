"""An input that a function of the user makes: `load(spark, arguments)` in a module of the image, or in the files of a ConfigMap.

SUBTLE: the driver copies the files when it starts, and executors get the copies through Spark. So the driver and all its executors run the
same code, even if an executor starts after a change of the ConfigMap.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkFiles
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from persist_spark.failures import ExitCode, Terminated, UserCodeFailed, explained, is_stopped
from persist_spark.session import set_required
from persist_spark.spec import ConfigurationError, Input, PythonFunction

_FIELD = "input.python"
#: The limit of a ConfigMap. A folder on a laptop has the same limit, so that its files fit into a ConfigMap.
FILES_BYTES_MAX = 1 << 20
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_PACKED = frozenset({".zip", ".egg"})
_CAUSES_MAX = 5


def made_input(spark: SparkSession, source: Input, function: PythonFunction, *, streaming: bool) -> DataFrame:
    """Calls the function once and returns its frame, without the input's SQL. Call it at most once in a process, because Python imports a
    module only once.

    Raises ConfigurationError when files, the module or the function are missing, when the function has other parameters, and when the
    result is not the kind of DataFrame that the sink reads. Raises UserCodeFailed for an exception of the user's code, with its causes and
    the line.
    """
    if function.config_map is not None:
        _send(spark, function.config_map, function.folder)
    load = _function(function)
    arguments = dict(source.options)
    _check_parameters(load, function, spark, arguments)
    with _users_code(function, f"{function.name} failed"):
        made = load(spark, arguments)
    set_required(spark)
    return _checked(made, function, streaming=streaming)


def _send(spark: SparkSession, config_map: str, folder: Path | None) -> None:
    """Copies the files to places where the driver's and the executors' Python find modules."""
    where = f"{_FIELD}.configMapName: ConfigMap {config_map}"
    if folder is None or not folder.is_dir():
        raise ConfigurationError(
            f"{where} is not mounted{f' at {folder}' if folder else ''}; outside a cluster, make a folder {config_map} with its files in "
            "the current folder"
        )
    # Kubernetes links the files into a hidden folder, and replaces that folder when the ConfigMap changes.
    root = (folder / "..data").resolve() if (folder / "..data").exists() else folder
    # Like kubectl, this leaves out files whose names cannot be keys, such as backup files of editors.
    files = [one for one in sorted(root.iterdir()) if one.is_file() and _KEY.fullmatch(one.name)]
    if not files:
        raise ConfigurationError(
            f"{where} has no files; add the module, such as with kubectl create configmap --from-file"
        )
    size = sum(one.stat().st_size for one in files)
    if size > FILES_BYTES_MAX:
        raise ConfigurationError(
            f"{where} has {size} bytes in its files, and a ConfigMap holds {FILES_BYTES_MAX}; build an image"
        )
    for file in files:
        if file.suffix == ".py" and _is_taken(file.stem):
            raise ConfigurationError(
                f"{where} has the file {file.name}, and Python or the image has a module {file.stem} already; rename the file"
            )
    context = spark.sparkContext
    copies = Path(tempfile.mkdtemp(prefix="persist-code-", dir=context._temp_dir))
    for file in files:
        copy = copies / file.name
        copy.write_bytes(file.read_bytes())
        add = context.addPyFile if file.suffix == ".py" or file.suffix in _PACKED else context.addFile
        add(str(copy))
    importlib.invalidate_caches()


def _is_taken(name: str) -> bool:
    if name in sys.stdlib_module_names or name in sys.modules:
        return True
    return importlib.util.find_spec(name) is not None


def _function(function: PythonFunction) -> Any:
    try:
        with _users_code(function, f"{function.module} cannot be imported"):
            module = importlib.import_module(function.module)
    except UserCodeFailed as failed:
        cause = failed.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{function.module}.".startswith(f"{cause.name}."):
            raise ConfigurationError(f"{_FIELD}.module: no module {cause.name} {_looked_for(function)}") from cause
        raise
    found = getattr(module, function.function, None)
    if not callable(found):
        what = "" if found is None else f"; its {function.function} is of type {type(found).__name__}"
        raise ConfigurationError(
            f"{_FIELD}.function: module {function.module} has no function {function.function}{what}"
        )
    return found


def _looked_for(function: PythonFunction) -> str:
    if function.config_map is None:
        return "on the path of Python; build it into spark.image, or name the ConfigMap with its file in configMapName"
    return f"in ConfigMap {function.config_map}; its files are the modules of that name, such as orders.py"


def _check_parameters(load: Any, function: PythonFunction, spark: SparkSession, arguments: dict[str, str]) -> None:
    try:
        signature = inspect.signature(load)
    except (TypeError, ValueError):
        return  # a function written in C may have no signature
    try:
        signature.bind(spark, arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{_FIELD}.function: {function.name} must take (spark, arguments), and takes {signature}"
        ) from error


def _checked(made: Any, function: PythonFunction, *, streaming: bool) -> DataFrame:
    if inspect.iscoroutine(made):
        made.close()  # otherwise Python warns that the coroutine was never awaited
    if not isinstance(made, ClassicDataFrame):
        kind = "None" if made is None else f"a {type(made).__module__}.{type(made).__qualname__}"
        raise ConfigurationError(
            f"{_FIELD}: {function.name} returned {kind}, and a sink reads a DataFrame of Spark; return one, such as of "
            f"{'spark.readStream' if streaming else 'spark.read or spark.createDataFrame'}"
        )
    if made.isStreaming != streaming:
        wanted = (
            "a DataFrame that does not stream, and mode Streaming reads a stream; use spark.readStream, or mode Once or Scheduled"
            if streaming
            else "a streaming DataFrame, and only mode Streaming reads one; use spark.read, or mode Streaming"
        )
        raise ConfigurationError(f"{_FIELD}: {function.name} returned {wanted}")
    return made


@contextmanager
def _users_code(function: PythonFunction, what: str) -> Iterator[None]:
    """Within the block, every exception becomes UserCodeFailed. Its message begins with `what`. This includes an exit of the process, but
    not SIGTERM. If the user's code dropped the exception of a SIGTERM, the end of the block raises it again.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        chain = _chain(error)
        codes = [explained(one)[0] for one in chain]
        is_given = any(isinstance(one, ImportError | SyntaxError) for one in chain)
        line = next(filter(None, (_line(one, function) for one in reversed(chain))), "")
        causes = "; caused by ".join(_text(one) for one in chain)
        exit_code = ExitCode.CONFIGURATION if is_given else codes[-1]
        raise UserCodeFailed(f"{_FIELD}: {what}{line}: {causes}", exit_code) from error
    if is_stopped():
        raise Terminated


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, the innermost last. If there are too many, only the last ones."""
    chain: list[BaseException] = []
    next_one: BaseException | None = error
    while next_one is not None and not any(one is next_one for one in chain):
        chain.append(next_one)
        next_one = next_one.__cause__ or (None if next_one.__suppress_context__ else next_one.__context__)
    return chain[-_CAUSES_MAX:]


def _text(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return explained(error)[1]


def _line(error: BaseException, function: PythonFunction) -> str:
    """The innermost line of the user's files in the error's traceback. Empty when the traceback has none of these files."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    roots = _roots(function)
    for filename, line in reversed(places):
        if any(Path(filename).is_relative_to(root) for root in roots):
            return f" in {Path(filename).name}, line {line}"
    return ""


def _roots(function: PythonFunction) -> list[str]:
    """The folders or files with the user's code."""
    sent = [] if function.config_map is None else [SparkFiles.getRootDirectory()]
    spec = getattr(sys.modules.get(function.module.partition(".")[0]), "__spec__", None)
    return sent if spec is None else [*sent, *(spec.submodule_search_locations or [spec.origin or "none"])]
