"""An operator's wish for a shard, carried out: its owner, its creation, its hold, and what is left unchanged."""

import dataclasses
import itertools

import pytest
from persist_engine.base.errors import CodecMismatch, InvalidUsage
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.tend import hold_since, tend
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.ownership import OwnedElsewhere, Owner, Unowned
from persist_engine.model.tending import READERS_MAX, KnownLog, NoSuchShard, Tended, WantedHold, WantedSchema, Wish
from persist_engine.rows.schema import CODECS, Schema

OWNER, OTHER = Owner("op", "team", "flights"), Owner("op", "team", "other")
SHARD_ID = ShardId("s00000000-0000-0000-0000-000000000001")
HOLD_ID = CriticalReaderId("c00000000-0000-0000-0000-000000000001")
SCHEMA = ("id BIGINT", "")
HOLD = WantedHold(shard_id=SHARD_ID, critical_id=HOLD_ID, purpose="retention", since_lag_ms=100)
WISH = Wish(owner=OWNER, wanted=None, proposed=SHARD_ID, schema=SCHEMA)
numbers = itertools.count()


@pytest.fixture
def client():
    name = f"mem:tend{next(numbers)}"
    with PersistClient.open(Location(blob=name, consensus=name)) as opened:
        yield opened


def write(client, upper):
    with client.open_writer(SHARD_ID, Schema.from_ddl(*SCHEMA), purpose="test") as writer:
        writer.append([(((1,), ()), upper - 1, 1)], lower=writer.upper, upper=Antichain.of(upper))


def held(client):
    return next((one.since for one in client.inspect(SHARD_ID).readers if one.id == HOLD_ID), None)


def test_a_shard_is_made_once_and_only_with_a_schema(client):
    bare = dataclasses.replace(WISH, schema=None)
    assert tend(client, bare) == NoSuchShard(SHARD_ID)
    made = tend(client, WISH)
    assert isinstance(made, Tended)
    again = tend(client, bare)
    assert (again.inspection.shard_id, again.inspection.seqno) == (SHARD_ID, made.inspection.seqno)


def test_a_shard_is_made_with_the_codecs_of_the_wish_or_not_at_all(client):
    with pytest.raises(
        CodecMismatch, match="no codecs key row, .*: this release of persist has key struct, value struct"
    ):
        tend(client, dataclasses.replace(WISH, codecs=("row", "struct")))
    assert not client.has_log(SHARD_ID)
    assert tend(client, dataclasses.replace(WISH, codecs=("struct", "struct"))).inspection.codecs == CODECS


def test_a_shard_of_another_owner_and_a_shard_without_owner_are_not_changed(client):
    tend(client, WISH)
    theirs = dataclasses.replace(WISH, owner=OTHER, wanted=SHARD_ID, hold=HOLD)
    assert tend(client, theirs) == OwnedElsewhere(SHARD_ID, OWNER)
    client.disown(SHARD_ID)
    assert tend(client, theirs) == Unowned(SHARD_ID)
    assert held(client) is None


def test_a_takeover_succeeds_only_from_the_named_owner(client):
    tend(client, WISH)
    theirs = dataclasses.replace(WISH, owner=OTHER, wanted=SHARD_ID)
    another = ShardId("s00000000-0000-0000-0000-000000000002")
    for allowed in (OwnedElsewhere(another, OWNER), OwnedElsewhere(SHARD_ID, Owner("op", "team", "before"))):
        assert tend(client, dataclasses.replace(theirs, take_over=allowed)) == OwnedElsewhere(SHARD_ID, OWNER)
    allowed = OwnedElsewhere(SHARD_ID, OWNER)
    assert isinstance(tend(client, dataclasses.replace(theirs, take_over=allowed)), Tended)
    assert client.owner_of(SHARD_ID) == OTHER


def test_since_is_held_behind_upper_and_never_goes_back(client):
    tend(client, WISH)
    holding = dataclasses.replace(WISH, hold=HOLD)
    assert (tend(client, holding).hold_problem, held(client)) == ("", 0)
    write(client, 1000)
    seen = tend(client, holding)
    assert held(client) == 900
    assert [one.since for one in seen.inspection.readers if one.id == HOLD_ID] == [900]
    tend(client, dataclasses.replace(holding, hold=dataclasses.replace(HOLD, since_lag_ms=500)))
    assert held(client) == 900


@pytest.mark.parametrize("change", [{"birth": "00"}, {"seqno": 10_000}, {"tag": "00"}, {}])
def test_since_does_not_move_while_the_log_is_another_one(client, change):
    tend(client, dataclasses.replace(WISH, hold=HOLD))
    seen = client.inspect(SHARD_ID)
    write(client, 1000)
    known = KnownLog(**{"seqno": seen.seqno, "birth": seen.birth, "tag": seen.tag, **change})
    answer = tend(client, dataclasses.replace(WISH, hold=HOLD, known=known))
    assert isinstance(answer, Tended)
    assert held(client) == (0 if change else 900)


