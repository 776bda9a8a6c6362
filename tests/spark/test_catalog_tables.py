"""What the catalog shows and changes beside rows: columns of tables, metadata, streams."""

import threading

import pytest
from persist_engine.model.ownership import Owner
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

pytestmark = pytest.mark.spark
REFUSALS = (PySparkException, Py4JJavaError)
BATCHES = "SELECT upper FROM {n}.small.batches ORDER BY upper"


@pytest.fixture
def made(catalog):
    """A table that SQL created: `(1, 10)`."""
    catalog.sql(
        "CREATE TABLE {n}.t (id BIGINT, n INT, f FLOAT, place STRUCT<x: INT NOT NULL>) TBLPROPERTIES ('key' = 'id')"
    )
    catalog.sql("INSERT INTO {n}.t VALUES (1, 10, 0.5, named_struct('x', 3))")
    return catalog


def test_a_table_gains_columns_and_wider_numbers(made):
    held = made.frame("SELECT * FROM {n}.t")
    made.sql("ALTER TABLE {n}.t ADD COLUMNS (s STRING, place.y STRUCT<z: INT NOT NULL>)")
    made.sql("ALTER TABLE {n}.t ALTER COLUMN n TYPE BIGINT")
    made.sql("ALTER TABLE {n}.t ALTER COLUMN f TYPE DOUBLE")
    made.sql(f"INSERT INTO {{n}}.t SELECT 2, {2**40}L, 0.25D, named_struct('x', 4, 'y', named_struct('z', 5)), 'new'")
    assert made.sql("SELECT id, n, f, place.x, place.y.z, s FROM {n}.t ORDER BY id") == [
        (1, 10, 0.5, 3, None, None),
        (2, 2**40, 0.25, 4, 5, "new"),
    ]
    assert made.sql("SELECT count(*) FROM {n}.t WHERE s IS NULL AND place.y IS NULL") == [(1,)]
    shard = made.client.registered(Owner("sql", made.namespace, "t"))
    assert (
        made.client.schema(shard).val_ddl
        == "n BIGINT, f DOUBLE, place STRUCT<x: INT NOT NULL, y: STRUCT<z: INT NOT NULL>>, s STRING"
    )
    assert [tuple(row) for row in held.collect()] == [
        (1, 10, 0.5, (3,))
    ]  # a frame from before keeps its columns and its time


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ADD COLUMN s STRING NOT NULL", "s is new and NOT NULL"),
        ("ADD COLUMN s STRING FIRST", "does not do FIRST and AFTER"),
        ("ADD COLUMN s STRING COMMENT 'x'", "does not do COMMENT"),
        ("ADD COLUMN s STRING DEFAULT 'x'", "DEFAULT"),
        ("ADD COLUMN s INTERVAL DAY", "table {namespace}.t"),
        ("ADD COLUMN n INT", "FIELD_ALREADY_EXISTS"),
        ("ALTER COLUMN n TYPE STRING", "cannot become STRING"),
        ("ALTER COLUMN id TYPE DECIMAL(30,0)", "the type of a key field is fixed"),
        ("ALTER COLUMN nope TYPE BIGINT", "cannot be resolved"),
        ("DROP COLUMN n", "does not do ALTER TABLE with DeleteColumn"),
        ("RENAME COLUMN n TO m", "does not do ALTER TABLE with RenameColumn"),
        ("ALTER COLUMN n COMMENT 'x'", "does not do ALTER TABLE with UpdateColumnComment"),
        ("SET TBLPROPERTIES ('a' = 'b')", "does not do ALTER TABLE with SetProperty"),
        ("ALTER COLUMN n SET NOT NULL", "Cannot change nullable column to non-nullable: n"),
        ("ALTER COLUMN n DROP NOT NULL", "does not do ALTER TABLE with UpdateColumnNullability"),
    ],
)
def test_other_changes_are_refused_and_change_nothing(made, change, message):
    with pytest.raises(REFUSALS) as refused:
        made.sql("ALTER TABLE {n}.t " + change)
    assert message.format(namespace=made.namespace) in str(refused.value)
    shard = made.client.registered(Owner("sql", made.namespace, "t"))
    assert made.client.schema(shard).val_ddl == "n INT, f FLOAT, place STRUCT<x: INT NOT NULL>"
    assert made.sql("SELECT id, n FROM {n}.t") == [(1, 10)]


