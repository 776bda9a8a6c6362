"""Shards as tables of Spark's SQL, through the catalog in Java. Each test has a namespace of its own in one catalog of the shared session."""

import os
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import build_catalog
import pytest
from catalog_world import SMALL, A, Catalog
from collectors import are_gone
from persist_engine import Location, Schema, ShardId
from persist_engine.model.ownership import Owner
from persist_kit.servers import redis_server, s3_server
from persist_spark import catalog_settings
from pyspark.sql import types as T

pytestmark = pytest.mark.spark

SCHEMA = Schema.from_ddl(
    "id BIGINT NOT NULL, area STRING",
    "n INT, x DOUBLE, f FLOAT, d DECIMAL(12,3), s STRING, ok BOOLEAN, day DATE, at TIMESTAMP, clock TIMESTAMP_NTZ, raw BINARY, "
    "place STRUCT<x: INT, y: STRING>",
)
NAN = float("nan")
DAY, AT = date(2013, 1, 2), datetime(2013, 1, 2, 3, 4, 5, 678901, UTC)
CLOCK = AT.replace(tzinfo=None)
ODD = 'O\'Brien \\ "q" \n ü'
#: Key and value of each row.
ROWS = [
    ((0, None), (None,) * 11),
    ((1, ""), (1, 1.5, 1.5, Decimal("1.500"), "a", True, DAY, AT, CLOCK, b"\x00\xff", {"x": 1, "y": "u"})),
    ((2, "NY"), (-2, NAN, NAN, Decimal("-0.001"), ODD, False, date(1969, 12, 31), AT.replace(year=1969), CLOCK, b"", {"x": None, "y": None})),
    ((3, "ny"), (3, -1.0, 0.1, Decimal("0.000"), "a'b", None, date(2400, 2, 29), None, None, None, None)),
    ((4, "NY"), (2**31 - 1, 0.0, 0.0, None, "", True, None, AT.replace(microsecond=0), CLOCK.replace(hour=0), b"'", {"x": 2, "y": "u"})),
    ((5, "ü"), (-(2**31), float("inf"), 3.4e38, Decimal("999999999.999"), "a\"\"b", False, DAY, AT.replace(year=2300), CLOCK, b"z", None)),
]  # fmt: skip
#: What the engine answers exactly as Spark does, of each kind and each type.
PUSHED = [
    "id = 3", "id <> 3", "n < 3", "n <= 3", "n > -2", "3 < id", "n IN (1, 3, -2147483648)", "n NOT IN (1, 3)", "area IS NULL",
    "area IS NOT NULL", "area <=> NULL", "area = 'NY'", "area <> 'NY'", "area = ''", "area > 'NY'", "s IN ('a', '')", "ok", "NOT ok",
    "x = -0.0D", "x < 0.1D", "x > 1.0D", "x = CAST('NaN' AS DOUBLE)", "x < CAST('Infinity' AS DOUBLE)", "id <=> 3",
    "NOT (area <=> 'NY')", "f = CAST(0.1 AS FLOAT)", "d = 1.5", "d >= 999999999.999", "day = DATE '2013-01-02'",
    "day < DATE '1970-01-01'", "at = TIMESTAMP '2013-01-02 03:04:05.678901'", "at < TIMESTAMP '1970-01-01 00:00:00+02:00'",
    "clock = TIMESTAMP_NTZ '2013-01-02 03:04:05.678901'", "raw = X'00FF'", "place.x = 1", "place.y IS NULL", "place IS NULL",
    "(n = 1 OR s = 'a''b') AND NOT (id = 1 OR area IS NULL)", "NOT (n = 1 AND x > 1.0D)", "id BETWEEN 1 AND 3",
    "s = 'O\\'Brien \\\\ \"q\" \\n ü'", "s <> 'a\"\"b'", "area = 'ü'",
    "s LIKE '%b' AND id > 1", "s LIKE 'a%'", "s NOT LIKE 'a%'", "startswith(s, 'a')", "endswith(s, '\"b')", "contains(s, '\\\\')", "contains(s, '%')",
]  # fmt: skip
#: What stays Spark's, in whole or in part.
KEPT = [
    "length(s) = 1", "n = x", "id % 2 = 0", "s LIKE 'a_b'", "s ILIKE 'A%'",
    "n = 1 OR length(s) = 3",
]  # fmt: skip


