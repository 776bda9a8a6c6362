"""Frames over Spark Connect show the contents of one time, chosen at the load, as the frames of classic sessions do.

A client of Spark Connect sends the plan of a frame with each action, and the server loads the format again each time. So at the load, the
client runs one small job that finds what a load shows now, and puts the answer into the plan as options. No option can name the rows of a
metadata table again, so the plan contains those rows themselves.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pyarrow as pa

from persist_spark.options import Options
from persist_spark.source.loaded import (
    EMPTY_OPTION,
    FORMAT,
    FRAME_OPTION,
    LOOK_OPTION,
    SCHEMA_OPTION,
    LoadedFrame,
    new_name,
)
from persist_spark.source.metadata import LoadedTable


def times_of(options: Options, loaded: LoadedFrame) -> LoadedTable:
    """The facts with which a client loads the same frame again: the shard, its schema, and the times, which are null for an empty frame."""
    columns = {
        "shard": pa.array([str(options.shard)]),
        "as_of": pa.array([loaded.as_of], pa.int64()),
        "start": pa.array([loaded.start], pa.int64()),
        "schema": pa.array([json.dumps(loaded.ddl)]),
    }
    return LoadedTable.of(pa.table(columns))


def pin_frames_at_load() -> None:
    """Makes each later `spark.read.format("persist").load()` of a Connect session in this process choose the times of its frame.

    SUBTLE: replaces `DataFrameReader.load`, once per process. A choice of the Python data source itself would live on the server, and only
    until the server forgets the plan.
    """
    from pyspark.sql.connect.readwriter import DataFrameReader

    original = DataFrameReader.load
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load(
        self: Any,
        path: Any = None,
        format: Any = None,  # noqa: A002 - Spark's name for it
        schema: Any = None,
        **options: Any,
    ) -> Any:
        frame = original(self, path, format, schema, **options)
        if (self._format or "").lower() != FORMAT:
            return frame
        given = {name.lower(): value for name, value in self._options.items()}
        if "table" in given:
            return self._client.createDataFrame(frame.toArrow(), frame.schema)

        [times] = original(_reader_of(self, given | {LOOK_OPTION: "true"}), path).collect()
        pinned = given | pinned_options(times.asDict(), is_feed="from" in given) | {FRAME_OPTION: new_name()}
        return original(_reader_of(self, pinned, schema=self._schema))

    DataFrameReader.load = load


def _reader_of(reader: Any, options: dict[str, str], *, schema: str = "") -> Any:
    """Another reader of the same session."""
    made = type(reader)(reader._client).format(FORMAT).options(**options)
    made._schema = schema
    return made


def pinned_options(times: dict[str, Any], *, is_feed: bool) -> dict[str, str]:
    """The options that make each load show what the first one showed."""
    frame, as_of = {"shard": times["shard"], SCHEMA_OPTION: times["schema"]}, times["as_of"]
    if as_of is None:
        return {**frame, EMPTY_OPTION: "true"}
    return frame | ({"from": str(times["start"]), "to": str(as_of + 1)} if is_feed else {"as_of": str(as_of)})
