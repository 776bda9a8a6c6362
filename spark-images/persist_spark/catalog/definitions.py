"""CREATE TABLE and DROP TABLE: shards that the catalog owns. In the registry their owner is `sql/NAMESPACE/NAME`.

Shards of other owners, such as resources of an operator, are tables too, but their owners create and delete them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from persist_engine import PersistClient, Schema, close_shard, finalize_shard
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Adopted, Owner
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

#: The operator of tables that SQL created.
OPERATOR = "sql"
KEY = "key"
#: What Spark adds to the properties of a table by itself.
_SPARKS = frozenset({"provider", "owner"})


def create(client: PersistClient, table: Sequence[str], columns: T.StructType, properties: Mapping[str, str]) -> None:
    """Creates the shard of a table, with seven days of history. Property `key` names the columns of the key; the others are the value.
    Completes an interrupted call with the same columns.

    InvalidUsage, and nothing is created, for properties that are not known, a key that is not given or is no column, and types that no
    shard can hold.
    """
    given = {name: value for name, value in properties.items() if name not in _SPARKS}
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
    adopted = client.adopt(owner, None, ShardId.new())
    assert isinstance(adopted, Adopted), "a new id has no other owner"
    client.initialise(adopted.shard_id, schema)


def is_ours(owner: Owner) -> bool:
    """Whether SQL created the table."""
    return owner.operator_id == OPERATOR


def drop(client: PersistClient, shard: ShardId) -> None:
    """Deletes the data of the shard, and its name. FinalizationError, before anything is changed, while a reader holds it. Completes an
    interrupted call.
    """
    if not client.is_finalized(shard):
        close_shard(client, shard)
    finalize_shard(client, shard)
    client.disown(shard)


def _schema(name: str, columns: T.StructType, key: Sequence[str]) -> Schema:
    """The columns of the key in the order of the property, and the others in the order of the table."""
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
    quoted = field.name.replace("`", "``")
    return f"`{quoted}` {field.dataType.simpleString()}{'' if field.nullable else ' NOT NULL'}"