def test_the_jar_was_built_from_the_sources_at_hand(local_spark):
    assert build_catalog.is_built()


def test_each_condition_gives_the_rows_that_spark_gives_over_the_same_rows(catalog):
    """One query asks all of them, so that scans of one table with different conditions are planned together. Over plain rows each condition
    is a column.
    """
    catalog.add(catalog.make(schema=SCHEMA), ROWS, 5, SCHEMA)
    sides = [T._parse_datatype_string(ddl) for ddl in (SCHEMA.key_ddl, SCHEMA.val_ddl)]
    flat = T.StructType([*sides[0], *sides[1]])
    catalog.spark.createDataFrame([(*key, *val) for key, val in ROWS], flat).createOrReplaceTempView("plain")
    table = f"{catalog.name}.{catalog.namespace}.flights"
    asked = [*PUSHED, *KEPT]

    parts = [f"SELECT {at} AS q, id FROM {table} WHERE {asked[at]}" for at in range(len(asked))]
    pushed = catalog.sql(" UNION ALL ".join([*parts, f"SELECT -1, count(*) FROM {table}"]))
    try:
        truths = catalog.sql(f"SELECT id, array({', '.join(f'({text})' for text in asked)}) FROM plain")
        for at, text in enumerate(asked):
            assert sorted(id_ for q, id_ in pushed if q == at) == sorted(id_ for id_, true in truths if true[at]), text
        assert [count for q, count in pushed if q == -1] == [len(ROWS)]
        # pyspark rows compare NaN as unequal, so the contents are compared as text.
        shown = [sorted(map(repr, catalog.sql(f"SELECT * FROM {source}"))) for source in (table, "plain")]
        assert shown[0] == shown[1]
    finally:
        catalog.spark.catalog.dropTempView("plain")
    spark_filters = {text: "Filter" in catalog.plan(f"SELECT id FROM {table} WHERE {text}") for text in asked}
    assert [text for text in PUSHED if spark_filters[text]] == []
    assert [text for text in KEPT if not spark_filters[text]] == []


def test_only_the_columns_of_a_query_are_read(catalog, small):
    assert catalog.sql("SELECT count(*) FROM {n}.small") == [(2,)]
    assert "RelationV2[n#" in catalog.plan("SELECT n FROM {n}.small WHERE id = 1")
    assert catalog.sql("SELECT n, n FROM {n}.small WHERE id = 1") == [(10, 10)]
    assert "as_of 2000 where `id` IS NOT NULL and `id` = 1" in explained(
        catalog.frame("SELECT n FROM {n}.small WHERE id = 1")
    )


def explained(frame):
    return frame._jdf.queryExecution().toString()


def test_the_past_by_version_and_by_timestamp(catalog, small):
    ids = "SELECT id FROM {n}.small"
    assert (
        catalog.sql(f"{ids} VERSION AS OF 5")
        == catalog.sql(f"{ids} TIMESTAMP AS OF '1970-01-01 00:00:01.999'")
        == [(1,)]
    )
    assert catalog.sql(f"{ids} TIMESTAMP AS OF '1970-01-01 00:00:02' ORDER BY id") == [(1,), (2,)]
    assert catalog.sql(f"{ids} VERSION AS OF '1970-01-01T00:00:00.005Z'") == [(1,)]
    both = "SELECT a.id, b.n FROM {n}.small a FULL JOIN {n}.small VERSION AS OF 5 b ON a.id = b.id ORDER BY 1"
    assert catalog.sql(both) == [(1, 10), (2, None)]
    for wrong, message in (
        ("VERSION AS OF 2001", "the latest readable time is 2000"),
        ("VERSION AS OF 'x'", "'x' is not a time"),
        ("TIMESTAMP AS OF '1969-12-31 00:00:00'", "before 1970"),
    ):
        with pytest.raises(Exception, match=message):
            catalog.sql(f"{ids} {wrong}")
    with pytest.raises(Exception, match="does not support append|cannot be changed|time travel|SYNTAX"):
        catalog.sql("DELETE FROM {n}.small VERSION AS OF 5 WHERE id = 1")


