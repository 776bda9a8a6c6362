"""The events of a Debezium connector as commands on keys (see commands.py). Plans only; starts no Spark job.

An event has the columns `before` and `after` (structs), `op`, and columns that only give the order: `source`, `ts_ms`. `before` and `after`
contain the fields of the shard's key, which become the key of a command. Other fields of `before` and `after` are ignored.
"""

from __future__ import annotations

from functools import reduce

from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.envelopes.collected import error_column
from persist_spark.envelopes.commands import WEIGHT, completed, key_text
from persist_spark.frames import DELETED, FAULT, ORDER, Field, converted, fields_of, ordering, unfit
from persist_spark.spec import ConfigurationError, Envelope

_BEFORE, _AFTER, _OP = "before", "after", "op"
#: The Postgres connector writes this text in place of a large value that an update did not change, because the log lacks that value.
_UNAVAILABLE = "__debezium_unavailable_value"


def debezium_commands(frame: DataFrame, schema: Schema, envelope: Envelope) -> DataFrame:
    """Converts each event to commands. `c`, `r` and `u` set the value of the key in `after`. `d` removes the key in `before`. An update
    that changes the key does both. Events without op, before and after (tombstones) are dropped. All other events are faults that name the
    op.

    The order is `orderColumn`, or else the first of these that the input has: source.lsn; source.file, pos and row; source.ts_ms; ts_ms.
    Raises ConfigurationError, which names every column that is missing or does not fit.
    """
    fields = fields_of(schema)
    types = _types(frame, fields)
    keys = [f for f in fields if f.side == "key"]
    before, after = ({f.column: _field(side, f, types[side]) for f in fields} for side in (_BEFORE, _AFTER))
    op, had, has = F.col(_OP), F.col(_BEFORE).isNotNull(), F.col(_AFTER).isNotNull()
    is_moved = had & ~reduce(Column.__and__, (before[f.column].eqNullSafe(after[f.column]) for f in keys))
    error = error_column(frame, envelope)
    given = F.lit(None).cast("string") if error is None else F.col(error)
    order, fault = _order(frame, envelope).alias(ORDER), F.coalesce(given, _fault(fields, before, after)).alias(FAULT)
    removal = F.struct(
        *(before[f.column].alias(f.column) for f in keys),
        *(F.lit(None).cast(f.type).alias(f.column) for f in fields if f.side == "value"),
        order,
        F.lit(True).alias(DELETED),  # noqa: FBT003
        F.when(op == "d", 1).otherwise(0).cast("bigint").alias(WEIGHT),
        fault,
        ((op == "d") | ((op == "u") & is_moved)).alias("is_meant"),
    )
    gift = F.struct(
        *(after[f.column].alias(f.column) for f in fields),
        order,
        F.lit(False).alias(DELETED),  # noqa: FBT003
        F.lit(1).cast("bigint").alias(WEIGHT),
        fault,
        (~op.eqNullSafe("d")).alias("is_meant"),
    )
    events = frame.where(op.isNotNull() | had | has | given.isNotNull())
    commands = F.filter(F.array(removal, gift), lambda command: command.getField("is_meant"))
    return completed(events.select(F.inline(commands)), schema)


def _types(frame: DataFrame, fields: list[Field]) -> dict[str, T.StructType]:
    """The types of `before` and `after`. Raises ConfigurationError when the input lacks a column of events or a column does not fit the
    shard.
    """
    found = {field.name: field.dataType for field in frame.schema.fields}
    if missing := [name for name in (_BEFORE, _AFTER, _OP) if name not in found]:
        hint = "select payload.* with input.format.sql" if "payload" in found else "write flattened rows with an Upsert"
        raise ConfigurationError(
            f"the input has no column {', '.join(missing)}, so its rows are not Debezium events; {hint}; it has: {', '.join(frame.columns)}"
        )
    problems = [] if isinstance(found[_OP], T.StringType) else [f"{_OP} is {found[_OP].simpleString()}, must be string"]
    for side, wanted in ((_BEFORE, [f for f in fields if f.side == "key"]), (_AFTER, fields)):
        struct = found[side]
        if not isinstance(struct, T.StructType):
            problems.append(f"{side} is {struct.simpleString()}, must be a struct; declare it in input.format.schema")
            continue
        inner = {field.name: field.dataType for field in struct.fields}
        problems += [f"{side} has no field {f.name} ({f.side} field)" for f in wanted if f.name not in inner]
        unfits = (unfit(f"{side}.{f.name}", inner[f.name], f.type) for f in wanted if f.name in inner)
        problems += filter(None, unfits)
    if problems:
        raise ConfigurationError(f"Debezium events do not fit the shard's schema: {'; '.join(problems)}")
    return {side: found[side] for side in (_BEFORE, _AFTER)}


def _field(side: str, field: Field, struct: T.StructType) -> Column:
    """The field of `before` or `after` in the shard's type. Null for a field of the value in `before`, because nothing reads it."""
    source = next((inner.dataType for inner in struct.fields if inner.name == field.name), None)
    if source is None or (side == _BEFORE and field.side == "value"):
        return F.lit(None).cast(field.type)
    return converted(F.col(side).getField(field.name), source, field.type)


