"""`persist local delete`: what happens to the data of a shard follows spec.reclaimPolicy, as in a cluster."""

import pytest
from persist_engine.client.client import PersistClient
from persist_engine.model.ids import ShardId

pytestmark = pytest.mark.slow
PURGE = {"reclaimPolicy": "Purge", "deletionConfirmation": "purge-this-shard"}


def made(house, **spec):
    """A shard with one row, written by a sink. Returns its id."""
    house.local("up", "-f", house.write(house.shard(**spec), house.sink()))
    return house.status("PersistShard", "things")["shardId"]


def blobs(house):
    return [one for one in (house.state / "store" / "blobs").rglob("*") if one.is_file()]


def test_retain_keeps_the_data_and_the_same_name_takes_them_up_again(house):
    shard_id = made(house)
    assert "sparksink/load deleted" in house.local("delete", "ssink", "load").stdout
    assert f"the data of {shard_id} stay" in house.local("delete", "pshard", "things").stdout
    assert house.objects.get("PersistShard", "things") is None
    assert house.processes.every() == []
    assert house.run(house.shard()) == []
    assert house.status("PersistShard", "things")["shardId"] == shard_id
    assert house.rows() == 1


def test_a_sink_of_the_same_name_runs_again(house):
    made(house)
    house.local("delete", "sparksink", "load")
    assert house.run(house.shard(), house.sink()) == []
    assert (house.attempts(), house.rows()) == (2, 2)


@pytest.mark.parametrize("spec", [{"reclaimPolicy": "Tombstone"}, PURGE], ids=["Tombstone", "Purge"])
def test_the_data_go_once_no_sink_refers_to_the_shard(house, spec):
    shard_id = made(house, **spec)
    held = house.local("delete", "pshard", "things", code=1).stderr
    assert "SinksAttached" in held
    assert "load" in held
    assert house.rows() == 1
    house.local("delete", "ssink", "load")
    done = house.local("delete", "pshard", "things")
    assert f"reclaimPolicy {spec['reclaimPolicy']}" in done.stdout
    assert house.objects.get("PersistShard", "things") is None
    with PersistClient.open(house.location) as client:
        assert client.inspect(ShardId(shard_id)).is_tombstone
    assert [one for one in blobs(house) if one.name.startswith("p")] == []


def test_a_reader_holds_the_deletion_and_the_next_command_goes_on_at_once(house):
    shard_id = made(house, **PURGE)
    house.local("delete", "ssink", "load")
    with PersistClient.open(house.location) as client:
        with client.open_leased_reader(ShardId(shard_id), purpose="audit"):
            held = house.local("delete", "pshard", "things", code=1).stderr
            assert "ReadersHold" in held
            assert "audit" in held
        assert house.status("PersistShard", "things")["deletion"]["nextAttemptTime"], "the runner itself waits"
    house.local("delete", "pshard", "things")
    assert house.objects.get("PersistShard", "things") is None


def test_what_does_not_exist_is_refused(house):
    house.local("up", "-f", house.write(house.shard()))
    assert "there are: things" in house.local("delete", "pshard", "other", code=64).stderr
    assert "unknown kind" in house.local("delete", "pod", "things", code=64).stderr
