"""The sources of a stream: the source that the resource declares, or the sources in the plan of a stream that a function of the user made.

A sink must know the meaning of a source's positions, and the options that make it lose rows. A function has them in its code, so this
module reads them from Spark's plan. Starts no Spark job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame

from persist_spark.spec import PYTHON, ConfigurationError, Input, check_losses
from persist_spark.streaming.file_log import file_age_ms

PERSIST = "persist"
_FILES = "FileSource"


def streaming_nodes(plan: Any) -> Iterator[Any]:
    """The nodes of a plan through which rows of a stream pass."""
    if not plan.isStreaming():
        return
    yield plan
    for child in children_of(plan):
        yield from streaming_nodes(child)


def children_of(plan: Any) -> list[Any]:
    """The nodes from which a node takes its rows."""
    children = plan.children()
    return [children.apply(index) for index in range(children.size())]


def reads_files(frame: DataFrame) -> bool:
    """Whether a source is a folder of files, whatever the name of its format."""
    return any(_is_folder(node) for node in _leaves(frame))


def sources_of(source: Input, frame: DataFrame) -> list[Input]:
    """The sources of the stream, each as if the resource declared it. Raises ConfigurationError for a function's stream that a sink would
    refuse in a resource: one that skips lost rows, or whose list of read files would be lost.
    """
    if source.python is None:
        return [source]
    leaves = list(_leaves(frame))
    folders = sum(map(_is_folder, leaves))
    if folders and folders < len(leaves):
        raise ConfigurationError(
            f"input.python: {source.python.name} unites a folder of files with another source, and their positions are kept in different "
            "ways; make a sink for each of them"
        )
    found = [_as_input(node) for node in leaves]
    for one in found:
        check_losses(one.options)
    return found


def name_of(source: Input, sources: Sequence[Input]) -> str:
    """The name of the source in a position. It includes the shard for the format `persist`, because the offsets are only times."""
    names = [_name(one) for one in sources]
    return names[0] if source.python is None else " ".join([PYTHON, *names])


def lines_of(source: Input, frame: DataFrame) -> int | None:
    """How often the stream names its one source, because SQL may unite the input with itself. None if a function chose the sources."""
    return None if source.python is not None else sum(1 for _ in _leaves(frame))


def folders_of(source: Input, frame: DataFrame) -> list[str]:
    """The paths of the folders that a function reads, in the order of the sources. Empty unless it reads several."""
    found = [] if source.python is None else [node.sourceName() for node in _leaves(frame) if _is_folder(node)]
    return [name.removeprefix(f"{_FILES}[").removesuffix("]") for name in found] if len(found) > 1 else []


def oldest_file_ms(sources: Sequence[Input]) -> int:
    """How much older than the newest file a file may be. Raises ConfigurationError like `file_age_ms`."""
    return max(map(file_age_ms, sources))


def _name(source: Input) -> str:
    shards = [value for name, value in source.options.items() if name.lower() == "shard"]
    # As Spark takes it: in whatever letters.
    kind = source.format.lower()
    return " ".join([kind, *shards]) if kind == PERSIST else kind


def _leaves(frame: DataFrame) -> Iterator[Any]:
    for node in streaming_nodes(frame._jdf.queryExecution().analyzed()):
        if node.nodeName().startswith("StreamingRelation"):
            yield node


def _is_folder(node: Any) -> bool:
    return bool(node.nodeName() == "StreamingRelation" and node.sourceName().startswith(_FILES))


def _as_input(node: Any) -> Input:
    if node.nodeName() == "StreamingRelation":
        loaded = node.dataSource()
        pairs = loaded.options().toSeq()
        options = {str(pairs.apply(index)._1()): str(pairs.apply(index)._2()) for index in range(pairs.size())}
        return Input(format=str(loaded.className()), options=options)
    return Input(format=str(node.sourceName()), options=dict(node.extraOptions().asCaseSensitiveMap()))
