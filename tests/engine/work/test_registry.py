"""A shard has one owner, and a name leads to its shard, under races and kills at any call."""

import itertools
import threading
from contextlib import suppress

import pytest
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.base.versioned import SCAN_ALL, SeqNo
from persist_engine.codec.registry import name_key, owner_key
from persist_engine.model.ownership import Adopted, OwnedElsewhere, Owner, Unowned
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.storage.metered import MeteredConsensus
from persist_engine.testing.faults import Faults, FaultyConsensus
from persist_kit.counted import CountedMetrics
from persist_kit.recorded import Killed, Mortality
from persist_kit.servers import redis_server, s3_server
from persist_kit.world import SCHEMA, CountedConsensus

MINE, OTHER, ELSEWHERE = Owner("op", "team", "flights"), Owner("op", "team", "other"), Owner("op2", "team", "flights")
numbers = itertools.count()


@pytest.fixture(scope="module")
def servers():
    with redis_server() as redis, s3_server() as s3:
        yield redis, s3


@pytest.fixture(params=["mem", "files", pytest.param("servers", marks=[pytest.mark.redis, pytest.mark.s3])])
def client(request, tmp_path, monkeypatch):
    if request.param == "mem":
        location = Location(blob="mem:", consensus="mem:")
    elif request.param == "files":
        location = Location(blob=f"file://{tmp_path}/blob", consensus=f"sqlite://{tmp_path}/log.db")
    else:
        redis, s3 = request.getfixturevalue("servers")
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        number = next(numbers)
        location = Location(blob=s3.location(f"r{number}"), consensus=f"{redis.url}?prefix=r{number}:")
    with PersistClient.open(location, settings=Settings(retry=RetrySettings(give_up_ms=60_000))) as opened:
        yield opened


def connect(consensus):
    settings = Settings(retry=RetrySettings(initial_ms=0.01, clamp_ms=0.01))
    return PersistClient(MemBlob(), consensus, settings=settings, env=SystemEnv(), metrics=NoMetrics())


@pytest.mark.slow
def test_a_name_finds_its_shard_again_whatever_is_proposed(client):
    first, second = ShardId.new(), ShardId.new()
    assert client.adopt(MINE, None, first) == Adopted(first, is_new=True)
    assert client.adopt(MINE, None, second) == Adopted(first, is_new=False)
    assert client.registered(MINE) == first
    assert client.owner_of(first) == MINE
    assert client.owner_of(second) is None
    assert client.adopt(OTHER, None, second) == Adopted(second, is_new=True)
    assert dict(client.names()) == {MINE: first, OTHER: second}


def test_a_first_claim_takes_five_round_trips_and_a_later_one_two():
    metrics = CountedMetrics()
    consensus = MeteredConsensus(MemConsensus(), env=SystemEnv(), metrics=metrics)
    client, shard_id = connect(consensus), ShardId.new()
    client.adopt(MINE, None, shard_id)
    assert metrics.total("consensus_calls") == 5
    client.adopt(MINE, None, shard_id)
    assert metrics.total("consensus_calls") == 7


@pytest.mark.slow
def test_a_shard_of_another_owner_is_refused_with_its_owner_unless_taken_over(client):
    """Spec 23.2."""
    shard_id = ShardId.new()
    client.adopt(MINE, None, shard_id)
    for owner in (OTHER, ELSEWHERE):
        assert client.adopt(owner, shard_id, ShardId.new()) == OwnedElsewhere(shard_id, MINE)
        assert client.registered(owner) is None
    assert client.adopt(ELSEWHERE, shard_id, ShardId.new(), take_over=True) == Adopted(shard_id, is_new=True)
    assert client.owner_of(shard_id) == ELSEWHERE
    # The refusal names the owner, under its name as well. It does not return another shard silently.
    assert client.adopt(MINE, None, ShardId.new()) == OwnedElsewhere(shard_id, ELSEWHERE)


