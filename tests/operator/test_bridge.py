"""Calls to stores: deadline, breaker, what a failure is called."""

import threading
from dataclasses import replace

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, ShardNotFound, Unavailable
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.model.ownership import Adopted, Owner
from persist_operator.api import names
from persist_operator.api.shard import ShardSchema, StoreLocation
from persist_operator.bridge import Bridge, BridgeFailure
from persist_operator.plan.actions import AdvanceSince, InitialiseShard
from persist_operator.plan.observed import Claim, NotOwned, Seen, ShardMissing, StoreFailure
from persist_operator.settings import LoopSettings, OperatorSettings
from replicas import eventually

SHARD_ID = names.shard_id_of("u")
OWNER = Owner("op", "team", "flights")
CLAIM = Claim(owner=OWNER, wanted=None, proposed=SHARD_ID)
LOCATION = StoreLocation(blob="s3://b", consensus="redis://r:6379/0")
OTHER = StoreLocation(blob="s3://other", consensus="redis://r:6379/0")


@pytest.fixture
def env(now):
    return SeededEnv(start_ms=now)


class Client:
    """Returns or raises the answer that the test sets."""

    def __init__(self):
        self.calls, self.answer = 0, None

    def adopt(self, owner, wanted, proposed, *, take_over):
        return Adopted(proposed, is_new=False)

    def has_log(self, shard_id):
        return True

    def inspect(self, shard_id, *, known_seqno=None):
        self.calls += 1
        if callable(self.answer):
            return self.answer()
        raise self.answer

    def close(self):
        pass


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def bridge(client, env):
    settings = OperatorSettings(loop=LoopSettings(store_deadline_seconds=0.2, store_breaker_seconds=10))
    with Bridge(settings, env=env, open_client=lambda location: client) as made:
        yield made


def test_a_store_that_is_down_is_not_called_while_its_breaker_is_open(bridge, client, env):
    client.answer = Unavailable("redis://r:6379/0: connection refused")
    first = bridge.inspect(LOCATION, CLAIM).inspected
    assert (first.reason, first.permanent) == ("StorageUnreachable", False)
    assert bridge.inspect(LOCATION, CLAIM).inspected == first
    assert client.calls == 1
    bridge.inspect(OTHER, CLAIM)
    assert client.calls == 2
    env.advance_ms(10_001)
    client.answer = lambda: "alive"
    assert bridge.inspect(LOCATION, CLAIM).inspected == "alive"


@pytest.mark.slow
def test_a_call_to_a_store_that_hangs_ends_at_the_deadline(bridge, client):
    released = threading.Event()
    client.answer = released.wait
    try:
        found = bridge.inspect(LOCATION, CLAIM).inspected
    finally:
        released.set()
    assert isinstance(found, StoreFailure)
    assert "did not answer within 0.2 s" in found.message
    assert "redis://r:6379/0" in found.message


def test_regression_a_call_that_the_stop_of_the_operator_cuts_off_is_no_invalid_storage(bridge, client):
    """The engine reports a call on a closed client as misuse. The shard stalled with a wrong configuration for good."""

    def hanging():
        bridge.close()
        raise InvalidUsage("head s1 at redis://r:6379/0: the store was closed")

    client.answer = hanging
    found = bridge.inspect(LOCATION, CLAIM).inspected
    assert (found.reason, found.permanent) == ("StorageUnreachable", False)


@pytest.mark.parametrize(
    ("error", "reason"), [(CorruptData("rollup r"), "CorruptState"), (Incompatible("newer"), "IncompatibleState")]
)
def test_a_broken_shard_opens_no_breaker_for_its_store(bridge, client, error, reason):
    client.answer = error
    assert (bridge.inspect(LOCATION, CLAIM).inspected.reason, bridge.inspect(LOCATION, CLAIM).inspected.permanent) == (
        reason,
        True,
    )
    assert client.calls == 2