def test_a_shard_that_its_name_does_not_lead_to_is_not_held(client):
    other = dataclasses.replace(HOLD, shard_id=ShardId("s00000000-0000-0000-0000-000000000002"))
    tend(client, dataclasses.replace(WISH, hold=other))
    assert held(client) is None


def test_the_first_holders_of_since_are_named_and_the_rest_counted(client):
    tend(client, dataclasses.replace(WISH, hold=HOLD))
    write(client, 1000)
    for _ in range(READERS_MAX + 3):
        client.open_critical_since(SHARD_ID, CriticalReaderId.new(), opaque=b"x", purpose="theirs")
    with client.open_writer(SHARD_ID, Schema.from_ddl(*SCHEMA), purpose="test") as writer:
        writer.append([(((2,), ()), 1000, 1)], lower=writer.upper, upper=Antichain.of(1001))
        seen = tend(client, dataclasses.replace(WISH, hold=HOLD))
    readers = seen.inspection.readers
    assert [one.id for one in readers][0] == HOLD_ID
    assert (len(readers), seen.readers_left_out, seen.writers_left_out) == (READERS_MAX + 1, 3, 1)
    assert seen.inspection.writers == ()


def test_a_hold_is_taken_over_from_another_token(client):
    tend(client, WISH)
    first = hold_since(client, SHARD_ID, HOLD_ID, token=b"a", purpose="p", since_ms=5)
    assert (first, hold_since(client, SHARD_ID, HOLD_ID, token=b"b", purpose="p", since_ms=3)) == (5, 5)
    handle = client.open_critical_since(SHARD_ID, HOLD_ID, opaque=b"c")
    assert handle.opaque == b"b"


def test_a_hold_is_moved_by_one_commit_and_kept_by_none(client):
    tend(client, WISH)
    write(client, 1000)

    def hold(since_ms, *, purpose="p"):
        before = client.inspect(SHARD_ID).seqno
        held = hold_since(client, SHARD_ID, HOLD_ID, token=b"a", purpose=purpose, since_ms=since_ms)
        return held, client.inspect(SHARD_ID).seqno - before

    assert hold(5) == (5, 3), "it is registered, moves, and ends the retention"
    assert hold(7) == (7, 1)
    assert hold(7) == (7, 0)
    assert hold(6) == (7, 0)
    assert hold(7, purpose="another") == (7, 1)
    assert [one.purpose for one in client.inspect(SHARD_ID).readers if one.id == HOLD_ID] == ["another"]


def test_a_hold_that_was_ended_meanwhile_is_begun_again_at_the_next_call(client):
    tend(client, WISH)
    write(client, 1000)
    hold_since(client, SHARD_ID, HOLD_ID, token=b"a", purpose="p", since_ms=5)
    client.machine(SHARD_ID).expire_critical_reader(HOLD_ID)
    assert hold_since(client, SHARD_ID, HOLD_ID, token=b"a", purpose="p", since_ms=5) == 5
    assert held(client) == 5


def test_a_schema_unlike_that_of_an_existing_shard_raises_nothing(client):
    tend(client, WISH)
    assert isinstance(tend(client, dataclasses.replace(WISH, schema=("other STRING", ""))), Tended)
    fresh = dataclasses.replace(
        WISH, owner=OTHER, proposed=ShardId("s00000000-0000-0000-0000-000000000009"), schema=("x NONSENSE", "")
    )
    with pytest.raises(InvalidUsage):
        tend(client, fresh)


def wanted(value, *, shard_id=SHARD_ID):
    return WantedSchema(shard_id=shard_id, key=SCHEMA[0], value=value, generation=7)


def test_a_wanted_schema_becomes_the_newest_once(client):
    tend(client, WISH)
    write(client, 5)
    wish = dataclasses.replace(WISH, schema=None, evolve=wanted("note STRING"))
    grown = tend(client, wish)
    assert (grown.inspection.val_schema, grown.schema_problem, grown.schema_generation) == ("note STRING", "", 7)
    assert tend(client, wish).inspection.seqno == grown.inspection.seqno, "no commit, because nothing changes"


def test_a_schema_that_cannot_succeed_is_a_reason_and_no_change(client):
    tend(client, dataclasses.replace(WISH, schema=("id BIGINT", "x BIGINT, note STRING")))
    before = client.machine(SHARD_ID).refresh().schemas
    refused = tend(client, dataclasses.replace(WISH, schema=None, evolve=wanted("x BIGINT")))
    assert (refused.inspection.val_schema, refused.schema_generation) == ("x BIGINT, note STRING", 7)
    assert "note" in refused.schema_problem
    assert client.machine(SHARD_ID).refresh().schemas == before


def test_no_other_shard_and_no_unknown_log_gets_the_schema(client):
    tend(client, WISH)
    elsewhere = wanted("note STRING", shard_id=ShardId("s00000000-0000-0000-0000-000000000002"))
    assert tend(client, dataclasses.replace(WISH, evolve=elsewhere)).inspection.val_schema == ""
    stranger = KnownLog(seqno=0, birth="00" * 16, tag="")
    unknown = dataclasses.replace(WISH, known=stranger, evolve=wanted("note STRING"))
    assert tend(client, unknown).inspection.val_schema == ""