def test_each_statement_reads_anew_and_a_frame_keeps_its_time(catalog, small):
    text = "SELECT count(*), sum(n) FROM {n}.small WHERE id < 9"
    frame = catalog.frame("SELECT * FROM {n}.small")
    catalog.frame("CREATE OR REPLACE TEMPORARY VIEW newest AS SELECT * FROM {n}.small")
    assert catalog.sql(text) == [(2, 30)]
    catalog.add(small, [((3,), (30,))], 3000)
    catalog.add(small, [((1,), (10,))], 3001, diff=-1)
    assert catalog.sql(text) == [(2, 50)]
    assert [row.id for row in catalog.frame("SELECT id FROM newest ORDER BY id").collect()] == [2, 3]
    assert frame.where("id < 2").union(frame.where("id > 1")).count() == frame.count() == 2
    catalog.spark.catalog.dropTempView("newest")


def test_a_lease_lives_as_long_as_anything_reads_the_table(catalog, small):
    """That nothing reads another table any more shows that the collector has run."""
    rows = catalog.frame("SELECT * FROM {n}.small").rdd
    rows.count()
    catalog.add(small, [((3,), (30,))], 3000)
    other = catalog.make("other")
    catalog.add(other, [((1,), (1,))], 5)
    assert catalog.sql("SELECT * FROM {n}.other") == [(1, 1)]
    assert are_gone(catalog.spark, lambda: catalog.readers(other))
    assert rows.count() == 2
    assert catalog.readers(small) == 1
    del rows
    assert are_gone(catalog.spark, lambda: catalog.readers(small))


def test_names_of_tables_and_namespaces(catalog, small):
    space = catalog.namespace
    odd = catalog.make("air.ports-2", "third")
    catalog.add(odd, [((7,), (7,))], 5)
    catalog.make("small", operator="other")
    assert {(space,), ("third",)} <= set(catalog.sql("SHOW NAMESPACES IN {c}"))
    assert catalog.sql("SHOW TABLES IN {c}.third") == [("third", "air.ports-2", False)]
    assert catalog.sql("SELECT id FROM {c}.third.`air.ports-2`") == [(7,)]
    with pytest.raises(
        Exception, match=f"2 shards are named {space}.small: name one of op.{space}.small, other.{space}.small"
    ):
        catalog.sql("SELECT * FROM {n}.small")
    assert catalog.sql(f"SELECT count(*) FROM {{c}}.op.{space}.small") == [(2,)]
    assert catalog.sql(f"SELECT count(*) FROM {{c}}.other.{space}.small WHERE id > 0") == [(0,)]
    for missing, message in (
        ("SELECT * FROM {n}.smal", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SHOW TABLES IN {c}.nope", "SCHEMA_NOT_FOUND"),
    ):
        with pytest.raises(Exception, match=message):
            catalog.sql(missing)


def test_descriptions_and_plans_name_no_store(catalog, small):
    described = catalog.sql("DESCRIBE EXTENDED {n}.small")
    assert [row[:2] for row in described[:2]] == [("id", "bigint"), ("n", "bigint")]
    shown = str(described) + str(catalog.sql("SHOW CREATE TABLE {n}.small"))
    assert "'key' = 'id'" in shown
    assert str(small) in shown
    for statement in ("SELECT * FROM {n}.small WHERE id = 1", "INSERT INTO {n}.small VALUES (9, 9)"):
        for kind in ("EXTENDED", "FORMATTED"):
            shown += str(catalog.sql(f"EXPLAIN {kind} {statement}"))
    assert "file:" not in shown
    assert "sqlite:" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consensus": "redis://u:pw27@h/0"}, r"catalog\.c\d+\.consensus has credentials"),
        ({"consensus": "redis://h/0?password=pw27"}, "has credentials, which Spark would show: give a file"),
        ({"shard": "x"}, r"catalog\.c\d+\.shard: a catalog has the options blob, consensus, namespace"),
    ],
)
def test_settings_that_a_catalog_cannot_have_are_refused(local_spark, tmp_path, options, message):
    made = Catalog(local_spark, tmp_path)
    for name, value in options.items():
        local_spark.conf.set(f"spark.sql.catalog.{made.name}.{name}", value)
    with pytest.raises(Exception, match=message) as caught:
        made.sql("SHOW NAMESPACES IN {c}")
    assert "pw27" not in str(caught.value)


