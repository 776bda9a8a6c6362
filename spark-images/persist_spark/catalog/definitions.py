"""CREATE TABLE, ALTER TABLE and DROP TABLE: shards that the catalog owns. In the registry their owner is `sql/NAMESPACE/NAME`.

Shards of other owners, such as resources of an operator, are tables too, but their owners create and delete them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from persist_engine import PersistClient, Schema, SchemaIncompatible, close_shard, finalize_shard
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Adopted, Owner
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

#: The operator of tables that SQL created.
OPERATOR = "sql"
KEY = "key"
#: Properties that Spark adds to a table, and that SHOW CREATE TABLE prints for another table. They are ignored: a new table has a new
#: shard.
_SHOWN = frozenset({"provider", "owner", "shard"})


def create(client: PersistClient, table: Sequence[str], columns: T.StructType, properties: Mapping[str, str]) -> None:
    """Creates the shard of a table, with seven days of history. Property `key` names the columns of the key; the others are the value.
    Completes an interrupted call with the same columns.

    Raises InvalidUsage, and creates nothing, for unknown properties, a key that is missing or not a column, and types that no shard can
    hold.
    """
    given = {name: value for name, value in properties.items() if name not in _SHOWN}
    name = ".".join(table)
    if unknown := sorted(set(given) - {KEY}):
        raise InvalidUsage(
            f"table {name}: property {', '.join(unknown)} is not known; the one that a table of this catalog has is key"
        )
    if properties.get("provider", "persist") != "persist":
        raise InvalidUsage(f"table {name}: tables of this catalog are shards; leave USING {properties['provider']} out")
    if not given.get(KEY, "").strip():
        raise InvalidUsage(
            f"table {name}: say which columns are the key, as in TBLPROPERTIES ('key' = '{columns.names[0]}'); a shard is sorted by them"
        )
    schema = _schema(name, columns, [each.strip() for each in given[KEY].split(",")])
    if len(table) != 2:
        raise InvalidUsage(
            f"table {name}: create it as NAMESPACE.NAME; the operator of tables that SQL creates is {OPERATOR}"
        )
    owner = Owner(OPERATOR, table[0], table[1])
    client.free_name(owner)
    adopted = client.adopt(owner, None, ShardId.new())
    assert isinstance(adopted, Adopted), "a name that leads to no shard leads to a new one"
    client.initialise(adopted.shard_id, schema)


def is_ours(owner: Owner) -> bool:
    """Whether SQL created the table."""
    return owner.operator_id == OPERATOR


def alter(client: PersistClient, table: Sequence[str], shard: ShardId, changes: Sequence[Mapping[str, Any]]) -> None:
    """Evolves the schema of the shard, in one commit for all of `changes`: `{"add": PATH, "type": JSON, "nullable": BOOL}`, a new field at
    the end of the value or of a struct, and `{"widen": PATH, "type": JSON}`. Another process may evolve the schema meanwhile.

    Raises InvalidUsage, and changes nothing, for changes that a shard does not accept.
    """
    name = ".".join(table)
    while True:
        client.recent_upper(shard)  # also fetches the schema that another process evolved meanwhile
        known = client.schema(shard)
        answer = client.evolve_schema(shard, _altered(name, known, changes))
        if not isinstance(answer, SchemaIncompatible):
            return
        if answer.current == known:
            raise InvalidUsage(f"table {name}: {answer.meaning}")


def drop(client: PersistClient, shard: ShardId) -> None:
    """Deletes the data of the shard, and its name. Completes an interrupted call. Raises FinalizationError, before it changes anything,
    while a reader holds the shard.
    """
    if not client.is_finalized(shard):
        close_shard(client, shard)
    finalize_shard(client, shard)
    client.disown(shard)


def _altered(name: str, schema: Schema, changes: Sequence[Mapping[str, Any]]) -> Schema:
    sides = {"key": list(schema.key), "val": list(schema.val)}
    for change in changes:
        is_new = "add" in change
        *_, last = path = list(change["add" if is_new else "widen"])
        field = _field(name, last, change)
        side = "key" if path[0] in schema.key.names else "val"
        sides[side] = _changed(sides[side], path, field, is_new=is_new)
    return Schema(pa.schema(sides["key"]), pa.schema(sides["val"]))


def _changed(fields: Iterable[pa.Field], path: Sequence[str], field: pa.Field, *, is_new: bool) -> list[pa.Field]:
    """`fields` with `field` at `path`. It replaces the old field, or is added at the end if it is new."""
    name, *rest = path
    found = list(fields)
    if is_new and not rest:
        return [*found, field]
    return [each if each.name != name else _inner(each, rest, field, is_new=is_new) for each in found]


def _inner(field: pa.Field, path: Sequence[str], wanted: pa.Field, *, is_new: bool) -> pa.Field:
    if not path:
        return field.with_type(wanted.type)
    return field.with_type(pa.struct(_changed(field.type, path, wanted, is_new=is_new)))


def _field(table: str, name: str, change: Mapping[str, Any]) -> pa.Field:
    """The Arrow field of a change. Raises InvalidUsage for a type that no shard can hold."""
    spark = T.StructField(name, T._parse_datatype_json_string(change["type"]), bool(change.get("nullable", True)))
    try:
        return Schema.from_ddl("key INT", _ddl(spark)).val.field(0)
    except InvalidUsage as error:
        raise InvalidUsage(f"table {table}: {error}") from error


def _schema(name: str, columns: T.StructType, key: Sequence[str]) -> Schema:
    """The schema: the columns of the key in the order of the property, and the other columns in the order of the table."""
    fields = {field.name: field for field in columns}
    if len(fields) != len(columns.fields):
        raise InvalidUsage(f"table {name}: two columns have one name")
    if unknown := [column for column in key if column not in fields] or [each for each in key if key.count(each) > 1]:
        raise InvalidUsage(
            f"table {name}: key {', '.join(unknown)} is no column, or is there twice; there are {', '.join(fields)}"
        )
    rest = [column for column in fields if column not in key]
    try:
        return Schema.from_ddl(*(", ".join(_ddl(fields[column]) for column in side) for side in (key, rest)))
    except InvalidUsage as error:
        raise InvalidUsage(f"table {name}: {error}") from error


def _ddl(field: T.StructField) -> str:
    if field.metadata.get("comment"):
        raise InvalidUsage(f"column {field.name}: a shard holds no COMMENT")
    return _declared(field, " ")


def _declared(field: T.StructField, separator: str) -> str:
    quoted = field.name.replace("`", "``")
    return f"`{quoted}`{separator}{_kind(field.dataType)}{'' if field.nullable else ' NOT NULL'}"


def _kind(kind: T.DataType) -> str:
    """The DDL of a type. Spark's own text for a struct omits NOT NULL."""
    match kind:
        case T.StructType():
            return f"STRUCT<{', '.join(_declared(each, ': ') for each in kind)}>"
        case T.ArrayType():
            return f"ARRAY<{_kind(kind.elementType)}>"
        case T.MapType():
            return f"MAP<{_kind(kind.keyType)}, {_kind(kind.valueType)}>"
    return str(kind.simpleString())
