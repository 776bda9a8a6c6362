"""Finds files that Spark chose for a batch and that were gone when it planned the batch.

Spark lists a folder for many batches at once. It treats a file that has gone since as empty, but its list says that the file was read. So a
file that came back under this name would never be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import SparkSession

from persist_spark.failures import ExitCode, UserCodeFailed
from persist_spark.source.native import java_class
from persist_spark.streaming.sources import children_of

#: The most names in a message.
_SHOWN = 3


def check_files(spark: SparkSession, query: str, logs: Mapping[str, str], *, after: Mapping[str, str]) -> None:
    """Checks the running batch of the query with this id: Spark must have planned every file that is in `logs` but not in `after`, the logs
    of the batch before. Raises UserCodeFailed, of class Application, which names the files that are gone. The next driver lists the folder
    anew.
    """
    chosen = {json.loads(line)["path"] for line in set(_lines(logs)) - set(_lines(after))}
    running = spark._jsparkSession.streams().get(query) if chosen else None
    if running is None:  # there is nothing to check, or a function of the user made another session for the query
        return
    planned = {
        path for leaf in _leaves(running.streamingQuery().lastExecution().logical()) for path in _files(spark, leaf)
    }
    if gone := sorted(chosen - planned):
        names = ", ".join(gone[:_SHOWN]) + (f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else "")
        raise UserCodeFailed(
            f"input.format: {names}: gone after the folder was listed and before the file was read. Nothing of this batch was written, "
            "and the next driver lists the folder again; remove or rename files only after they were read",
            ExitCode.APPLICATION,
        )


def _lines(logs: Mapping[str, str]) -> Iterator[str]:
    for text in logs.values():
        yield from text.splitlines()[1:]


def _leaves(plan: Any) -> Iterator[Any]:
    children = children_of(plan)
    if not children and plan.getClass().getSimpleName() == "LogicalRelation":
        yield plan
    for child in children:
        yield from _leaves(child)


def _files(spark: SparkSession, leaf: Any) -> list[str]:
    relation = leaf.relation()
    if relation.getClass().getSimpleName() != "HadoopFsRelation":
        return []
    texts = java_class(spark._jvm, "org.apache.hadoop.util.StringUtils")
    return str(texts.join("\n", relation.location().inputFiles())).split("\n")