def test_insert_and_overwrite(catalog, small):
    catalog.sql("INSERT INTO {n}.small SELECT id + 10, n FROM {n}.small")
    catalog.sql("INSERT INTO {n}.small (n, id) VALUES (5, 3)")
    assert catalog.sql("SELECT * FROM {n}.small ORDER BY id") == [(1, 10), (2, 20), (3, 5), (11, 10), (12, 20)]
    catalog.sql("INSERT OVERWRITE {n}.small SELECT id, n + 1 FROM {n}.small WHERE id > 2")
    assert catalog.sql("SELECT * FROM {n}.small ORDER BY id") == [(3, 6), (11, 11), (12, 21)]
    with pytest.raises(Exception, match="CAST|INCOMPATIBLE|NOT_NULL|cannot"):
        catalog.sql("INSERT INTO {n}.small VALUES ('x', 1)")
    assert catalog.sql("SELECT count(*) FROM {n}.small") == [(3,)]


def test_both_modes_of_overwriting_replace_all_rows(catalog, small):
    mode = "spark.sql.sources.partitionOverwriteMode"
    catalog.spark.conf.set(mode, "dynamic")
    try:
        catalog.sql("INSERT OVERWRITE {n}.small SELECT id, n + 1 FROM {n}.small WHERE id = 2")
        assert catalog.sql("SELECT * FROM {n}.small") == [(2, 21)]
        catalog.frame("SELECT id + 1 AS id, n FROM {n}.small").writeTo(catalog.text("{n}.small")).overwritePartitions()
        assert catalog.sql("SELECT * FROM {n}.small") == [(3, 21)]
        with pytest.raises(Exception, match="no rows"):
            catalog.sql("INSERT OVERWRITE {n}.small SELECT * FROM {n}.small WHERE id = 0")
    finally:
        catalog.spark.conf.unset(mode)
    assert catalog.sql("SELECT * FROM {n}.small") == [(3, 21)]


def test_the_first_table_makes_the_stores(local_spark, tmp_path):
    made = Catalog(local_spark, tmp_path, opens=False)
    with pytest.raises(Exception, match="there is no directory"):
        made.sql("SHOW TABLES IN {n}")
    assert list(tmp_path.iterdir()) == []
    made.sql("CREATE TABLE {n}.t TBLPROPERTIES ('key' = 'id') AS SELECT 1L AS id, 'a' AS s")
    assert made.sql("SELECT * FROM {n}.t") == [(1, "a")]


def test_numbers_that_have_names_are_deleted_and_found(catalog, small):
    catalog.sql("CREATE TABLE {n}.odd (id BIGINT, x DOUBLE, `f.f` FLOAT) TBLPROPERTIES ('key' = 'id')")
    values = ("double('NaN'), 0f", "double('inf'), 1f", "0D, float('NaN')", "1D, float('-inf')", "NULL, NULL", "2D, 2f")
    rows = ", ".join(f"({number}, {each})" for number, each in enumerate(values))
    catalog.sql(f"INSERT INTO {{n}}.odd VALUES {rows}")
    assert catalog.sql("SELECT id FROM {n}.odd WHERE x >= double('inf') ORDER BY id") == [(0,), (1,)]
    for condition, left in [
        ("x = CAST('NaN' AS DOUBLE)", [1, 2, 3, 4, 5]),
        ("x < double('NaN') AND x > 1e300", [2, 3, 4, 5]),
        ("`f.f` IN (float('NaN'), 7)", [3, 4, 5]),
        ("`f.f` <=> float('-inf')", [4, 5]),
        ("x <=> NULL", [5]),
    ]:
        catalog.sql(f"DELETE FROM {{n}}.odd WHERE {condition}")
        assert catalog.sql("SELECT id FROM {n}.odd ORDER BY id") == [(number,) for number in left]