@pytest.mark.parametrize(
    "replace",
    [
        lambda made: made.sql("CREATE OR REPLACE TABLE {n}.t TBLPROPERTIES ('key' = 'id') AS SELECT 5L AS id"),
        lambda made: made.sql("REPLACE TABLE {n}.t (id BIGINT)"),
        lambda made: made.spark.range(3).write.mode("overwrite").saveAsTable(made.text("{n}.t")),
        lambda made: made.spark.range(3).writeTo(made.text("{n}.t")).createOrReplace(),
    ],
    ids=["create-or-replace", "replace", "saveAsTable", "createOrReplace"],
)
def test_a_table_is_not_replaced_and_keeps_its_rows(made, replace):
    """Spark drops the table first where a catalog does not refuse by itself."""
    with pytest.raises(REFUSALS, match=r"does not do REPLACE TABLE: c\d+\.demo\d+\.t keeps its rows"):
        replace(made)
    assert made.sql("SELECT id, n FROM {n}.t") == [(1, 10)]


def test_rows_take_the_place_of_others_by_the_call_that_the_refusal_names(made):
    rows = made.frame("SELECT place, f, n + 1 AS n, id + 1 AS id FROM {n}.t")  # by name, not by position
    rows.writeTo(made.text("{n}.t")).overwrite(F.lit(True))  # noqa: FBT003 - Spark's signature
    assert made.sql("SELECT id, n, place.x FROM {n}.t") == [(2, 11, 3)]


def test_a_table_that_is_made_of_a_query_is_there_with_its_rows_or_not_at_all(made):
    made.sql("CREATE OR REPLACE TABLE {n}.u TBLPROPERTIES ('key' = 'id') AS SELECT id, n FROM {n}.t")
    assert made.sql("SELECT * FROM {n}.u") == [(1, 10)]
    with pytest.raises(REFUSALS, match="DIVIDE_BY_ZERO"):
        made.sql("CREATE TABLE {n}.w TBLPROPERTIES ('key' = 'id') AS SELECT id, 1 / (n - 10) AS x FROM {n}.t")
    assert [name for _, name, _ in made.sql("SHOW TABLES IN {n}")] == ["t", "u"]


def test_two_sessions_that_add_columns_at_once_both_add_theirs(made):
    done = [threading.Thread(target=made.sql, args=(f"ALTER TABLE {{n}}.t ADD COLUMN c{at} INT",)) for at in range(4)]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join()
    shard = made.client.registered(Owner("sql", made.namespace, "t"))
    made.client.recent_upper(shard)
    assert sorted(made.client.schema(shard).val.names) == ["c0", "c1", "c2", "c3", "f", "n", "place"]


def test_metadata_is_a_table_beside_its_table(catalog, small):
    assert catalog.sql(BATCHES) == [(6,), (2001,)]
    catalog.add(small, [((3,), (30,))], 3000)
    assert catalog.sql(BATCHES) == [(6,), (2001,), (3001,)]
    held = catalog.frame("SELECT seqno FROM {n}.small.versions")
    before = held.collect()
    catalog.add(small, [((4,), (40,))], 4000)
    assert held.collect() == before  # one frame, one state
    joined = catalog.sql(
        "SELECT count(*) FROM {n}.small.parts p JOIN {n}.small.batches b USING (batch) WHERE b.upper > 6"
    )
    assert joined == [(3,)]
    assert catalog.sql("SELECT count(*) FROM {n}.small.holds WHERE kind = 'no such kind'") == [(0,)]
    names = [row[0] for row in catalog.sql("DESCRIBE {n}.small.usage")]
    assert names[0] == "shard_id"
    assert catalog.sql("SHOW TABLES IN {n}") == [(catalog.namespace, "small", False)]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("SELECT * FROM {n}.small.nope", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SELECT * FROM {n}.nope.holds", "TABLE_OR_VIEW_NOT_FOUND"),
        ("SELECT * FROM {n}.small.holds VERSION AS OF 5", "as they are now, at no other time"),
        ("DELETE FROM {n}.small.holds", "is metadata and cannot be changed"),
        ("INSERT INTO {n}.small.usage VALUES ('a', 1, 2, 3, 4)", "does not support append"),
        ("DROP TABLE {n}.small.holds", "is metadata and goes with its table"),
    ],
)
def test_metadata_cannot_be_changed_or_asked_for_the_past(catalog, small, statement, message):
    with pytest.raises(REFUSALS) as refused:
        catalog.sql(statement)
    assert message in str(refused.value)
    assert len(catalog.sql(BATCHES)) == 2


def test_a_table_goes_before_the_metadata_of_another(catalog, small):
    """NAMESPACE.TABLE.holds may also be OPERATOR.NAMESPACE.NAME."""
    catalog.add(catalog.make("holds", "small", operator=catalog.namespace), [((9,), (90,))], 5)
    assert catalog.sql("SELECT * FROM {n}.small.holds") == [(9, 90)]


def run(writer, folder):
    return writer.option("checkpointLocation", folder.as_uri()).trigger(availableNow=True)


