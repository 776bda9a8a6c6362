"""The schemas of the shard of a history, and its rows as the witness counts them.

A row is counted by its id, its name and the columns that later schemas added, without nulls at its end. So the rows of a reader under an
older schema are the cut rows of the witness, and a column that the engine loses on the way shows as another row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pyarrow as pa
from persist_engine.rows.schema import Schema

from persist_kit.world import SCHEMA

Data = tuple[Any, ...]
_NOTE = ("note", pa.string())
#: The schemas in the order in which histories evolve them: a column is added, then another one, which is widened.
SCHEMAS = (
    SCHEMA,
    Schema(SCHEMA.key, pa.schema([*SCHEMA.val, _NOTE])),
    Schema(SCHEMA.key, pa.schema([*SCHEMA.val, _NOTE, ("size", pa.int32())])),
    Schema(SCHEMA.key, pa.schema([*SCHEMA.val, _NOTE, ("size", pa.int64())])),
)
#: What `Table.alter` takes to make each schema from the one before.
ALTERATIONS: tuple[dict[str, Any], ...] = ({"add": "note STRING"}, {"add": "size INT"}, {"widen": {"size": "BIGINT"}})
#: A size that only the widened column holds, and one that each column holds.
LARGE, SMALL = 1 << 40, 7
assert all(newer.key == older.key for older, newer in pairwise(SCHEMAS)), "keys do not evolve"


def position_of(schema: Schema) -> int:
    """The position of `schema` in SCHEMAS."""
    return SCHEMAS.index(schema)


def added_names(width: int) -> list[str]:
    """The names of the columns that the first `width` columns of a row have beside id and name."""
    return list(SCHEMAS[-1].val.names[1 : width - 1])


def width_of(schema: Schema) -> int:
    """The number of columns of a row of `schema`."""
    return len(schema.key) + len(schema.val)


def data_of(update: Mapping[str, Any]) -> Data:
    """The row of an update with the structs `key` and `val`."""
    return cut((*update["key"].values(), *update["val"].values()))


def cut(data: Iterable[Any], width: int | None = None) -> Data:
    """The first `width` columns (None: all) without nulls at the end."""
    columns = list(data)[:width]
    while columns and columns[-1] is None:
        columns.pop()
    return tuple(columns)


def narrowed(rows: Mapping[Hashable, int], width: int | None) -> Counter[Hashable]:
    """The rows as a reader of `width` columns sees them."""
    seen: Counter[Hashable] = Counter()
    for data, diff in rows.items():
        seen[cut(data, width)] += diff  # type: ignore[arg-type]  # a row
    return Counter({data: diff for data, diff in seen.items() if diff})


def padded(data: Data, schema: Schema) -> Iterator[Any]:
    """The columns of a row of `schema`."""
    yield from data
    yield from [None] * (width_of(schema) - len(data))


def difference(found: Counter[Hashable] | Counter[tuple[Hashable, int]], truth: Counter) -> str:  # type: ignore[type-arg]  # either
    """What a reader found too much or too little, for a message."""
    wrong = {
        key: (found.get(key, 0), truth.get(key, 0)) for key in {*found, *truth} if found.get(key) != truth.get(key)
    }
    shown = ", ".join(f"{key}: {was} instead of {due}" for key, (was, due) in sorted(wrong.items(), key=repr)[:3])
    return f"{len(wrong)} wrong, {shown}"