def test_create_insert_delete_drop(catalog, small):
    catalog.sql("CREATE TABLE {n}.made (at TIMESTAMP, id BIGINT NOT NULL, s STRING) TBLPROPERTIES ('key' = 'id')")
    assert catalog.sql("SELECT * FROM {n}.made WHERE id > 0") == []
    catalog.sql("INSERT INTO {n}.made (id, s) VALUES (1, 'a'), (2, 'b'), (3, NULL)")
    catalog.sql("DELETE FROM {n}.made WHERE s = 'a' OR id > 2")
    assert catalog.sql("SELECT id, s FROM {n}.made") == [(2, "b")]
    for none in ("false", "id IN (1, NULL)", "id IN (NULL)", "id = NULL", "id IS NULL", "id NOT IN (1, NULL)"):
        catalog.sql(f"DELETE FROM {{n}}.made WHERE {none}")
    assert catalog.sql("SELECT id, s FROM {n}.made") == [(2, "b")]
    with pytest.raises(Exception, match="delete"):
        catalog.sql("DELETE FROM {n}.made WHERE length(s) = 1")
    catalog.sql("CREATE TABLE {n}.copy TBLPROPERTIES ('key' = 'id') AS SELECT id, s FROM {n}.made")
    assert catalog.sql("SELECT * FROM {n}.copy") == [(2, "b")]
    ((again,),) = catalog.sql("SHOW CREATE TABLE {n}.copy")
    catalog.sql(again.replace(".copy ", ".again "))
    assert catalog.sql("SHOW CREATE TABLE {n}.again") != [(again,)], "it has a shard of its own"
    assert catalog.sql("SELECT * FROM {n}.again") == []
    catalog.sql("INSERT INTO {n}.made (id, s) VALUES (3, 'c')")
    catalog.sql("DELETE FROM {n}.made WHERE id IN (3, NULL)")
    assert catalog.sql("SELECT id, s FROM {n}.made") == [(2, "b")]
    catalog.sql("TRUNCATE TABLE {n}.made")
    assert catalog.sql("SELECT count(*) FROM {n}.made") == [(0,)]
    copy = catalog.client.shard_named(f"{catalog.namespace}/copy")
    for table in ("made", "copy", "again"):
        catalog.sql(f"DROP TABLE {{n}}.{table}")
    assert catalog.sql("SHOW TABLES IN {n}") == [(catalog.namespace, "small", False)]
    assert catalog.client.is_finalized(copy)


def test_an_interrupted_create_is_no_table_until_it_is_completed(catalog):
    catalog.client.adopt(Owner("sql", catalog.namespace, "half"), None, ShardId.new())
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        catalog.sql("SELECT * FROM {n}.half")
    catalog.sql("CREATE TABLE {n}.half (id BIGINT) TBLPROPERTIES ('key' = 'id')")
    assert catalog.sql("SELECT * FROM {n}.half") == []


def test_the_changes_between_two_times(catalog, small):
    catalog.add(small, [((1,), (10,))], 3000, diff=-1)
    catalog.add(small, [((2,), (20,))], 4000, diff=-1)
    with catalog.client.open_writer(small, SMALL, purpose="test") as writer:
        writer.compare_and_append([(((2,), (21,)), 4500, 1)], expected_upper=A(4001), new_upper=A(5000))
    rows = "SELECT _commit_version, _change_type, id, n FROM {n}.small CHANGES FROM VERSION"
    every = [
        (5, "insert", 1, 10),
        (2000, "insert", 2, 20),
        (3000, "delete", 1, 10),
        (4000, "delete", 2, 20),
        (4500, "insert", 2, 21),
    ]
    assert catalog.sql(f"{rows} 0 ORDER BY 1") == every
    assert catalog.sql(f"{rows} 2000 TO VERSION 3000 ORDER BY 1") == every[1:3]
    assert catalog.sql(f"{rows} 2000 EXCLUSIVE TO VERSION 3000 INCLUSIVE ORDER BY 1") == every[2:3]
    assert catalog.sql(f"{rows} 0 TO VERSION 4999 WHERE id = 2 AND n < 21 ORDER BY 1") == [every[1], every[3]]
    by_time = "SELECT count(*), max(_commit_timestamp) FROM {n}.small CHANGES FROM TIMESTAMP '1970-01-01 00:00:02' TO TIMESTAMP "
    assert catalog.sql(f"{by_time} '1970-01-01 00:00:04'") == [(3, datetime(1970, 1, 1, 0, 0, 4))]
    with pytest.raises(Exception, match="is past the shard's upper"):
        catalog.sql(f"{rows} 0 TO VERSION 5000")


