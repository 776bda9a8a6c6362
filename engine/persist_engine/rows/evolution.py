"""Schema evolution: which schema may succeed another, and how rows of one schema are shown in another.

A schema only grows. Nullable fields may be added anywhere and are matched by name. Integers and floats of the value may widen. Both rules
also apply within structs, lists and maps, but not to the keys of maps. Rows of an older schema, shown in a newer one, keep their order and
their identity, because a new field is null in all of them. In the other direction, fields are left out: distinct rows may become equal, and
their order may change.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import SchemaMismatch
from persist_engine.rows.columns import empty_struct
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.layout import is_list, mapped, values_type
from persist_engine.rows.schema import Schema

_WIDER = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
}


def incompatibilities(old: Schema, new: Schema) -> tuple[str, ...]:
    """The reasons, field by field, why a shard with the schema `old` cannot take `new`. Empty when it can, or when both are equal.

    Key fields keep their types, because parts are ordered and bounded by their encoded keys.
    """
    found = [
        *_refusals("key", old.key_type, new.key_type, may_widen=False),
        *_refusals("val", old.val_type, new.val_type, may_widen=True),
    ]
    return tuple(found)


def _refusals(path: str, old: pa.DataType, new: pa.DataType, *, may_widen: bool) -> list[str]:
    before, after = {field.name: field for field in old}, {field.name: field for field in new}
    found = [f"{path}.{name} is dropped" for name in before if name not in after]
    for name, field in after.items():
        if name in before:
            found += _field_refusals(f"{path}.{name}", before[name], field, may_widen=may_widen)
        elif not field.nullable:
            found.append(f"{path}.{name} is new and NOT NULL: stored rows have no value for it")
    if not found and [name for name in after if name in before] != list(before):
        found.append(f"{path} has its fields in another order: rows are sorted in the order of the fields")
    return found


def _field_refusals(path: str, old: pa.Field, new: pa.Field, *, may_widen: bool) -> list[str]:
    found: list[str] = []
    if pa.types.is_struct(old.type) and pa.types.is_struct(new.type):
        found += _refusals(path, old.type, new.type, may_widen=may_widen)
    elif pa.types.is_list(old.type) and pa.types.is_list(new.type):
        element = pa.field("element", old.type.value_type), pa.field("element", new.type.value_type)
        found += _field_refusals(f"{path}.element", *element, may_widen=may_widen)
    elif pa.types.is_map(old.type) and pa.types.is_map(new.type):
        found += _field_refusals(f"{path}.key", old.type.key_field, new.type.key_field, may_widen=False)
        found += _field_refusals(f"{path}.value", old.type.item_field, new.type.item_field, may_widen=may_widen)
    elif old.type != new.type and not (may_widen and new.type in _WIDER.get(old.type, ())):
        why = "" if may_widen else ", and the type of a key field is fixed"
        found.append(f"{path} is {print_type(old.type)} and cannot become {print_type(new.type)}{why}")
    if old.nullable != new.nullable:
        words = {True: "nullable", False: "NOT NULL"}
        found.append(f"{path} is {words[old.nullable]} and cannot become {words[new.nullable]}")
    return found


def needs_adapting(written: Schema, asked: Schema, *, key: str, may_be_newer: bool = False) -> bool:
    """Whether rows of `written` must be `adapted` to become rows of `asked`. Raises SchemaMismatch, which names `key` and the fields, when
    the schemas are unrelated. They are related when they are equal, when `asked` may succeed `written`, or, with `may_be_newer`, when
    `written` may succeed `asked`.
    """
    if written is asked:
        return False
    difference = asked.difference(written)
    if difference is None:
        return False
    if not incompatibilities(written, asked) or (may_be_newer and not incompatibilities(asked, written)):
        return True
    raise SchemaMismatch(
        f"part {key} was written with another schema: {difference}",
        key=key,
        requested=repr(asked),
        actual=repr(written),
    )


def adapted(table: pa.Table, *, asked: Schema, key: str) -> pa.Table:
    """Rows of another version of the schema, shown in the schema `asked`. `key` names their source in errors.

    Fields that the rows lack are null. Fields that `asked` lacks are left out. Raises SchemaMismatch, which names the field, when values do
    not fit an older, narrower type.
    """
    columns = [
        _shown(table.column(name), kind, f"{key}: {name}")
        for name, kind in (("key", asked.key_type), ("val", asked.val_type))
    ]
    return pa.table([*columns, table.column("time"), table.column("diff")], schema=asked.updates_schema)


def _shown(column: pa.ChunkedArray, kind: pa.DataType, path: str) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    return pa.chunked_array([_shown_array(chunk, kind, path) for chunk in column.chunks], kind)


def _shown_array(array: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    if array.type == kind:
        return array
    if is_list(kind):
        return mapped(array, kind, lambda values: _shown_array(values, values_type(kind), path))
    if not pa.types.is_struct(kind):
        return _cast(array, kind, path)
    if kind.num_fields == 0:
        return empty_struct(len(array))
    own = {field.name: index for index, field in enumerate(array.type)}
    children = [
        _shown_array(array.field(own[field.name]), field.type, f"{path}.{field.name}")
        if field.name in own
        else _absent(len(array), field.type)
        for field in kind
    ]
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null() if array.null_count else None)


def _absent(rows: int, kind: pa.DataType) -> pa.Array:
    """An array of nulls. `pa.nulls` alone would also put nulls into the NOT NULL fields of a null struct, which Parquet refuses."""
    if not pa.types.is_struct(kind):
        return pa.nulls(rows, kind)
    return pa.array([None], kind).take(pa.array(np.zeros(rows, dtype=np.int64)))


def _cast(array: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    try:
        out = array.cast(kind)
    except pa.ArrowInvalid as error:
        raise _too_wide(path, kind) from error
    if pa.types.is_floating(kind) and kind.bit_width < array.type.bit_width:
        back = out.cast(array.type)
        same = pc.or_kleene(pc.equal(back, array), pc.is_nan(array))
        if pc.all(same).as_py() is False:
            raise _too_wide(path, kind)
    return out


def _too_wide(path: str, kind: pa.DataType) -> SchemaMismatch:
    return SchemaMismatch(
        f"{path} holds values that do not fit {print_type(kind)}: read it with the shard's newer schema", field=path
    )
