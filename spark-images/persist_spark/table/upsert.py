"""`upsert(df)`: makes each row of a frame the one value of its key, in one compare-and-append.

The rules are those of the envelope `Upsert` (../envelopes). This module owns what a table adds: the arguments, and a run in the caller's
process in the place of a sink's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.envelopes.against import first_updates, updates_against
from persist_spark.envelopes.commands import upsert_commands
from persist_spark.envelopes.run_keys import RunKeys
from persist_spark.envelopes.winners import decided
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType
from persist_spark.staging import persisted
from persist_spark.table.attempt import Attempt, until_done
from persist_spark.table.shard import TableShard

#: The column that `delete_when` becomes.
_GONE = "_persist_gone"
#: The cores to spread the reading of the shard over. A client does not know those of the server.
_READ_CORES = 16
#: Words of a sink's resource in messages, and what a caller of `upsert` has in their place.
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
    """Makes each row of `frame` the value of its key, or removes the key, and leaves all other keys alone. Returns the number of updates: a
    key that changes its value counts as two, and one that has its value already as none.

    ConfigurationError, and nothing is written, when columns do not fit or a key has no last row. When the shard holds several values of a
    key, a Spark exception names the key. Unavailable when other writers changed the same keys for too long.
    """
    schema = table.schema()
    with _in_words_of_callers():
        winners = decided(_commands(frame, schema, order_by, delete_when), schema)
    if winners.count == 0:
        return 0
    order = order_by if order_by in schema.val.names else None
    keys = RunKeys(
        count=winners.count, fetch=lambda: winners.keys, where=winners.where, is_contestable=order is not None
    )

    def attempt(now: Attempt) -> int | None:
        if now.minted.as_of is None:
            staged = now.stage(first_updates(winners))
        else:
            session, blob = frame.sparkSession, table.location.blob
            with persisted(
                session, now.reader, now.minted.as_of, schema, blob=blob, cores=_READ_CORES, where=winners.where
            ) as held:
                staged = now.stage(updates_against(held, winners, order_column=order))
        if not staged.batches:
            return 0
        return now.land(staged.batches, reads_back=True, where=winners.where, keys=keys)

    return until_done(table, schema, attempt)


def _commands(frame: DataFrame, schema: Schema, order_by: str | None, delete_when: str | Column | None) -> DataFrame:
    """The rows as commands. Columns that only `delete_when` reads are dropped."""
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
    """Names arguments in the place of a sink's fields."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        for theirs, ours in _WORDS:
            text = text.replace(theirs, ours)
        raise ConfigurationError(text) from error