@pytest.mark.slow
@pytest.mark.parametrize("answer", [InvalidUsage("another owner"), CorruptData("rollup r")], ids=["refused", "corrupt"])
@pytest.mark.parametrize("is_late", [False, True], ids=["in-time", "late"])
def test_a_store_that_answers_again_is_back_whatever_it_answers(bridge, client, env, answer, is_late):
    """A refusal of the call that probed the store, late, opened the breaker again, and stood as the failure of the store on every shard."""
    client.answer = Unavailable("redis://r:6379/0: connection refused")
    bridge.inspect(LOCATION, CLAIM)
    env.advance_ms(10_001)
    released = threading.Event()

    def probed():
        assert released.wait(60)
        raise answer

    client.answer = probed
    if not is_late:
        released.set()
    bridge.inspect(LOCATION, CLAIM)
    client.answer = lambda: "alive"
    released.set()
    assert eventually(lambda: bridge.inspect(LOCATION, CLAIM).inspected == "alive")


def test_a_missing_shard_is_an_answer_and_no_failure(bridge, client):
    client.answer = ShardNotFound("no")
    assert bridge.inspect(LOCATION, CLAIM).inspected == ShardMissing()


def test_a_shard_is_initialised_once_and_its_since_only_moves_forward(tmp_path):
    location = StoreLocation(blob=f"file://{tmp_path}/b", consensus=f"sqlite://{tmp_path}/c.db")
    schema = ShardSchema(key="id BIGINT", value="")
    critical = names.critical_id_of(SHARD_ID)

    def advance(since, owner=OWNER):
        return AdvanceSince(owner=owner, shard_id=SHARD_ID, location=location, critical_id=critical, since_ms=since)

    with Bridge(OperatorSettings()) as bridge:
        create = InitialiseShard(owner=OWNER, shard_id=SHARD_ID, location=location, schema=schema)
        with pytest.raises(InvalidUsage, match="its owner is None"):
            bridge.initialise(create)
        assert bridge.inspect(location, CLAIM) == Seen(inspected=ShardMissing(), shard_id=SHARD_ID)
        for _ in range(2):
            bridge.initialise(create)
        other = ShardSchema(key="id STRING", value="")
        with pytest.raises(InvalidUsage, match="another schema"):
            bridge.initialise(replace(create, schema=other))
        assert [bridge.advance_since(advance(since)) for since in (5, 3, 9)] == [5, 5, 9]
        assert bridge.inspect(location, CLAIM).inspected.since == 9
        heir = replace(OWNER, name="heir")
        with pytest.raises(InvalidUsage, match="its owner is op/team/flights"):
            bridge.advance_since(advance(20, heir))
        assert bridge.inspect(location, replace(CLAIM, owner=heir, wanted=SHARD_ID)).inspected == NotOwned(
            shard_id=SHARD_ID, owner=OWNER
        )
        bridge.inspect(location, replace(CLAIM, owner=heir, wanted=SHARD_ID, take_over=True))
        # The hold changes its owner with the shard, at once, even if since does not advance. The old owner is refused.
        assert [bridge.advance_since(advance(since, heir)) for since in (7, 20)] == [9, 20]
        with pytest.raises(InvalidUsage, match="its owner is op/team/heir"):
            bridge.advance_since(advance(30))
    with PersistClient.open(Location(blob=location.blob, consensus=location.consensus)) as client:
        (hold,) = client.inspect(ShardId(SHARD_ID)).readers
        assert (hold.id, hold.since) == (critical, 20)


@pytest.mark.slow
def test_an_action_on_an_unreachable_store_fails_with_the_address_of_the_store():
    dead = StoreLocation(blob="mem:", consensus="redis://127.0.0.1:1/0")
    action = InitialiseShard(
        owner=OWNER, shard_id=SHARD_ID, location=dead, schema=ShardSchema(key="id BIGINT", value="")
    )
    settings = OperatorSettings(loop=LoopSettings(store_deadline_seconds=1))
    with Bridge(settings) as bridge, pytest.raises(BridgeFailure, match="127.0.0.1"):
        bridge.initialise(action)