@pytest.mark.slow
def test_an_ownerless_shard_is_adopted_only_on_request(client):
    shard_id = ShardId.new()
    client.initialise(shard_id, SCHEMA)
    for wanted in (shard_id, None):
        assert client.adopt(MINE, wanted, shard_id) == Unowned(shard_id)
    assert client.registered(MINE) is None
    assert client.adopt(MINE, shard_id, ShardId.new(), take_over=True) == Adopted(shard_id, is_new=True)
    assert client.adopt(MINE, shard_id, ShardId.new()) == Adopted(shard_id, is_new=False)


@pytest.mark.slow
def test_a_request_for_another_shard_moves_the_name_and_keeps_both_shards(client):
    first, second = ShardId.new(), ShardId.new()
    client.adopt(MINE, None, first)
    assert client.adopt(MINE, second, ShardId.new()) == Adopted(second, is_new=True)
    assert client.registered(MINE) == second
    assert client.adopt(MINE, None, ShardId.new()) == Adopted(second, is_new=False)
    assert client.owner_of(first) == MINE


@pytest.mark.slow
def test_a_disowned_shard_has_no_owner_and_no_name(client):
    shard_id, again = ShardId.new(), ShardId.new()
    client.adopt(MINE, None, shard_id)
    client.initialise(shard_id, SCHEMA)
    assert client.disown(shard_id) == MINE
    assert client.disown(shard_id) is None
    assert (client.owner_of(shard_id), client.registered(MINE), list(client.names())) == (None, None, [])
    assert client.adopt(MINE, None, again) == Adopted(again, is_new=True)
    assert client.adopt(OTHER, shard_id, again) == Unowned(shard_id)


@pytest.mark.slow
def test_a_name_that_a_killed_rename_left_leads_to_no_dropped_shard(client):
    """Spec 23.2. Its rows would be those of a table that was just created."""
    shard_id, fresh = ShardId.new(), ShardId.new()
    client.adopt(MINE, None, shard_id)
    client.initialise(shard_id, SCHEMA)
    dying = connect(Mortality(4, after=True).wrap(client.versions.consensus))
    with pytest.raises(Killed):
        dying.rename(shard_id, old=MINE, new=OTHER)
    assert client.registered(OTHER) == shard_id
    assert client.disown(shard_id) == MINE
    assert client.adopt(OTHER, None, fresh) == Adopted(fresh, is_new=True)
    assert (client.owner_of(shard_id), dict(client.names())) == (None, {OTHER: fresh})


def test_a_rename_that_another_process_overtook_takes_its_name_back():
    """Spec 23.4. Another rename, or a drop, comes between any two of its calls."""
    for overtakes_at in range(1, 9):
        for other in (lambda client, shard: client.rename(shard, old=MINE, new=ELSEWHERE), PersistClient.disown):
            consensus, shard_id = MemConsensus(), ShardId.new()
            client = connect(consensus)
            client.adopt(MINE, None, shard_id)
            client.initialise(shard_id, SCHEMA)
            try:
                dying = connect(Mortality(overtakes_at, after=False).wrap(consensus))
                dying.rename(shard_id, old=MINE, new=OTHER)
            except Killed:
                with suppress(InvalidUsage):
                    other(client, shard_id)
            with suppress(InvalidUsage):
                client.rename(shard_id, old=MINE, new=OTHER)
            owner = client.owner_of(shard_id)
            assert dict(client.names()) == ({} if owner is None else {owner: shard_id})


@pytest.mark.slow
def test_disowning_a_shard_keeps_a_name_that_leads_to_another_shard(client):
    """Spec 23.4."""
    first, second = ShardId.new(), ShardId.new()
    client.adopt(MINE, None, first)
    client.adopt(MINE, second, first)
    assert client.disown(first) == MINE
    assert client.registered(MINE) == second


