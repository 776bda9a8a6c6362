"""Lists and maps as offsets and values. A map is a list of entries, structs of `key` and `value`.

Elements and the values of maps may be null. The keys of maps are never null, and never structs, lists or maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Offsets = npt.NDArray[np.int32]

#: The name that Parquet and Spark use for the elements of a list.
ELEMENT = "element"
#: The limit on elements of one column, because offsets have 32 bits.
_ELEMENTS_MAX = 2**31 - 1
_KEY, _VALUE = "key", "value"
#: The types of the same values that Arrow can filter and take.
OF_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def list_of(value_type: pa.DataType) -> pa.DataType:
    """The type of lists of `value_type`."""
    return pa.list_(pa.field(ELEMENT, value_type))


def map_of(key_type: pa.DataType, value_type: pa.DataType) -> pa.DataType:
    """The type of maps from `key_type` to `value_type`."""
    return pa.map_(key_type, pa.field(_VALUE, value_type))


def is_list(kind: pa.DataType) -> bool:
    """Whether the type is a list or a map in the layout that shards hold."""
    return bool(pa.types.is_list(kind) or pa.types.is_map(kind))


def is_any_list(kind: pa.DataType) -> bool:
    """Whether the type is a list or a map in any layout of Arrow."""
    return is_list(kind) or bool(
        pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def holds_lists(kind: pa.DataType) -> bool:
    """Whether the type is a list or a map, or contains one."""
    if pa.types.is_struct(kind):
        return any(holds_lists(field.type) for field in kind)
    return is_list(kind)


def values_type(kind: pa.DataType) -> pa.DataType:
    """The type of the elements of a list, or of the entries of a map."""
    if pa.types.is_map(kind):
        return pa.struct([kind.key_field, kind.item_field])
    return kind.value_type


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A column of lists or maps. Row i has the values from `offsets[i]` to `offsets[i + 1]`. The first offset is 0, and the last one is the
    number of values.
    """

    offsets: Offsets
    values: pa.Array
    absent: pa.Array | None
    """Whether each row is null; None when no row is."""

    @classmethod
    def of(cls, array: pa.Array) -> ListColumn:
        """The column with only the values that its rows show. A null row has no values, whatever bytes are under it."""
        count = len(array)
        offsets = np.frombuffer(array.buffers()[1] or bytes(4), np.int32, count + 1, 4 * array.offset if count else 0)
        values = array.values.slice(int(offsets[0]), int(offsets[-1]) - int(offsets[0]))
        offsets = offsets - offsets[0]
        if not array.null_count:
            return cls(offsets, values, None)
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.diff(offsets)
        if lengths[~valid].any():
            values = values.filter(pa.array(np.repeat(valid, lengths)))
            offsets = np.concatenate([[0], np.cumsum(np.where(valid, lengths, 0))]).astype(np.int32)
        return cls(offsets, values, array.is_null())

    def array(self, kind: pa.DataType, values: pa.Array | None = None) -> pa.Array:
        """The column as an array of the type `kind`. With `values`, these replace its own; they must have the value type of `kind`."""
        values = self.values if values is None else values
        count = len(self.offsets) - 1
        valid = None if self.absent is None else pc.invert(self.absent).buffers()[1]
        own = values_type(kind)
        if pa.types.is_map(kind) and values.type != own:
            values = pa.StructArray.from_arrays(values.flatten(), fields=list(own))
        return pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(self.offsets)], children=[values])


def mapped(array: pa.Array, kind: pa.DataType, change: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """The column as `kind`, with its values replaced by the result of `change`, which gets all values that the rows show. Returns the array
    itself when `change` returns its argument, the type is the same, and there can be no bytes under nulls.
    """
    pieces = ListColumn.of(array)
    values = change(pieces.values)
    if values is pieces.values and not array.null_count and array.type.equals(kind, check_metadata=True):
        return array
    return pieces.array(kind, values)


def as_plain_list(array: pa.Array) -> pa.Array:
    """Lists of any layout of Arrow as lists with 32-bit offsets, with values that Arrow can filter. Raises ArrowInvalid when there are more
    than 2^31 elements.
    """
    kind = without_views(array.type)
    if is_list(kind):
        return array if kind == array.type else array.cast(kind)
    plain = pa.list_(kind.value_field)
    if not (pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)):
        return array.cast(plain)
    # SUBTLE: Arrow's cast of list views writes one offset too few, so the end of the last list is undefined.
    ends = np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    if len(ends) and ends[-1] > _ELEMENTS_MAX:
        raise pa.ArrowInvalid(f"{ends[-1]} elements are more than one column holds")
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return ListColumn(offsets, array.flatten(), array.is_null() if array.null_count else None).array(plain)


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type with text and bytes in place of their views. List views keep theirs, because Arrow cannot cast them."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(without_views(field.type)) for field in kind])
    if pa.types.is_map(kind):
        key, item = (field.with_type(without_views(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item, keys_sorted=kind.keys_sorted)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind) or not is_any_list(kind):
        return OF_VIEWS.get(kind, kind)
    values = kind.value_field.with_type(without_views(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(values, kind.list_size)
    return pa.large_list(values) if pa.types.is_large_list(kind) else pa.list_(values)


def has_required(data_type: pa.DataType) -> bool:
    """Whether a field within the struct is NOT NULL. False for other types."""
    if not pa.types.is_struct(data_type):
        return False
    return any(not child.nullable or has_required(child.type) for child in data_type)
