"""Lists and maps of Spark: in tables of the catalog, and written by sinks that compare rows."""

from __future__ import annotations

import pytest
from persist_engine.model.ownership import Owner
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_table_of_the_catalog_holds_lists_and_maps(catalog):
    catalog.sql(
        "CREATE TABLE {n}.t (id BIGINT, tags ARRAY<STRING>, n MAP<STRING, INT>, s STRUCT<l: ARRAY<STRUCT<x: INT>>>) "
        "TBLPROPERTIES ('key' = 'id')"
    )
    catalog.sql(
        "INSERT INTO {n}.t VALUES (1, array('b', null), map('z', 1, 'a', null), "
        "named_struct('l', array(named_struct('x', 5), null))), (2, array(), map(), null), (3, null, null, null)"
    )
    assert catalog.sql("SELECT id, tags, map_keys(n), s.l[0].x FROM {n}.t ORDER BY id") == [
        (1, ["b", None], ["a", "z"], 5),
        (2, [], [], None),
        (3, None, None, None),
    ]
    assert catalog.sql(
        "SELECT t.id, each FROM {n}.t t LATERAL VIEW explode(tags) AS each ORDER BY each NULLS LAST"
    ) == [
        (1, "b"),
        (1, None),
    ]
    catalog.sql("ALTER TABLE {n}.t ADD COLUMNS (more ARRAY<MAP<DATE, DOUBLE>>)")
    catalog.sql("INSERT INTO {n}.t VALUES (4, null, null, null, array(map(DATE '2013-01-01', 0.5D)))")
    shard = catalog.client.registered(Owner("sql", catalog.namespace, "t"))
    assert (
        catalog.client.schema(shard).val_ddl
        == "tags ARRAY<STRING>, n MAP<STRING, INT>, s STRUCT<l: ARRAY<STRUCT<x: INT>>>, more ARRAY<MAP<DATE, DOUBLE>>"
    )
    catalog.sql("DELETE FROM {n}.t WHERE id = 2")
    assert catalog.sql("SELECT count(*), max(size(more)) FROM {n}.t") == [(3, 1)]
    with pytest.raises(Exception, match=r"key.tags: a key holds no ARRAY"):
        catalog.sql("CREATE TABLE {n}.u (tags ARRAY<INT>) TBLPROPERTIES ('key' = 'tags')")


def test_a_mirror_sees_every_difference_between_lists(make_target):
    """Spark's own hash skips nulls, so it does not see where in a list one stands."""
    target = make_target("id BIGINT", "l ARRAY<INT>, m MAP<STRING, ARRAY<INT>>")
    columns = "id BIGINT, l ARRAY<INT>, m MAP<STRING, ARRAY<INT>>"
    envelope = Envelope(type=EnvelopeType.MIRROR)
    rows = [
        {"id": 1, "l": [None, 1], "m": {"a": [1], "b": []}},
        {"id": 2, "l": [], "m": {}},
        {"id": 3, "l": None, "m": None},
    ]
    target.run(rows, columns, envelope)
    assert target.state() == {
        (1,): ([None, 1], [("a", [1]), ("b", [])]),
        (2,): ([], []),
        (3,): (None, None),
    }
    held = target.client.inspect(target.id).updates
    target.run(rows, columns, envelope)
    assert target.client.inspect(target.id).updates == held
    rows[0] = {"id": 1, "l": [1, None], "m": {"b": [1], "a": []}}
    rows[1] = {"id": 2, "l": None, "m": {}}
    target.run(rows, columns, envelope)
    assert target.state() == {
        (1,): ([1, None], [("a", []), ("b", [1])]),
        (2,): (None, []),
        (3,): (None, None),
    }


def test_an_upsert_takes_lists(make_target):
    target = make_target("id BIGINT", "l ARRAY<STRUCT<x: BIGINT>>")
    columns = "id BIGINT, l ARRAY<STRUCT<x: INT>>, seq BIGINT"
    envelope = Envelope(type=EnvelopeType.UPSERT, order_column="seq")
    target.run([{"id": 1, "l": [{"x": 1}], "seq": 1}, {"id": 1, "l": [{"x": 2}, None], "seq": 2}], columns, envelope)
    target.run([{"id": 2, "l": [], "seq": 1}], columns, envelope)
    assert target.state() == {(1,): ([{"x": 2}, None],), (2,): ([],)}


def test_an_upsert_refuses_maps_by_name(make_target):
    """Spark compares no maps."""
    target = make_target("id BIGINT", "s STRUCT<m: MAP<STRING, INT>>")
    before = target.footprint()
    with pytest.raises(
        ConfigurationError, match=r"Spark cannot compare the values of s, which are MAPs: use Mirror or Append"
    ):
        target.run(
            [{"id": 1, "s": {"m": {"a": 1}}}],
            "id BIGINT, s STRUCT<m: MAP<STRING, INT>>",
            Envelope(type=EnvelopeType.UPSERT),
        )
    assert target.footprint() == before


def test_commands_that_differ_in_where_a_null_stands_have_no_last_one(make_target):
    """Spark's hash of a struct is that of its fields that are not null, whichever they are."""
    target = make_target("id BIGINT", "a INT, b INT, l ARRAY<INT>")
    for first, second in (({"a": 1, "b": None}, {"a": None, "b": 1}), ({"l": [1, None]}, {"l": [None, 1]})):
        rows = [{"id": 1, "seq": 1, **first}, {"id": 1, "seq": 1, **second}]
        with pytest.raises(ConfigurationError, match="id"):
            target.run(
                rows,
                "id BIGINT, a INT, b INT, l ARRAY<INT>, seq BIGINT",
                Envelope(type=EnvelopeType.UPSERT, order_column="seq"),
            )
    assert target.state() == {}
