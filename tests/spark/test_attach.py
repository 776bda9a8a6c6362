"""`attach`: shards as temporary views, in classic sessions and over Spark Connect."""

from datetime import UTC, datetime

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage, ShardNotFound
from persist_engine.model.ownership import Owner
from persist_spark import attach, register

pytestmark = pytest.mark.spark

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")
OWNERS = [Owner("op", "demo", "flights"), Owner("op", "demo", "air.ports"), Owner("op", "other", "flights")]


@pytest.fixture(scope="module")
def location(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attach")
    return Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")


@pytest.fixture(scope="module")
def shards(location):
    """A shard of each owner, each with one row (index, 0) at time 5."""
    ids = {}
    with PersistClient.open(location) as client:
        for index, owner in enumerate(OWNERS):
            ids[owner] = client.adopt(owner, None, ShardId.new()).shard_id
            add(client, ids[owner], index, 5)
    return ids


def add(client, shard, id_, time):
    with client.open_writer(shard, SCHEMA, purpose="test") as writer:
        upper = writer.fetch_recent_upper()
        writer.compare_and_append([(((id_,), (0,)), time, 1)], expected_upper=upper, new_upper=A(time + 1))


@pytest.fixture
def attached(either_spark, location, shards):
    register(either_spark, blob=location.blob, consensus=location.consensus)
    yield either_spark
    register(either_spark)
    for view in ("flights", "air.ports", "late", "empty", "Flights"):
        either_spark.catalog.dropTempView(view)


def ids(spark, view):
    return sorted(row.id for row in spark.sql(f"SELECT id FROM {view}").collect())


def test_a_namespace_becomes_views_that_show_the_time_of_the_call(attached, location, shards):
    views = attach(attached, namespace="demo")
    assert [(each.view, each.name) for each in views] == [
        ("`air.ports`", "demo/air.ports"),
        ("flights", "demo/flights"),
    ]
    assert [each.shard for each in views] == [str(shards[OWNERS[1]]), str(shards[OWNERS[0]])]
    before = views[1].as_of
    with PersistClient.open(location) as client:
        add(client, shards[OWNERS[0]], 100 + before, before + 10)
    assert ids(attached, "`air.ports`") == [1]
    assert 100 + before not in ids(attached, "flights")
    assert attach(attached, namespace="demo")[1].as_of == before + 10
    assert 100 + before in ids(attached, "flights")
    assert attached.sql("SELECT count(*) FROM flights JOIN `air.ports` USING (n)").first()[0] > 1


def test_names_ids_and_views_of_ones_own(attached, shards):
    other = shards[OWNERS[2]]
    assert [each.view for each in attach(attached, names=["other/flights"])] == ["flights"]
    assert ids(attached, "flights") == [2]
    [late] = attach(attached, names={"late": str(other)}, as_of=datetime.fromtimestamp(0.005, UTC))
    assert (late.view, late.name, late.as_of) == ("late", "other/flights", 5)
    assert ids(attached, "late") == [2]


def test_a_shard_without_rows_is_a_view_that_stays_empty(attached, location):
    with PersistClient.open(location) as client:
        client.initialise(shard := ShardId.new(), SCHEMA)
        [made] = attach(attached, names={"empty": str(shard)})
        assert made.as_of is None
        add(client, shard, 7, 5)
    assert ids(attached, "empty") == []


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, InvalidUsage, "demo/flights and other/flights would both be the view flights: give a namespace"),
        ({"names": {"Flights": "demo/flights", "flights": "other/flights"}}, InvalidUsage, "would both be the view"),
        ({"names": {"a`b": "demo/flights"}}, InvalidUsage, "demo/flights cannot be attached as 'a`b'"),
        ({"names": ["demo/fligths"]}, ShardNotFound, "near names are .*demo/flights"),
        ({"names": ["flights"], "namespace": "third"}, ShardNotFound, "third/flights"),
        ({"names": "flights"}, InvalidUsage, "names is a list of names"),
        ({"namespace": "third"}, InvalidUsage, "nothing to attach: namespace third names no shards"),
        ({"names": {"late": "other/flights"}, "as_of": "soon"}, InvalidUsage, "'soon' is not a time"),
        ({"names": {"late": "demo/air.ports", "flights": "demo/flights"}, "as_of": 10**6}, Exception, "as_of 1000000"),
    ],
)
def test_what_cannot_be_attached_is_refused_and_makes_no_view(attached, given, error, message):
    with pytest.raises(error, match=message):
        attach(attached, **given)
    assert not {"flights", "late", "Flights"} & {table.name for table in attached.catalog.listTables()}


def test_without_stores_attach_says_where_to_give_them(local_spark):
    register(local_spark)
    with pytest.raises(InvalidUsage, match="give blob and consensus here, or once for the session"):
        attach(local_spark)
