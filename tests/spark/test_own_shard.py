"""A sink reads no shard that it writes, however the addresses of the stores are written."""

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_spark.inputs.shard import resolved
from persist_spark.spec import ConfigurationError, SinkSpec

SCHEMA = Schema.from_ddl("id BIGINT", "n INT")


def written(folder):
    location, shard_id = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/log.db"), ShardId.new()
    with PersistClient.open(location) as client, client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([(((1,), (1,)), 0, 1)], expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    return location, shard_id


def spec_of(shard_id, own, source):
    document = {
        "sink_id": "ns/copy",
        "run_id": "r-1",
        "shard_id": shard_id,
        "schema": {"key": SCHEMA.key_ddl, "value": SCHEMA.val_ddl},
        "location": {"blob": own.blob, "consensus": own.consensus},
        "input": {"type": "Shard", "shard": {"name": "source"}},
        "envelope": {"type": "Mirror"},
        "source": {"shard_id": shard_id, "location": {"blob": source.blob, "consensus": source.consensus}},
    }
    return SinkSpec.parse(document)


def test_the_same_stores_by_other_addresses_are_the_same(tmp_path):
    own, shard_id = written(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for source in (
        own,
        Location(blob=f"file://{tmp_path}/blobs/", consensus=own.consensus),
        Location(blob=f"file://localhost{tmp_path}/blobs", consensus=f"{own.consensus}?push=off"),
        Location(blob=f"file://{tmp_path}/link/blobs", consensus=f"sqlite://{tmp_path}/link/log.db"),
    ):
        with pytest.raises(ConfigurationError, match=f"the sink writes shard {shard_id}, so it cannot read it"):
            resolved(spec_of(shard_id, own, source))


def test_a_shard_of_other_stores_is_another_one_although_it_has_the_same_id(tmp_path):
    """Stores that an export was imported into, for example."""
    own, shard_id = written(tmp_path / "own")
    other = Location(blob=f"file://{tmp_path}/other/blobs", consensus=f"sqlite://{tmp_path}/other/log.db")
    with PersistClient.open(other) as client, client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([(((2,), (2,)), 0, 1)], expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    assert resolved(spec_of(shard_id, own, other)).input.options["shard"] == shard_id
