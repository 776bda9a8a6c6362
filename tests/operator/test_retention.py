"""A shard of an operator has one retention, the operator's hold. The engine's retention ends when the hold is registered."""

from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.settings import RETAIN_MS
from persist_engine.model.ownership import Owner
from persist_engine.rows.schema import Schema
from persist_operator.api import names
from persist_operator.api.shard import ShardSchema, StoreLocation
from persist_operator.bridge import Bridge
from persist_operator.plan.actions import AdvanceSince, InitialiseShard
from persist_operator.plan.observed import Claim
from persist_operator.settings import OperatorSettings

SHARD_ID = "s01234567-89ab-cdef-0123-456789abcdef"
OWNER = Owner("op", "team", "flights")
CLAIM = Claim(owner=OWNER, wanted=None, proposed=SHARD_ID)
SCHEMA = ShardSchema(key="id BIGINT", value="")


def stores(folder):
    location = StoreLocation(blob=f"file://{folder}/b", consensus=f"sqlite://{folder}/c.db")
    return location, Location(blob=location.blob, consensus=location.consensus)


def advance(location, since_ms):
    critical = names.critical_id_of(SHARD_ID)
    return AdvanceSince(owner=OWNER, shard_id=SHARD_ID, location=location, critical_id=critical, since_ms=since_ms)


def test_a_shard_that_the_operator_creates_has_no_retention_of_the_engine(tmp_path):
    location, _ = stores(tmp_path)
    with Bridge(OperatorSettings()) as bridge:
        bridge.inspect(location, CLAIM)
        bridge.initialise(InitialiseShard(owner=OWNER, shard_id=SHARD_ID, location=location, schema=SCHEMA))
        assert bridge.inspect(location, CLAIM).inspected.retain_ms is None


def test_an_adopted_shard_keeps_its_retention_until_the_operators_hold_stands(tmp_path):
    location, opened = stores(tmp_path)
    with PersistClient.open(opened) as client:
        client.adopt(OWNER, None, ShardId(SHARD_ID))
        client.initialise(ShardId(SHARD_ID), Schema.from_ddl("id BIGINT", ""))
        assert client.inspect(ShardId(SHARD_ID)).retain_ms == RETAIN_MS
    with Bridge(OperatorSettings()) as bridge:
        look = lambda: bridge.inspect(location, CLAIM).inspected  # noqa: E731
        assert look().retain_ms == RETAIN_MS
        assert bridge.advance_since(advance(location, 5)) == 5
        found = look()
        assert (found.retain_ms, [reader.since for reader in found.readers]) == (None, [5])
        assert found.since == 5, "at once, because there may be no further write to this shard"
        assert bridge.advance_since(advance(location, 9)) == 9
        assert look().seqno == found.seqno + 1, "one commit: the reader is known, and it is moved"
        # A retention that an administrator set ends as well, even if the hold does not move.
        with PersistClient.open(opened) as client:
            client.set_retention(ShardId(SHARD_ID), 1000)
        assert bridge.advance_since(advance(location, 9)) == 9
        assert (look().retain_ms, look().since) == (None, 9)
