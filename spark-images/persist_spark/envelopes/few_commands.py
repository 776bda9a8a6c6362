"""Chooses the winner of each key among the commands of a small batch, in the driver's memory. Vectorised over Arrow; knows no Spark and no
store.

It makes the same choice as `against.py` does on executors. It refuses nothing: where `against.py` would refuse, it decides nothing, so that
only `against.py` makes error messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from persist_engine import Undecided, holds_errors, last_of_each_key
from persist_engine.rows.schema import Schema

from persist_spark.columns import struct_column


@dataclass(frozen=True, slots=True)
class FewWinners:
    """The winners of a batch."""

    commands: pa.Table
    """`key`; `val`, which is null to remove the key; `order`. Each key occurs once."""
    rows: int
    """The number of rows in the batch."""
    errors: int
    """How many of these rows are errors (collected.py)."""


def few_winners(found: pa.Table, schema: Schema) -> FewWinners | None:
    """The winners among the commands `found`, which have the columns of commands.py. None when a command cannot be carried out, when a key
    has no last command, or when Arrow and Spark compare orders of this type differently.
    """
    order = found.column("o").combine_chunks()
    if found.column("fault").null_count < found.num_rows or not _is_ranked(order.type):
        return None
    rows = pa.table(
        {"key": struct_column(found, "k", schema.key_type), "val": struct_column(found, "v", schema.val_type)}
    )
    deleted = found.column("deleted").to_numpy()
    won = last_of_each_key(rows, order, deleted)
    if isinstance(won, Undecided):
        return None
    commands = rows.select(["key"]).append_column("order", pa.chunked_array([order])).take(pa.array(won))
    # Arrow takes null for a masked position, so removals have a null value.
    kept = rows.column("val").take(pa.array(won, mask=deleted[won]))
    is_error = found.column(f"k{len(schema.key) - 1}").is_valid() if holds_errors(schema) else None
    return FewWinners(
        commands=commands.add_column(1, "val", kept),
        rows=int(found.column("weight").to_numpy().sum()),
        errors=0 if is_error is None else int(is_error.to_numpy().sum()),
    )


def _is_ranked(kind: pa.DataType) -> bool:
    """Whether Arrow orders values of this type as Spark does. It does not for floats, because of NaN."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_string(kind)
        or pa.types.is_decimal(kind)
    )