@pytest.mark.slow
def test_only_the_newest_entries_are_kept(client):
    """Spec 23.1."""
    shard_id = ShardId.new()
    for owner in (MINE, OTHER, ELSEWHERE) * 3:
        client.adopt(owner, shard_id, shard_id, take_over=True)
    log = client.versions.consensus.scan(owner_key(shard_id), SeqNo(0), SCAN_ALL)
    assert [entry.seqno for entry in log] == [9]


@pytest.mark.slow
def test_concurrent_claims_have_one_winner(client):
    shard_id, owners = ShardId.new(), [Owner("op", "team", f"n{index}") for index in range(6)]
    barrier, answers = threading.Barrier(len(owners)), {}

    def claim(owner):
        barrier.wait()
        answers[owner] = client.adopt(owner, shard_id, ShardId.new())

    threads = [threading.Thread(target=claim, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = client.owner_of(shard_id)
    assert answers.pop(winner) == Adopted(shard_id, is_new=True)
    assert set(answers.values()) == {OwnedElsewhere(shard_id, winner)}


@pytest.mark.slow
def test_concurrent_claims_of_one_name_get_one_shard(client):
    barrier, answers = threading.Barrier(4), []

    def claim():
        barrier.wait()
        answers.append(client.adopt(MINE, None, ShardId.new()).shard_id)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {client.registered(MINE)}
    assert len(answers) == 4


# -- crashes and faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, 16))
@pytest.mark.parametrize("how", ["proposed", "wanted", "taken over", "let go"])
def test_a_change_killed_at_any_call_is_completed_by_its_repetition(how, dies_at, after):
    """Spec 23.3."""
    consensus, shard_id = MemConsensus(), ShardId.new()
    if how in {"taken over", "let go"}:
        connect(consensus).adopt(OTHER, None, shard_id)

    def change(client):
        match how:
            case "proposed":
                return client.adopt(MINE, None, ShardId.new())
            case "wanted":
                return client.adopt(MINE, shard_id, ShardId.new())
            case "taken over":
                return client.adopt(MINE, shard_id, ShardId.new(), take_over=True)
            case _:
                return client.disown(shard_id)

    dying = connect(Mortality(dies_at, after=after).wrap(consensus))
    answered = None
    try:
        answered = change(dying)
    except Killed:
        named = connect(consensus).registered(MINE)
        # A name never leads to a shard of another owner, except for a proposal that no other process knows.
        assert named is None or connect(consensus).owner_of(named) in ({MINE, None} if how == "proposed" else {MINE})
    client = connect(consensus)
    answer = change(client)
    if how == "let go":
        assert (client.owner_of(shard_id), list(client.names())) == (None, [])
        return
    assert answered in {None, answer} or answered.shard_id == answer.shard_id
    assert client.owner_of(answer.shard_id) == MINE
    assert client.registered(MINE) == answer.shard_id


@pytest.mark.parametrize("seed", range(20))
def test_the_registry_is_right_on_stores_that_fail_at_random(seed):
    consensus, faults = MemConsensus(), Faults(seed, happens=0.7, answers=0.7)
    client, shard_id = connect(FaultyConsensus(consensus, faults)), ShardId.new()
    assert client.adopt(MINE, None, shard_id).shard_id == shard_id
    assert client.adopt(OTHER, shard_id, ShardId.new()) == OwnedElsewhere(shard_id, MINE)
    assert connect(consensus).owner_of(shard_id) == MINE
    assert client.disown(shard_id) in {MINE, None}
    assert connect(consensus).owner_of(shard_id) is None


@pytest.mark.parametrize("was", [OTHER, None], ids=["of another owner", "without owner"])
def test_a_name_that_is_freed_while_its_owner_takes_the_shard_back_stays(was):
    """Spec 23.6. Found by simulation (seed 1021462): the owner had the shard, and no name led to it."""
    consensus, shard_id = CountedConsensus(MemConsensus()), ShardId.new()
    client = connect(consensus)
    client.adopt(MINE, None, shard_id)
    client.initialise(shard_id, SCHEMA)
    client.adopt(OTHER, shard_id, shard_id, take_over=True)
    if was is None:
        client.disown(shard_id)
    consensus.after_next("compare_and_set", lambda: connect(consensus).adopt(MINE, shard_id, shard_id, take_over=True))
    assert not client.free_name(MINE)
    assert (client.owner_of(shard_id), client.registered(MINE)) == (MINE, shard_id)


# -- text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a/b", "a/b/c/d", "//", "a//b", "a/b/"])
def test_invalid_owners_are_refused(text):
    with pytest.raises(InvalidUsage, match="not an owner"):
        Owner.parse(text)


def test_any_text_maps_to_one_key():
    """Spec 23.5."""
    owner = Owner("a/b", "{x}:m", "ü\n..")
    assert name_key(owner) == "name/a%2Fb/%7Bx%7D%3Am/%C3%BC%0A.."
    assert Owner.parse(str(owner)) == owner
    with pytest.raises(InvalidUsage, match="unicode"):
        Owner("op", "\ud800", "n")
    with pytest.raises(InvalidUsage, match="at most"):
        connect(MemConsensus()).registered(Owner("op", "n" * 800, "n"))


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(1, 10))
def test_the_middle_name_of_two_renamings_is_free(client, steps):
    """Spec 23.6. The first was killed after any of its calls. A new shard gets the name, and a third shard after it."""
    first, second, third = ShardId.new(), ShardId.new(), ShardId.new()
    for shard_id, owner in ((first, MINE), (third, ELSEWHERE)):
        client.adopt(owner, None, shard_id)
        client.initialise(shard_id, SCHEMA)
    dying = connect(Mortality(steps, after=True).wrap(client.versions.consensus))
    with suppress(Killed):
        dying.rename(first, old=MINE, new=OTHER)
    held, last = client.owner_of(first), Owner("op", "team", "last")
    client.rename(first, old=held, new=last)
    assert client.free_name(OTHER)
    assert client.adopt(OTHER, None, second) == Adopted(second, is_new=True)
    client.initialise(second, SCHEMA)
    client.rename(second, old=OTHER, new=MINE)
    client.rename(third, old=ELSEWHERE, new=OTHER)
    assert dict(client.names()) == {last: first, MINE: second, OTHER: third}
    for owner, shard_id in client.names():
        assert client.owner_of(shard_id) == owner


def test_a_name_that_is_freed_under_a_running_renaming_leads_to_one_shard():
    """Spec 23.6. The name is taken between any two calls of the renaming, which goes on, and may be repeated after it died."""
    for taken_at, dies_at in itertools.product(range(1, 12), (None, *range(1, 12))):
        consensus, shard_id, fresh = MemConsensus(), ShardId.new(), ShardId.new()
        client = connect(consensus)
        client.adopt(MINE, None, shard_id)
        client.initialise(shard_id, SCHEMA)
        calls = itertools.count(1)

        def take(client=client, fresh=fresh):
            if client.free_name(OTHER) and isinstance(client.adopt(OTHER, None, fresh), Adopted):
                client.initialise(fresh, SCHEMA)

        with suppress(Killed, InvalidUsage):
            between = _Between(
                consensus, lambda calls=calls, at=taken_at, take=take: take() if next(calls) == at else None
            )
            dying = between if dies_at is None else Mortality(dies_at, after=True).wrap(between)
            connect(dying).rename(shard_id, old=MINE, new=OTHER)
        with suppress(InvalidUsage):
            client.rename(shard_id, old=MINE, new=OTHER)
        owner = client.owner_of(shard_id)
        assert client.registered(owner) == shard_id, (taken_at, dies_at)
        assert owner in {MINE, OTHER}
        for name, led in client.names():
            assert client.owner_of(led) == name, (taken_at, dies_at)


class _Between:
    """A consensus before each call of which something else happens."""

    def __init__(self, inner, before):
        self._inner, self._before = inner, before

    def __getattr__(self, name):
        call = getattr(self._inner, name)
        if not callable(call):
            return call

        def counted(*args, **named):
            self._before()
            return call(*args, **named)

        return counted
