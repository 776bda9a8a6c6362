"""A shard with a name, beside which other writers append: what the tests of `PersistTable` work on."""

from collections import Counter

from persist_engine import Antichain, Appended, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_engine.model.ownership import Owner
from persist_spark import PersistTable

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT NOT NULL, area STRING", "n INT, s STRING")


class Shard:
    """A shard named `flights`, with parts of its own."""

    def __init__(self, folder, schema=SCHEMA, location=None):
        stores = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.location, self.schema = location or stores, schema
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4 * KIB))
        self.client = PersistClient.open(self.location, settings=settings)
        self.id = self.client.adopt(Owner("op", "demo", "flights"), None, ShardId.new()).shard_id
        self.client.initialise(self.id, schema)

    def table(self, spark):
        return PersistTable.forName(spark, "flights", blob=self.location.blob, consensus=self.location.consensus)

    def upper(self):
        return self.client.recent_upper(self.id).time

    def add(self, rows, diff=1):
        """What a writer appends."""
        with self.client.open_writer(self.id, self.schema, purpose="rival") as writer:
            while True:
                upper = writer.fetch_recent_upper().time
                updates = [(row, upper, diff) for row in rows]
                answer = writer.compare_and_append(updates, expected_upper=A(upper), new_upper=A(upper + 1))
                if isinstance(answer, Appended):
                    return

    def rows(self):
        """The contents, each row with its count."""
        if self.upper() == 0:
            return Counter()
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            table = reader.snapshot(A(self.upper() - 1)).to_table()
        flat = zip(*(table.column(name).to_pylist() for name in ("key", "val", "diff")), strict=True)
        return Counter({(tuple(key.values()), tuple(val.values())): diff for key, val, diff in flat})

    def updates(self, start):
        """The number of updates at or after `start`."""
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            return reader.changes(start - 1, self.upper() - 1).to_table().num_rows