def test_an_update_is_a_pair_also_where_the_query_needs_no_value(catalog):
    shard = catalog.make("small")
    catalog.add(shard, [((1,), (10,))], 5)
    with catalog.client.open_writer(shard, SMALL, purpose="test") as writer:
        both = [(((1,), (10,)), 6, -1), (((1,), (11,)), 6, 1)]
        writer.compare_and_append(both, expected_upper=A(6), new_upper=A(7))
    text = "SELECT id, _change_type FROM {n}.small CHANGES FROM VERSION 6 ORDER BY 2"
    assert catalog.sql(text) == [(1, "update_postimage"), (1, "update_preimage")]
    assert catalog.sql("SELECT count(*) FROM {n}.small CHANGES FROM VERSION 6") == [(2,)]
    halves = "SELECT _change_type FROM {n}.small CHANGES FROM VERSION 6 WHERE id = 1 AND n = "
    assert catalog.sql(f"{halves} 10") == [("update_preimage",)]
    assert catalog.sql(f"{halves} 11") == [("update_postimage",)]
    assert "where `id` IS NOT NULL and `id` = 1 " in explained(catalog.frame(f"{halves} 10"))


def test_a_table_that_another_process_reads_is_not_dropped(catalog):
    catalog.sql("CREATE TABLE {n}.made TBLPROPERTIES ('key' = 'id') AS SELECT 1L AS id, 2L AS n")
    shard = catalog.client.shard_named(f"{catalog.namespace}/made")
    with (
        catalog.client.open_leased_reader(shard, purpose="other"),
        pytest.raises(Exception, match="since is held .*other"),
    ):
        catalog.sql("DROP TABLE {n}.made")
    assert catalog.sql("SELECT * FROM {n}.made") == [(1, 2)]
    catalog.sql("DROP TABLE {n}.made")
    catalog.sql("DROP TABLE IF EXISTS {n}.made")


REFUSED = [
    ("CREATE TABLE {n}.t (id BIGINT)", "say which columns are the key, as in TBLPROPERTIES"),
    ("CREATE TABLE {n}.t (id BIGINT) TBLPROPERTIES ('key' = 'x')", "key x is no column"),
    ("CREATE TABLE {n}.t (id BIGINT) TBLPROPERTIES ('key' = 'id', 'a' = 'b')", "property a is not known"),
    (
        "CREATE TABLE {n}.t (id BIGINT) PARTITIONED BY (id) TBLPROPERTIES ('key' = 'id')",
        "does not do PARTITIONED BY",
    ),
    (
        "CREATE TABLE {n}.t (id BIGINT) USING csv TBLPROPERTIES ('key' = 'id')",
        "tables of this catalog are shards",
    ),
    ("CREATE TABLE {n}.t (m MAP<STRING, INT>, id INT) TBLPROPERTIES ('key' = 'm')", r"table demo\d+.t: .*m"),
    ("CREATE TABLE {n}.small (id BIGINT) TBLPROPERTIES ('key' = 'id')", "ALREADY_EXISTS"),
    ("DROP TABLE {n}.small", r"belongs to op/demo\d+/small, which created it"),
    ("ALTER TABLE {n}.small ADD COLUMN z INT", "belongs to op/demo"),
    ("ALTER TABLE {n}.small RENAME TO demo.other", "does not do ALTER TABLE RENAME"),
    ("UPDATE {n}.small SET n = 1", "does not support UPDATE"),
    (
        "MERGE INTO {n}.small t USING {n}.small s ON t.id = s.id WHEN MATCHED THEN DELETE",
        "does not support MERGE",
    ),
    ("CREATE NAMESPACE {c}.fresh", "does not do CREATE NAMESPACE"),
    ("DROP NAMESPACE {n}", "does not do DROP NAMESPACE"),
    ("SELECT * FROM {n}.small WITH (where = 'x')", "option where is not known to a table of the catalog"),
]