def test_a_stream_of_changes_begins_with_the_contents_and_goes_on(catalog, small, tmp_path):
    found = []

    def batch(frame, _):
        rows = frame.select("id", "n", "_change_type", "_commit_version").collect()
        found.append(sorted(tuple(row) for row in rows))

    def go_on():
        changes = catalog.spark.readStream.changes(catalog.text("{n}.small"))
        query = run(changes.writeStream.foreachBatch(batch), tmp_path / "checkpoint").start()
        assert query.awaitTermination(120)

    go_on()
    assert found.pop() == [(1, 10, "insert", 2000), (2, 20, "insert", 2000)]
    catalog.add(small, [((1,), (10,))], 3000, diff=-1)
    catalog.add(small, [((3,), (30,))], 3001)
    go_on()
    assert found == [[(1, 10, "delete", 3000), (3, 30, "insert", 3001)]]
    go_on()
    assert len(found) == 1


def test_a_stream_of_changes_from_a_time(catalog, small, tmp_path):
    reading = catalog.spark.readStream.option("maxBytesPerTrigger", "1")
    for options, expected in [
        ({"startingVersion": "2000"}, [(2, 2000), (3, 3000)]),
        ({"startingVersion": "2000", "startingBoundInclusive": "false"}, [(3, 3000)]),
        ({"startingTimestamp": "1970-01-01 00:00:03Z"}, [(3, 3000)]),
    ]:
        if expected[0][1] == 2000 and len(expected) == 2:
            catalog.add(small, [((3,), (30,))], 3000)
        found, batches = [], []

        def batch(frame, number, found=found, batches=batches):
            batches.append(number)
            found.extend(tuple(row) for row in frame.select("id", "_commit_version").collect())

        reading = catalog.spark.readStream.option("maxBytesPerTrigger", "1").options(**options)
        changes = reading.changes(catalog.text("{n}.small"))
        query = run(changes.writeStream.foreachBatch(batch), tmp_path / f"checkpoint{len(options)}{expected}").start()
        assert query.awaitTermination(120)
        assert sorted(found) == expected
        assert len(batches) == len(expected)  # one append in a batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingVersion": "0", "endingVersion": "2000"}, "a stream of changes has no end"),
        ({"where": "id = 1"}, "option where"),
        ({"maxBytesPerTrigger": "many"}, "maxbytespertrigger"),
    ],
)
def test_options_that_a_stream_of_changes_does_not_have(catalog, small, tmp_path, options, message):
    with pytest.raises(REFUSALS) as refused:  # noqa: PT012 - which of the calls refuses is Spark's affair
        changes = catalog.spark.readStream.options(**options).changes(catalog.text("{n}.small"))
        run(changes.writeStream.foreachBatch(lambda *_: None), tmp_path / "checkpoint").start().awaitTermination(120)
    assert message.lower() in str(refused.value).lower()


def test_changes_without_a_start_are_for_streams(catalog, small):
    with pytest.raises(REFUSALS, match="say from which time"):
        catalog.spark.read.changes(catalog.text("{n}.small")).collect()


def test_a_table_is_no_stream_of_rows(catalog, small):
    with pytest.raises(REFUSALS, match="does not support"):
        catalog.spark.readStream.table(catalog.text("{n}.small"))


def test_a_query_writes_a_table_once(made, tmp_path):
    """A query that is started again with the checkpoint of an earlier one goes on after it."""
    source = tmp_path / "in"
    shape = "id BIGINT, n INT, f FLOAT, place STRUCT<x: INT>"
    for at in range(2, 4):
        made.spark.sql(
            f"SELECT {at}L AS id, {at} AS n, CAST(0 AS FLOAT) AS f, named_struct('x', {at}) AS place"
        ).write.mode("append").json(str(source))
        for _ in range(2):
            rows = made.spark.readStream.schema(shape).json(str(source))
            query = rows.writeStream.option("checkpointLocation", (tmp_path / "checkpoint").as_uri())
            assert query.trigger(availableNow=True).toTable(made.text("{n}.t")).awaitTermination(120)
    assert made.sql("SELECT id, n FROM {n}.t ORDER BY id") == [(1, 10), (2, 2), (3, 3)]


def test_a_name_that_leads_to_another_shard_since_is_another_table(catalog):
    """Spark reads equal scans once. A frame from before keeps its shard, and a query can name both at one time."""
    named, found = Owner("op", catalog.namespace, "t"), []
    for n in (10, 20):
        shard = catalog.make("t")
        catalog.add(shard, [((1,), (n,))], 5)
        found.append(
            [
                catalog.frame(f"SELECT * FROM {{n}}.t {at}")
                for at in ("VERSION AS OF 5", "CHANGES FROM VERSION 5 TO VERSION 5")
            ]
        )
        catalog.client.rename(shard, old=named, new=Owner("op", catalog.namespace, f"t{n}"))
    for one, two in zip(*found, strict=True):
        both = one.groupBy("id").sum("n").union(two.groupBy("id").sum("n"))
        assert sorted(row[1] for row in both.collect()) == [10, 20]
