"""Rows of every type through every door, while the schema evolves at one of them: tables of Python, SQL, frames, and Spark's own reader."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from persist_engine import Schema, connect
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_spark.datasource import register
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

pytestmark = pytest.mark.spark

KEY = "id BIGINT"
OLD = (
    "b BOOLEAN, t TINYINT, h SMALLINT, i INT, f FLOAT, d DOUBLE, m DECIMAL(9,2), w DECIMAL(38,10), s STRING, x BINARY, "
    "day DATE, at TIMESTAMP, wall TIMESTAMP_NTZ, p STRUCT<i: INT, f: FLOAT>, l ARRAY<INT>, n MAP<STRING, FLOAT>"
)
NEW = (
    "b BOOLEAN, t INT, h BIGINT, i BIGINT, f DOUBLE, d DOUBLE, m DECIMAL(9,2), w DECIMAL(38,10), s STRING, x BINARY, "
    "day DATE, at TIMESTAMP, wall TIMESTAMP_NTZ, p STRUCT<i: BIGINT, f: DOUBLE, more: STRING>, l ARRAY<BIGINT>, "
    "n MAP<STRING, DOUBLE>, late DECIMAL(20,4), z TINYINT"
)
EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - a wall clock


def leaf(kind: pa.DataType, rng: random.Random) -> object:
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_integer(kind):
        bound = 1 << (kind.bit_width - 1)
        return rng.choice([0, 1, -1, bound - 1, -bound, rng.randrange(-3, 4)])
    if pa.types.is_floating(kind):
        some = [0.0, -0.0, 0.1, 1.5, -2.25, math.nan, math.inf, -math.inf, 3.0]
        found = rng.choice(some)
        return float(np.float32(found)) if kind.bit_width == 32 else found
    if pa.types.is_decimal(kind):
        digits = rng.choice([0, 1, -1, 10**kind.precision - 1, 1 - 10**kind.precision, rng.randrange(-999, 999)])
        return Decimal((int(digits < 0), tuple(map(int, str(abs(digits)))), -kind.scale))
    if pa.types.is_string(kind):
        return rng.choice(["", "a", "a" * 64 + "b", "a" * 65, "é", "o'b\\", "%", "\U0001d11e"])
    if pa.types.is_binary(kind):
        return rng.choice([b"", b"\x00", b"\xff" * 65, b"ab"])
    days, us = rng.choice([-700000, -141428, -1, 0, 18321, 2932800]), rng.choice([0, 1, 86_399_999_999])
    at = EPOCH + dt.timedelta(days=days, microseconds=us)
    if pa.types.is_date(kind):
        return at.date()
    return at if kind.tz is None else at.replace(tzinfo=dt.UTC)


def value(kind: pa.DataType, rng: random.Random) -> object:
    if rng.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {field.name: value(field.type, rng) for field in kind}
    if pa.types.is_map(kind):
        return [(name, value(kind.item_type, rng)) for name in ("k", "q") if rng.random() < 0.7]
    if pa.types.is_list(kind):
        return [value(kind.value_type, rng) for _ in range(rng.randrange(3))]
    return leaf(kind, rng)


def rows(schema: Schema, ids: range, rng: random.Random) -> pa.Table:
    fields = [*schema.key, *schema.val]
    columns = [
        pa.array(list(ids), pa.int64()),
        *(pa.array([value(f.type, rng) for _ in ids], f.type) for f in schema.val),
    ]
    return pa.table(columns, schema=pa.schema(fields))


def texts(table: pa.Table) -> list[str]:
    """Rows as texts, with one zero and one NaN, as rows of a shard are equal."""
    return sorted(repr(row).replace("-0.0", "0.0") for row in table.to_pylist())


def arrow(frame, wanted: pa.Schema) -> pa.Table:
    found = frame.select(*(f"`{name}`" for name in wanted.names)).toArrow()
    return pa.table(
        [column.cast(field.type) for column, field in zip(found.columns, wanted, strict=True)], schema=wanted
    )


LITERALS = {
    "b": ("true",), "t": ("1", "-1", "127", "300"), "h": ("0", "32767", "70000"), "i": ("0", "2147483647", "3000000000"),
    "f": ("double(0.1)", "float(0.1)", "0.0D", "-0.0D", "double('NaN')", "double('Infinity')", "1.5D"),
    "d": ("0.1D", "-0.0D", "double('NaN')", "double('-Infinity')"), "m": ("0.01", "9999999.99", "-1", "0.001"),
    "w": ("0.0000000001", "-1"), "s": ("''", "'a'", "'é'", f"'{'a' * 64}b'"), "x": ("X''", "X'00'"),
    "day": ("DATE '1970-01-01'", "DATE '0053-06-17'", "DATE '9999-09-26'", "DATE '1582-10-14'"),
    "at": ("TIMESTAMP '1970-01-01 00:00:00Z'", "TIMESTAMP '1969-12-31 23:59:59.999999Z'"),
    "wall": ("TIMESTAMP_NTZ '1970-01-01 00:00:00'", "TIMESTAMP_NTZ '9999-09-26 23:59:59.999999'"),
    "p.i": ("0", "3000000000"), "p.f": ("float(0.1)", "double(0.1)", "double('NaN')"), "p.more": ("'a'",), "late": ("0.0001", "1"), "z": ("1", "200"),
}  # fmt: skip


def conditions(names: list[str], rng: random.Random) -> list[str]:
    found = []
    for name in names:
        found += [f"{name} IS NULL", f"{name} IS NOT NULL"]
        for literal in LITERALS[name]:
            found.append(f"{name} {rng.choice(['=', '<', '<=', '>', '>=', '<>', '<=>'])} {literal}")
            found.append(f"NOT ({name} {rng.choice(['=', '<', '>='])} {literal})")
            found.append(f"{name} IN ({literal})")
    return found


def grown(old_rows: pa.Table, new: Schema) -> pa.Table:
    """The rows as the newer schema shows them."""

    def shown(field: pa.Field) -> pa.Array:
        if field.name not in old_rows.column_names:
            return pa.nulls(len(old_rows), field.type)
        values = old_rows.column(field.name).to_pylist()
        if pa.types.is_struct(field.type):
            values = [None if each is None else {one.name: each.get(one.name) for one in field.type} for each in values]
        return pa.array(values, field.type)

    fields = [*new.key, *new.val]
    return pa.table([shown(field) for field in fields], schema=pa.schema(fields))


class Doors:
    """One table, and what each door shows of it."""

    def __init__(self, catalog, spark, table, shard):
        self.catalog, self.spark, self.table, self.shard = catalog, spark, table, shard
        self.rng = random.Random(7)

    def load(self, **options):
        reader = self.spark.read.format("persist").options(**self.catalog.stores, shard=str(self.shard), **options)
        return reader.load()

    def check(self, wanted: pa.Table, step: str) -> None:
        """Rows, conditions and aggregates by Python, SQL, Spark's own reader where it can, and the reader in Python."""
        names, expected, twin = wanted.schema, texts(wanted), self.load(splits="1").cache()
        assert texts(self.table.scan().to_arrow()) == expected, step
        for frame in (self.catalog.frame("SELECT * FROM {n}.t"), self.load(), self.load(splits="3"), twin):
            assert texts(arrow(frame, names)) == expected, step
        twin.createOrReplaceTempView("twin")
        leaves = [field.name for field in names if field.name in LITERALS]
        leaves += [f"p.{field.name}" for field in names.field("p").type]
        asked, frame = self.rng.sample(conditions(leaves, self.rng), 8), self.load()
        counts = ", ".join(f"count_if({one}) c{at}" for at, one in enumerate(asked))
        for one, count in zip(asked, self.spark.sql(f"SELECT {counts} FROM twin").collect()[0], strict=True):
            found = self.catalog.sql(f"SELECT id FROM {{n}}.t WHERE {one}")
            assert (len(found), frame.where(one).count()) == (count, count), (step, one)
        plain = [field.name for field in names if not pa.types.is_nested(field.type)]
        all_of = "count(*), " + ", ".join(f"count({name}), min({name}), max({name})" for name in plain)
        by_spark = [tuple(row) for row in self.spark.sql(f"SELECT {all_of} FROM twin").collect()]
        known = self.catalog.sql(f"SELECT {all_of} FROM {{n}}.t")
        assert repr(known).replace("-0.0", "0.0") == repr(by_spark).replace("-0.0", "0.0"), step
        twin.unpersist()


