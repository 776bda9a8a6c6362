"""A catalog of Spark's SQL and its stores, for the tests of the catalog."""

from itertools import count

from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.model.ownership import Owner
from persist_spark import catalog_settings

A = Antichain.of
names = count()
SMALL = Schema.from_ddl("id BIGINT", "n BIGINT")


class Catalog:
    """A catalog of the session, and its stores. In a statement `{c}` is its name, and `{n}` the namespace of the test."""

    def __init__(self, spark, folder, *, location=None, opens=True, **options):
        self.spark, self.name, self.namespace = spark, f"c{next(names)}", "demo"
        on_files = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.location = location or on_files
        self.client = PersistClient.open(self.location) if opens else None
        self.seen_by(spark, **options)

    def seen_by(self, spark, **options):
        for name, value in catalog_settings(name=self.name, jar=False, **{**self.stores, **options}).items():
            spark.conf.set(name, value)

    @property
    def stores(self):
        return {"blob": self.location.blob, "consensus": self.location.consensus}

    def text(self, statement):
        return statement.replace("{c}", self.name).replace("{n}", f"{self.name}.{self.namespace}")

    def frame(self, statement):
        return self.spark.sql(self.text(statement))

    def sql(self, statement):
        return [tuple(row) for row in self.frame(statement).collect()]

    def plan(self, statement):
        return self.frame(statement)._jdf.queryExecution().optimizedPlan().toString()

    def make(self, name="flights", namespace=None, schema=SMALL, operator="op"):
        shard = self.client.adopt(Owner(operator, namespace or self.namespace, name), None, ShardId.new()).shard_id
        self.client.initialise(shard, schema)
        return shard

    def add(self, shard, rows, time, schema=SMALL, diff=1):
        with self.client.open_writer(shard, schema, purpose="test") as writer:
            upper = writer.fetch_recent_upper()
            updates = [(row, time, diff) for row in rows]
            writer.compare_and_append(updates, expected_upper=upper, new_upper=A(time + 1))

    def readers(self, shard):
        return len(self.client.inspect(shard).readers)
