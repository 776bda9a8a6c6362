"""Names in the place of ids, and stores that the session knows."""

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage, ShardNotFound
from persist_engine.model.ownership import Owner
from persist_spark import PersistTable
from persist_spark.datasource import register
from persist_spark.source.names import with_shard_id

pytestmark = pytest.mark.spark

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")


@pytest.fixture
def location(tmp_path):
    return Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")


@pytest.fixture
def shards(location):
    """Shards of two namespaces, each with one row (index, 0)."""
    owners = [Owner("op", "demo", "flights"), Owner("op", "demo", "air.ports"), Owner("op", "other", "flights")]
    ids = {}
    with PersistClient.open(location) as client:
        for index, owner in enumerate(owners):
            ids[owner] = client.adopt(owner, None, ShardId.new()).shard_id
            with client.open_writer(ids[owner], SCHEMA, purpose="test") as writer:
                writer.compare_and_append([(((index,), (0,)), 0, 1)], expected_upper=A(0), new_upper=A(1))
    return ids


def given(location, **options):
    return {"blob": location.blob, "consensus": location.consensus, **options}


def test_every_form_of_a_name_leads_to_the_shard(location, shards):
    for owner, shard_id in shards.items():
        for name in (f"{owner.namespace}/{owner.name}", f"{owner.namespace}.{owner.name}", str(owner), str(shard_id)):
            assert with_shard_id(given(location, Shard=name))["shard"] == shard_id
    assert with_shard_id(given(location, path="air.ports"))["shard"] == shards[Owner("op", "demo", "air.ports")]


def test_a_name_that_is_unknown_or_shared_is_refused(location, shards):
    with pytest.raises(
        InvalidUsage, match="2 shards are named flights: choose one of op/demo/flights, op/other/flights"
    ):
        with_shard_id(given(location, shard="flights"))
    with pytest.raises(ShardNotFound, match="no shard of this store is named fligths; near names are .*flights"):
        with_shard_id(given(location, shard="fligths"))
    with pytest.raises(ShardNotFound, match="is named zzz; there are air.ports"):
        with_shard_id(given(location, shard="zzz"))
    with pytest.raises(InvalidUsage, match="option shard: a beside the path b"):
        with_shard_id(given(location, shard="a", path="b"))
    [owner] = (each for each in shards if each.namespace == "other")
    with PersistClient.open(location) as client:
        client.disown(shards[owner])
    assert with_shard_id(given(location, shard="flights"))["shard"] == shards[Owner("op", "demo", "flights")]


@pytest.mark.parametrize(
    "given", [{"path": "flights"}, {"path": "URL"}, {}], ids=["beside a path", "two addresses", "alone"]
)
def test_an_address_in_the_place_of_a_name_is_shown_without_its_password(location, given):
    address = "redis://:hunter2@store:6379/0"
    options = {name: value.replace("URL", address) for name, value in given.items()}
    with pytest.raises(InvalidUsage, match="redis://.*store") as refused:
        with_shard_id({"blob": location.blob, "consensus": location.consensus, "shard": address, **options})
    assert "hunter2" not in str(refused.value)


def test_a_session_with_stores_needs_the_name_alone(local_spark, location, shards):
    register(local_spark, blob=location.blob, consensus=location.consensus)
    try:
        frame = local_spark.read.format("persist").load("other.flights")
        assert [tuple(row) for row in frame.collect()] == [(2, 0)]
        frame.write.format("persist").mode("append").save("demo/flights")
        shown = local_spark.read.format("persist").option("shard", "demo/flights").load()
        assert sorted(row.id for row in shown.collect()) == [0, 2]
        with pytest.raises(Exception, match="no shard of this store is named planes"):
            local_spark.read.format("persist").load("planes")
    finally:
        register(local_spark)


def test_a_new_session_knows_the_format_and_the_stores_of_the_session_that_made_it(either_spark, location, shards):
    register(either_spark, blob=location.blob, consensus=location.consensus)
    try:
        made = either_spark.newSession()
        made.read.format("persist").load("other.flights").write.format("persist").mode("append").save("demo/flights")
        made.sql("CREATE TEMPORARY VIEW own USING persist OPTIONS (shard 'demo/flights')")
        assert sorted(row.id for row in made.newSession().read.format("persist").load("demo/flights").collect()) == [
            0,
            2,
        ]
        assert made.table("own").count() == PersistTable.forName(made, "demo/flights").toDF().count() == 2
        assert not either_spark.catalog.tableExists("own")
    finally:
        register(either_spark)


def test_contents_of_a_time_ago(local_spark, location, shards):
    register(local_spark)
    [first, *_] = shards.values()
    loaded = local_spark.read.format("persist").options(**given(location, shard=str(first)))
    with pytest.raises(Exception, match="its upper is .1., the latest readable time is 0"):
        loaded.option("as_of", "-1h").load()
    assert loaded.option("as_of", "-30000d").load().count() == 1


def test_a_plan_shows_no_password_of_a_store(local_spark):
    """Spark prints the options of this command in plans, in its event log and in its user interface."""
    local_spark.conf.unset("spark.sql.redaction.options.regex")
    view = "EXPLAIN EXTENDED CREATE TEMPORARY VIEW hidden USING persist OPTIONS (blob 'file:///x', consensus 'redis://u:pw27@h/0')"
    assert "pw27" in local_spark.sql(view).first()[0]
    for _ in range(2):
        register(local_spark)
    plan = local_spark.sql(view).first()[0]
    assert "pw27" not in plan
    assert "file:///x" in plan
    assert local_spark.conf.get("spark.sql.redaction.options.regex") == r"(?i)url|://\S*@"


def test_a_request_over_connect_shows_no_password_of_a_store(local_spark, connect_alone):
    """Spark prints the options of a client's request in its user interface and in its event log."""
    connect_alone.conf.unset("spark.sql.redaction.string.regex")
    request = "SELECT id, 'redis://u:pw27@h/0' AS consensus FROM range(2)"

    def shown():
        connect_alone.sql(request).collect()
        local_spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        executions = local_spark._jsparkSession.sharedState().statusStore().executionsList()
        newest = max((executions.apply(at) for at in range(executions.size())), key=lambda each: each.executionId())
        return newest.details()

    assert "pw27" in shown()
    for _ in range(2):
        register(connect_alone)
    assert "pw27" not in shown()
    assert "AS consensus" in shown()
    assert connect_alone.conf.get("spark.sql.redaction.string.regex") == r"://\S*@"
