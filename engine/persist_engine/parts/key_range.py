"""Half-open ranges of the first key column, which split one snapshot into disjoint pieces.

Adjacent ranges share a bound, so together they partition all rows. Values are in Arrow's sort order: NaN comes after
numbers and null after NaN, so both belong to the range without an upper bound. This module knows nothing of blobs or state.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.model.batch import ColumnStats, HollowPart, Part
from persist_engine.rows.part_stats import bound


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The rows whose key column `column` is in [lower, upper). None means unbounded on that side. Scalars have the
    column's type.
    """

    column: str
    lower: pa.Scalar | None
    upper: pa.Scalar | None

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows of `table` within the range, in their order."""
        if self.lower is None and self.upper is None:
            return table
        return table.filter(self._mask(pc.struct_field(table.column("key"), [self.column])))

    def _mask(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        if self.upper is not None:
            mask = _filled(pc.less(values, self.upper))  # NaN and null are past every upper bound
            if self.lower is not None:
                mask = pc.and_(mask, _filled(pc.greater_equal(values, self.lower)))
            return mask
        mask = pc.greater_equal(values, self.lower)
        if pa.types.is_floating(values.type):
            mask = pc.or_(mask, pc.is_nan(values))
        return pc.or_(_filled(mask), pc.is_null(values))

    def may_hold(self, part: Part) -> bool:
        """Whether `part` may have a row in the range, by its statistics. True without statistics."""
        if not isinstance(part, HollowPart) or part.stats is None:
            return True
        stats = dict(part.stats.columns).get(f"key.{self.column}")
        return stats is None or self.may_be_within(stats)

    def may_be_within(self, stats: ColumnStats) -> bool:
        """Whether rows whose `column` has these statistics may include one in the range."""
        if self.upper is None and self.lower is None:
            return True
        if self.upper is not None and stats.lower is not None and _at_or_past(stats.lower, self.upper):
            return False
        if self.lower is None or stats.upper is None:
            return True
        if self.upper is None and (stats.null_count or pa.types.is_floating(self.lower.type)):
            return True  # bounds do not show whether there is a NaN
        return _at_or_past(stats.upper, self.lower)

    def covers(self, part: HollowPart) -> bool:
        """Whether all rows of `part` are in the range, by its statistics. False without statistics."""
        if self.upper is None and self.lower is None:
            return True
        stats = None if part.stats is None else dict(part.stats.columns).get(f"key.{self.column}")
        if stats is None or stats.lower is None:
            return False
        if self.lower is not None and not _at_or_past(stats.lower, self.lower):
            return False
        if self.upper is None:  # nulls and NaN are in the last range
            return True
        if stats.upper is None or stats.null_count or pa.types.is_floating(self.upper.type):
            return False
        return not _at_or_past(stats.upper, self.upper)

    def to_json(self) -> dict[str, Any]:
        """The range as plain JSON values; inverse of `from_json`."""
        return {"column": self.column, "lower": _to_text(self.lower), "upper": _to_text(self.upper)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> KeyRange:
        """Inverse of `to_json`."""
        return cls(str(value["column"]), _from_text(value["lower"]), _from_text(value["upper"]))


def _filled(mask: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(mask, pa.scalar(False))  # noqa: FBT003 - Arrow's own signature


def _at_or_past(statistic: str, value: pa.Scalar) -> bool:
    return bool(pc.greater_equal(bound(statistic, value.type), value).as_py())


def _to_text(value: pa.Scalar | None) -> str | None:
    if value is None:
        return None
    table = pa.table({"bound": pa.array([value], type=value.type)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def _from_text(text: str | None) -> pa.Scalar | None:
    if text is None:
        return None
    with pa.ipc.open_stream(base64.b64decode(text)) as reader:
        return reader.read_all().column("bound")[0]
