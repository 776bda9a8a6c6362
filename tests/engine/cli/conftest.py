"""A location with one shard, for every test of commands that look at one."""

import shutil

import pytest
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

SCHEMA = Schema.from_ddl("id BIGINT, name STRING", "x DOUBLE, raw BINARY, at TIMESTAMP, nested STRUCT<a: INT>")
at = Antichain.of


class Shop:
    """A location with one shard of 30 rows appended in 12 batches, one row twice."""

    schema = SCHEMA

    def __init__(self, folder, shard_id):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.shard_id = shard_id
        self.args = ["--blob", self.location.blob, "--consensus", self.location.consensus]

    def fill(self):
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None)
        with (
            PersistClient.open(self.location, settings=settings) as client,
            client.open_writer(self.shard_id, SCHEMA, purpose="test") as writer,
        ):
            for i in range(12):
                rows = [
                    (((j, f"näme {j}"), (j / 2, bytes([j]), None, {"a": j})), i, 1) for j in range(30) if j % 12 == i
                ]
                rows += [(((7, "näme 7"), (3.5, b"\x07", None, {"a": 7})), i, 1)] if i == 11 else []
                writer.compare_and_append(rows, expected_upper=at(i), new_upper=at(i + 1))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of the location, and the shard's id: each test works on a copy."""
    folder, shard_id = tmp_path_factory.mktemp("shop"), ShardId.new()
    Shop(folder, shard_id).fill()
    return folder, shard_id


@pytest.fixture
def shop(written, tmp_path):
    folder, shard_id = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return Shop(tmp_path, shard_id)
