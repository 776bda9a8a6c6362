"""`upsert(df)`: makes each row of a frame the only value of its key, in one compare-and-append.

The rules are those of the envelope `Upsert` (../envelopes). This module owns the arguments of a table, and a run in the caller's process
instead of a sink's run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.envelopes.against import held, staged_updates
from persist_spark.envelopes.commands import upsert_commands
from persist_spark.envelopes.copied import copied
from persist_spark.envelopes.run_keys import RunKeys
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType
from persist_spark.table.attempt import Attempt, until_done
from persist_spark.table.shard import TableShard

#: The column that holds the result of `delete_when`.
_GONE = "_persist_gone"
#: Replaces the words of a sink's resource in messages by the arguments of `upsert`.
_WORDS = (
    ("set envelope.orderColumn to", "set order_by to"),
    ("envelope.orderColumn", "order_by"),
    ("envelope.deleteColumn", "delete_when"),
    ("with input.format.sql", "in the frame"),
    ("the input", "the frame"),
)


def upsert(
    table: TableShard, frame: DataFrame, *, order_by: str | None = None, delete_when: str | Column | None = None
) -> int:
    """Makes each row of `frame` the value of its key, or removes the key, and leaves all other keys alone. Returns the number of updates:
    two for a key whose value changes, and none for a key that already has its value.

    Raises ConfigurationError, and writes nothing, when columns do not fit or a key has no last row; InvalidUsage when the shard holds
    several values of a key; the last two name the key. Raises Unavailable when other writers changed the same keys for too long.
    """
    schema = table.schema()
    order = order_by if order_by in schema.val.names else None
    with _in_words_of_callers():
        commands = copied(_commands(frame, schema, order_by, delete_when), schema, order)
    if commands.count == 0:
        return 0

    def attempt(now: Attempt) -> int | None:
        with held(now.reader, now.minted.as_of, commands, blob=table.location.blob) as shard, _in_words_of_callers():
            staged = now.staged(staged_updates(commands, shard, now.task, tasks=None))
        if not staged.batches:
            return 0
        keys = RunKeys(
            count=staged.keys, fetch=lambda: commands.keys, where=commands.where, is_contestable=order is not None
        )
        return now.land(staged.batches, reads_back=True, where=keys.where, keys=keys)

    return until_done(table, schema, attempt)


def _commands(frame: DataFrame, schema: Schema, order_by: str | None, delete_when: str | Column | None) -> DataFrame:
    """Converts the rows to commands. Drops columns that only `delete_when` reads."""
    envelope = Envelope(
        type=EnvelopeType.UPSERT, order_column=order_by, delete_column=None if delete_when is None else _GONE
    )
    if delete_when is None:
        return upsert_commands(frame, schema, envelope)
    condition = F.expr(delete_when) if isinstance(delete_when, str) else delete_when
    wanted = {*schema.key.names, *schema.val.names, order_by}
    surplus = [name for name in frame.columns if name not in wanted]
    return upsert_commands(frame.withColumn(_GONE, condition).drop(*surplus), schema, envelope)


@contextmanager
def _in_words_of_callers() -> Iterator[None]:
    """Makes errors name the arguments of `upsert` instead of a sink's fields."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        for theirs, ours in _WORDS:
            text = text.replace(theirs, ours)
        raise ConfigurationError(text) from error