@pytest.mark.slow
def test_all_doors_show_the_same_rows_after_the_schema_evolved_at_one_of_them(catalog, local_spark):
    rng, old, new = random.Random(7), Schema.from_ddl(KEY, OLD), Schema.from_ddl(KEY, NEW)
    register(local_spark, **catalog.stores)
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=8 * KIB))
    with connect(catalog.location.blob, catalog.location.consensus, maintain=False, settings=settings) as db:
        table = db.create(f"{catalog.namespace}.t", key=KEY, value=OLD, bloom=["i", "f", "s", "m", "at"])
        doors = Doors(catalog, local_spark, table, table.id)
        first = rows(old, range(40), rng)
        table.append(first)
        held = doors.load(), catalog.frame("SELECT * FROM {n}.t")
        for name, kind in (("t", "INT"), ("h", "BIGINT"), ("i", "BIGINT"), ("f", "DOUBLE")):
            catalog.sql(f"ALTER TABLE {{n}}.t ALTER COLUMN {name} TYPE {kind}")
        catalog.client.recent_upper(table.id)
        catalog.client.evolve_schema(table.id, new)
        model = grown(first, new)
        doors.check(model, "evolved")
        more, by_spark = rows(new, range(40, 70), rng), rows(new, range(70, 90), rng)
        table.append(more)
        # Spark takes every time of Arrow for an instant.
        frame = local_spark.createDataFrame(by_spark).withColumn("wall", F.col("wall").cast("timestamp_ntz"))
        frame.createOrReplaceTempView("given")
        catalog.sql(f"INSERT INTO {{n}}.t SELECT {', '.join(by_spark.schema.names)} FROM given")
        model = pa.concat_tables([model, more, by_spark])
        doors.check(model, "inserted")
        frame.write.format("persist").options(**catalog.stores, shard=str(table.id)).mode("append").save()
        assert texts(table.scan().to_arrow()) == texts(pa.concat_tables([model, by_spark]))
        table.delete("id >= 70")
        table.upsert(by_spark)
        assert [texts(arrow(each, first.schema)) for each in held] == [texts(first)] * 2
        table.optimize()
        doors.check(model, "optimized")
        catalog.sql("DELETE FROM {n}.t WHERE i IS NULL")
        doors.check(model.filter(pc.is_valid(model.column("i"))), "deleted")