def _fault(fields: list[Field], before: dict[str, Column], after: dict[str, Column]) -> Column:
    """The reason why an event cannot be written. Null if it can."""
    op, had, has = F.col(_OP), F.col(_BEFORE).isNotNull(), F.col(_AFTER).isNotNull()
    gives = op.isin("c", "r", "u")
    at = key_text(fields, {name: F.coalesce(after[name], before[name]) for name in after})
    removed, given = (
        F.concat(F.lit(" in a delete; let the table log its key"), F.lit("")),
        F.concat(F.lit(" in an event of key "), at),
    )
    stand_ins = {f: stand_in for f in fields if f.side == "value" and (stand_in := _stand_in(f.type)) is not None}
    cases = [
        (op.isNull(), F.lit("op is null in an event that is no tombstone")),
        (
            op == "t",
            F.lit(
                "op t (truncate): an event that removes all rows; exclude it with input.format.sql, and empty the shard"
            ),
        ),
        (
            ~gives & (op != "d"),
            F.concat(F.lit("op "), op, F.lit(" is none of c, r, u, d; exclude it with input.format.sql")),
        ),
        (gives & ~has, F.concat(F.lit("after is null in an event with op "), op)),
        ((op == "d") & ~had, F.concat(F.lit("before is null"), removed)),
        *(
            ((op == "d") & before[f.column].isNull(), F.concat(F.lit(f"before.{f.name} is null"), removed))
            for f in fields
            if f.side == "key"
        ),
        *(
            # Without this case, the event would remove the key null.
            (
                (op == "u") & had & before[f.column].isNull() & after[f.column].isNotNull(),
                F.concat(F.lit(f"before.{f.name} is null"), given),
            )
            for f in fields
            if f.side == "key"
        ),
        *(
            (gives & (after[f.column] == stand_in), F.concat(F.lit(f"after.{f.name} was not logged"), given))
            for f, stand_in in stand_ins.items()
        ),
    ]
    return F.coalesce(*(F.when(condition, text) for condition, text in cases))


def _stand_in(kind: T.DataType) -> Column | None:
    """_UNAVAILABLE in the form that the connector writes for a column of this type: the text, its bytes, a list with the text, or a list of
    its bytes as numbers. None for other types, for which the connector has no such value.
    """
    octets = _UNAVAILABLE.encode()
    match kind:
        case T.StringType():
            return F.lit(_UNAVAILABLE)
        case T.BinaryType():
            return F.lit(octets)
        case T.ArrayType(elementType=T.StringType()):
            return F.array(F.lit(_UNAVAILABLE))
        case T.ArrayType(elementType=T.IntegralType()):
            return F.array(*map(F.lit, octets)).cast(kind)
    return None


def _order(frame: DataFrame, envelope: Envelope) -> Column:
    if envelope.order_column is not None:
        column, source = _at(frame, envelope.order_column.split("."))
        if column is None or source is None:
            raise ConfigurationError(
                f"envelope.orderColumn: the input has no field {envelope.order_column}; it has: {frame.schema.simpleString()[:1000]}"
            )
        return ordering(column, source, envelope.order_column)
    for paths in (["source.lsn"], ["source.file", "source.pos"], ["source.ts_ms"], ["ts_ms"]):
        found = [(path, *_at(frame, path.split("."))) for path in paths]
        if all(column is not None for _, column, _ in found):
            return _default_order(frame, found)
    return F.lit(None).cast("bigint")


def _default_order(frame: DataFrame, found: list[tuple[str, Column | None, T.DataType | None]]) -> Column:
    columns: list[Column] = []
    for path, column, source in found:
        assert column is not None
        assert source is not None
        is_text = path == "source.file"
        if not isinstance(source, T.StringType if is_text else T.IntegralType):
            raise ConfigurationError(
                f"{path} is {source.simpleString()}, must be {'string' if is_text else 'bigint'} to give the order; declare it in "
                "input.format.schema, or set envelope.orderColumn"
            )
        # The names of binary logs end in a number, so a longer name is a later file.
        columns += [F.length(column), column] if is_text else [column]
    row, _ = _at(frame, ["source", "row"])
    if len(columns) == 1:
        return columns[0]
    return F.struct(*(column.alias(f"o{i}") for i, column in enumerate([*columns, *([] if row is None else [row])])))


def _at(frame: DataFrame, path: list[str]) -> tuple[Column | None, T.DataType | None]:
    """The field at `path` and its type. Names are compared exactly. Both are None when there is no such field."""
    column: Column | None = None
    kind: T.DataType = frame.schema
    for name in path:
        inner = (
            next((f.dataType for f in kind.fields if f.name == name), None) if isinstance(kind, T.StructType) else None
        )
        if inner is None:
            return None, None
        column, kind = F.col(name) if column is None else column.getField(name), inner
    return column, kind
