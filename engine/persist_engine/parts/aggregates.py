"""Facts about the rows of a read that state alone proves: their number, and the nulls and extreme values of fields (spec 15.13).

No part is fetched. Only statistics are used whose bounds are values of rows. Bounds of texts are not: they may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.model.batch import ColumnStats, InlinePart, Part
from persist_engine.model.frontier import Description
from persist_engine.parts.contents import Contents
from persist_engine.rows.comparable import Comparable, comparable_bound, scalar_of
from persist_engine.rows.part_stats import column_stats


@dataclass(frozen=True, slots=True)
class FieldAggregates:
    """What state proves of one field over all rows. None means unknown."""

    nulls: int | None
    least: pa.Scalar | None
    """The least value, of the field's type. As in SQL, it is null when no row has a value; `greatest` likewise."""
    greatest: pa.Scalar | None


@dataclass(frozen=True, slots=True)
class Aggregates:
    """Exact aggregates of the rows of a read. `fields` holds the requested fields by name."""

    rows: int
    fields: dict[str, FieldAggregates]


#: The number of rows of a piece of the read, and what is known of each field in it.
_Piece = tuple[int, dict[str, ColumnStats]]


def aggregates(contents: Contents, names: Sequence[str]) -> Aggregates | None:
    """The number of rows, and the aggregates of the fields `names`: `key.<field>` or `val.<field>`, outside structs.

    None unless state proves for every part that the read shows all of its rows, each once.
    """
    if contents.audits or contents.key_range is not None:
        return None
    pieces: list[_Piece] = []
    for batch in contents.batches:
        for part in batch.part_list():
            found = _pieces(contents, batch.desc, part, names)
            if found is None:
                return None
            pieces += found
    schema = contents.source.schema
    types = {f"{side}.{field.name}": field.type for side in ("key", "val") for field in getattr(schema, side)}
    fields = {name: _merged(name, pieces, types[name]) for name in names}
    return Aggregates(sum(rows for rows, _ in pieces), fields)


def _pieces(contents: Contents, desc: Description, part: Part, names: Sequence[str]) -> list[_Piece] | None:
    if isinstance(part, InlinePart):
        tables = [contents.shown(table) for table in contents.source.decode(part.data, part, desc)]
        if not all(pc.all(pc.equal(table.column("diff"), 1)).as_py() for table in tables):
            return None
        return [(table.num_rows, dict(_stats(table, names))) for table in tables]
    if not contents.counts_once(desc, part) or not (contents.where is None or contents.where.must_pass(part)):
        return None
    return [(part.rows, {} if part.stats is None else dict(part.stats.columns))]


def _stats(table: pa.Table, names: Sequence[str]) -> Iterator[tuple[str, ColumnStats]]:
    for name in names:
        side, field = name.split(".", 1)
        yield name, column_stats(pc.struct_field(table.column(side), [field]))


def _merged(name: str, pieces: Sequence[_Piece], data_type: pa.DataType) -> FieldAggregates:
    found = [(rows, columns.get(name)) for rows, columns in pieces if rows]
    known = [(rows, stats) for rows, stats in found if stats is not None]
    if len(known) != len(found):
        return FieldAggregates(None, None, None)
    valued = [stats for rows, stats in known if stats.null_count < rows]
    least = _extreme([stats.lower for stats in valued], data_type, is_least=True)
    greatest = _extreme([stats.upper for stats in valued], data_type, is_least=False)
    return FieldAggregates(sum(stats.null_count for _, stats in known), least, greatest)


def _extreme(bounds: Sequence[str | None], data_type: pa.DataType, *, is_least: bool) -> pa.Scalar | None:
    """The least or the greatest of `bounds`, which are values of rows. None when unknown, as for a float zero, whose sign is lost."""
    if pa.types.is_string(data_type) or pa.types.is_binary(data_type):
        return pa.scalar(None, data_type) if not bounds else None
    texts = [text for text in bounds if text is not None]
    if len(texts) < len(bounds):
        return None
    if not texts:
        return pa.scalar(None, data_type)
    values: list[Comparable] = [comparable_bound(text, data_type) for text in texts]
    value = min(values) if is_least else max(values)
    if pa.types.is_floating(data_type) and value[1] == 0:
        return None
    return scalar_of(value, data_type).cast(data_type)