def test_a_catalog_on_servers_shows_no_secret(local_spark, tmp_path):
    """S3 and Redis, with credentials from files, as in a pod."""
    with redis_server(password="hunter2-redis") as redis, s3_server() as s3:
        keys = f"[default]\naws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
        (tmp_path / "aws-credentials").write_text(keys)
        (tmp_path / "redis-password").write_text("hunter2-redis")
        location = Location(
            blob=f"{s3.location('tables')}&credentials_dir={tmp_path}",
            consensus=f"redis://{redis.address}/0?credentials_dir={tmp_path}",
        )
        catalog = Catalog(local_spark, tmp_path, location=location)
        catalog.sql("CREATE TABLE {n}.orders (id BIGINT NOT NULL, area STRING, n INT) TBLPROPERTIES ('key' = 'id')")
        catalog.sql("INSERT INTO {n}.orders SELECT id, concat('a', id % 3), CAST(id % 10 AS INT) FROM range(1000)")
        catalog.sql("DELETE FROM {n}.orders WHERE id >= 600")
        table = catalog.frame("SELECT * FROM {n}.orders WHERE n = 3")
        assert table.count() == 60
        assert catalog.sql("SELECT area, count(*), max(n) FROM {n}.orders GROUP BY area ORDER BY area") == [
            ("a0", 200, 9), ("a1", 200, 9), ("a2", 200, 9),
        ]  # fmt: skip
        shown = [
            explained(table),
            *map(str, catalog.sql("DESCRIBE EXTENDED {n}.orders")),
            *map(str, catalog.sql("SHOW CREATE TABLE {n}.orders")),
            *map(str, catalog.sql("SET -v")),
            str(local_spark.sparkContext.getConf().getAll()),
        ]
        assert [text for text in shown for secret in ("hunter2-redis", s3.secret_key) if secret in text] == []
        catalog.client.close()


def test_what_a_catalog_does_not_do_is_refused_by_name(catalog, small):
    for statement, message in REFUSED:
        with pytest.raises(Exception, match=message):
            catalog.sql(statement)
    assert catalog.sql("SHOW TABLES IN {n}") == [(catalog.namespace, "small", False)]


def test_over_spark_connect(catalog, small, connect_alone):
    catalog.seen_by(connect_alone)
    text = f"SELECT a.n FROM {catalog.name}.{catalog.namespace}.small a JOIN {catalog.name}.{catalog.namespace}.small VERSION AS OF 5 b USING (id)"
    assert [row.n for row in connect_alone.sql(text).collect()] == [10]
    table = f"{catalog.name}.{catalog.namespace}.small"
    assert connect_alone.table(table).where("id = 2").count() == 1
    assert connect_alone.sql(f"SELECT count(*) AS n FROM {table}.batches").collect()[0].n == 2


def test_spark_sql_needs_no_program_in_python(tmp_path, local_spark):
    """The shell, with nothing but its settings. `local_spark` has seen to the jar and to the interpreter."""
    made = Catalog(local_spark, tmp_path)
    shard = made.make("flights")
    made.add(shard, [((1,), (10,))], 5)
    made.add(shard, [((2,), (20,))], 2000)
    settings = {
        **catalog_settings(**made.stores, namespace="demo"),
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.catalogImplementation": "in-memory",
    }
    text = (
        "SELECT id, n FROM persist.demo.flights TIMESTAMP AS OF '1970-01-01 00:00:01'; "
        "INSERT INTO persist.demo.flights VALUES (3, 30); SELECT count(*) FROM persist.demo.flights; USE persist; SHOW TABLES;"
    )
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = [Path(sys.executable).parent / "spark-sql", "--master", "local[1]", *conf, "-e", text]
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "10", "3", "flights"]
    assert not made.readers(shard), "the end of the shell releases its leases"
    made.client.close()
