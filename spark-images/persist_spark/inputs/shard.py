"""A shard as the input of a sink. A run reads its contents at one time. A stream reads its contents and then its changes.

The driver chooses the time of a run once, and holds it with its own leased reader. So the time stays readable however often the run reads
its input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from persist_engine import Location, PersistClient
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.datasource import register
from persist_spark.inputs.format import read_input
from persist_spark.options import Options, instant
from persist_spark.partitions import sink_settings
from persist_spark.row_shape import condition, row_type
from persist_spark.source.names import with_shard_id
from persist_spark.source.stream_read import StreamOptions, stream_row_type
from persist_spark.spec import TARGET_PART_BYTES, ConfigurationError, SinkSpec

#: The columns of a stream before the fields of its rows: the time of an update, and its diff.
TIME, DIFF = "_time", "_diff"


@dataclass(frozen=True, slots=True)
class RunInput:
    """The input of one run."""

    read: Callable[[], DataFrame]
    """Every call shows the same rows, if the source can do that. A shard can."""
    upper: int | None = None
    """For a shard: the run reads all updates at times before this one."""


def resolved(spec: SinkSpec) -> SinkSpec:
    """Replaces the name of the input shard by its id. Raises ConfigurationError for a name without a shard, for the shard that the sink
    writes, and for a condition or columns that do not fit the shard.
    """
    if not spec.input.is_shard:
        return spec
    with _explained():
        options = with_shard_id(spec.input.options)
    if options["shard"] == spec.shard_id and _is_of_the_sink(options, spec):
        raise ConfigurationError(f"input.shard.name: the sink writes shard {spec.shard_id}, so it cannot read it")
    with _explained():  # found later, the same errors would be a Python stack in Spark's error
        if spec.stream is not None:
            stream_row_type(StreamOptions.parse(options))
        else:
            batch = Options.parse(options)
            with _opened(batch.location) as client:
                schema = client.schema(batch.shard)
            if batch.where is not None:
                condition(batch.where, schema, "where")
            row_type(schema, updates=False, columns=batch.columns)
    return replace(spec, input=replace(spec.input, options=options))


def _is_of_the_sink(options: Mapping[str, str], spec: SinkSpec) -> bool:
    """Whether the input and the sink have the same stores, even if their addresses are written differently."""
    if options["blob"] == spec.blob:
        return True
    source = Location(blob=options["blob"], consensus=options["consensus"])
    with _opened(source) as reads, _opened(Location(blob=spec.blob, consensus=spec.consensus)) as writes:
        return reads.store_id == writes.store_id


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except InvalidUsage as error:
        raise ConfigurationError(f"input.shard: {error}") from error


def _opened(location: Location) -> PersistClient:
    return PersistClient.open(location, settings=sink_settings(TARGET_PART_BYTES), env=SystemEnv(), create=False)


@contextmanager
def named_input(spec: SinkSpec) -> Iterator[None]:
    """Within the block, errors name the input as the user wrote it: `input.shard` or `input.python` instead of `input.format`."""
    try:
        yield
    except ConfigurationError as error:
        if not spec.input.is_shard and spec.input.python is None:
            raise
        # The options of a function are in its code.
        text = (
            str(error).replace("input.format.options.", "input.python: the option ")
            if spec.input.python
            else str(error)
        )
        block = "python" if spec.input.python else "shard"
        raise ConfigurationError(text.replace("input.format", f"input.{block}")) from error


@contextmanager
def opened_input(spark: SparkSession, spec: SinkSpec, *, env: Env) -> Iterator[RunInput]:
    """Yields the input of one run. The rows of a shard are readable within the block. A row that the shard holds n times comes n times.

    Raises ConfigurationError for a shard without a complete time, and for a time before its since or after its last complete time.
    """
    if spec.input.python is not None:
        register(spark, blob=spec.blob, consensus=spec.consensus)
        made = read_input(spark, spec.input)  # the user's code runs once
        yield RunInput(lambda: made)
        return
    if not spec.input.is_shard:
        yield RunInput(lambda: read_input(spark, spec.input))
        return
    source = resolved(spec).input
    options = Options.parse(source.options)
    register(spark, blob=spec.blob, consensus=spec.consensus)
    with (
        _opened(options.location) as client,
        client.open_leased_reader(options.shard, purpose=f"{spec.purpose}, input") as reader,
    ):
        newest = client.recent_upper(options.shard).newest_complete
        if newest < 0:
            raise ConfigurationError(f"input.shard: nothing was written to shard {options.shard} yet; write it first")
        as_of = newest if options.as_of is None else instant(options.as_of, env.now_ms())
        if as_of > newest or not reader.since.less_equal(as_of):
            raise ConfigurationError(
                f"input.shard.asOf: {dated(as_of)} cannot be read: shard {options.shard} is readable from "
                f"{dated(reader.since.time)} to {dated(newest)}; choose a time between them, or none"
            )
        pinned = replace(source, options={**source.options, "as_of": str(as_of)})
        yield RunInput(lambda: read_input(spark, pinned), as_of + 1)


def flat_changes(changes: DataFrame, spec: SinkSpec) -> DataFrame:
    """The updates of a stream as flat rows: `_time`, `_diff`, the fields of the key, the fields of the value. Without SQL, a sink gets
    `_time` and `_diff` only if its envelope names them. Raises ConfigurationError when two columns have one name.
    """
    fields = [(side, name) for side in ("key", "val") for name in changes.schema[side].dataType.names]
    names = [TIME, DIFF, *(name for _, name in fields)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigurationError(
            f"input.shard: {', '.join(doubled)} would be the name of two columns; choose among them with input.shard.columns"
        )
    given = {spec.envelope.timestamp_column, spec.envelope.diff_column}
    beside = [
        F.col(column).alias(name)
        for column, name in (("time", TIME), ("diff", DIFF))
        if spec.input.sql is not None or name in given
    ]
    return changes.select(*beside, *(F.col(side).getField(name).alias(name) for side, name in fields))


def check_continues(spec: SinkSpec, offsets: str | None) -> None:
    """Checks that the shard still has the changes after the batch that ends at Spark's `offsets`. Raises ConfigurationError when the
    shard's since has passed them, because the stream would have to skip changes.
    """
    before = read_before(spec, offsets)
    if before is None:
        return
    options = StreamOptions.parse(spec.input.options)
    with _opened(options.location) as client:
        since = client.inspect(options.shard).since
    if since is None or since >= before:
        raise ConfigurationError(
            f"input.shard: the sink has read shard {options.shard} up to {dated(before)}, and its since is {dated(since)}, so the times of "
            "changes up to since are no longer known. Begin with another sink and another shard, and let the input keep more times: its "
            "retention.sinceLagSeconds must be longer than the longest stop of a driver"
        )


def read_before(spec: SinkSpec, offsets: str | None) -> int | None:
    """The time before which a stream has read all updates, after the batch that ends at Spark's `offsets`. None before the first batch, and
    for an input that is not a shard.
    """
    if not spec.input.is_shard or offsets is None:
        return None
    upper = min(int(json.loads(line)["upper"]) for line in offsets.splitlines()[2:])
    return None if upper < 0 else upper
