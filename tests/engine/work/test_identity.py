"""A pair of stores has one identity: under every spelling of its addresses, with any first opener, killed at any call."""

import itertools
import struct
import threading
import zlib

import pytest
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, StoreLost, StoreMismatch, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.base.versioned import SCAN_ALL, SeqNo
from persist_engine.codec.registry import IDENTITY_KEY, decode_identity
from persist_engine.model.ids import StoreId
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.storage.open import open_blob, open_consensus
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from persist_engine.work.identity import identify
from persist_kit.recorded import Killed, Mortality
from persist_kit.servers import redis_server, s3_server
from persist_kit.world import SCHEMA

numbers = itertools.count()


def fresh_id():
    return StoreId.new()


@pytest.fixture(scope="module")
def servers():
    with redis_server() as redis, s3_server() as s3:
        yield redis, s3


@pytest.fixture(params=["mem", "files", pytest.param("servers", marks=[pytest.mark.redis, pytest.mark.s3])])
def locations(request, tmp_path, monkeypatch):
    """Makes separate locations of one kind, from a number for the blob store and a number for consensus."""
    base = next(numbers) * 10
    if request.param == "mem":
        return lambda blob, log: Location(blob=f"mem:id{base + blob}", consensus=f"mem:id{base + log}")
    if request.param == "files":
        return lambda blob, log: Location(
            blob=f"file://{tmp_path}/blob{blob}", consensus=f"sqlite://{tmp_path}/log{log}.db"
        )
    redis, s3 = request.getfixturevalue("servers")
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return lambda blob, log: Location(
        blob=s3.location(f"p{base + blob}"), consensus=f"{redis.url}?prefix=p{base + log}:"
    )


def opened(location):
    return PersistClient.open(location, settings=Settings(retry=RetrySettings(give_up_ms=60_000)))


def id_of(location):
    with opened(location) as client:
        return client.store_id


@pytest.mark.slow
def test_a_pair_has_one_identity_at_every_opening(locations):
    """Spec 22.1."""
    location = locations(0, 0)
    first = id_of(location)
    assert [id_of(location) for _ in range(2)] == [first] * 2
    assert id_of(locations(1, 1)) != first


def test_a_pair_of_local_stores_has_one_identity_under_every_spelling(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    spellings = [
        Location(blob=f"file://{tmp_path}/{name}/b", consensus=f"sqlite:{slashes}{tmp_path}/{name}/c.db?push={push}")
        for name, slashes, push in (("real", "//", "on"), ("link", "//localhost", "off"), ("real", "///", "on"))
    ]
    assert len({id_of(location) for location in spellings}) == 1


@pytest.mark.redis
@pytest.mark.s3
def test_a_pair_of_servers_has_one_identity_under_every_spelling(servers, monkeypatch):
    redis, s3 = servers
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    blob = s3.location("spelled")
    assert "127.0.0.1" in blob + redis.url
    spellings = [
        Location(blob=blob, consensus=f"{redis.url}?prefix=spelled:"),
        Location(blob=blob.replace("127.0.0.1", "localhost"), consensus=f"{redis.url}?prefix=spelled:&push=off"),
        Location(
            blob=f"{blob}&probe=false" if "probe" not in blob else blob,
            consensus=f"{redis.url.replace('127.0.0.1', 'localhost')}?prefix=spelled%3A",
        ),
    ]
    assert len({id_of(location) for location in spellings}) == 1


@pytest.mark.slow
def test_an_emptied_consensus_is_refused_before_a_shard_is_touched(locations):
    store_id = id_of(locations(0, 0))
    with pytest.raises(StoreLost, match="consensus store .* does not know it") as caught:
        opened(locations(0, 1))
    assert caught.value.detail["store_id"] == store_id
    assert all(caught.value.detail[store] in str(caught.value) for store in ("blob", "consensus"))
    assert isinstance(caught.value, InvalidUsage)
    id_of(locations(1, 1))  # nothing was written to the empty one


@pytest.mark.slow
def test_an_emptied_blob_store_is_refused_before_a_shard_is_touched(locations):
    store_id = id_of(locations(0, 0))
    with pytest.raises(StoreLost, match="blob store .* does not know it") as caught:
        opened(locations(1, 0))
    assert caught.value.detail["store_id"] == store_id
    assert id_of(locations(0, 0)) == store_id


@pytest.mark.slow
def test_stores_of_two_pairs_are_refused_together(locations):
    """Spec 22.3."""
    one, two = id_of(locations(0, 0)), id_of(locations(1, 1))
    with pytest.raises(StoreMismatch, match=f"{two}.*{one}") as caught:
        opened(locations(0, 1))
    assert caught.value.detail["store_id"] == two
    assert caught.value.detail["blob_store_id"] == one


def test_a_read_only_opening_writes_nothing(tmp_path):
    location = Location(blob=f"file://{tmp_path}/b", consensus=f"sqlite://{tmp_path}/c.db")
    env, metrics = SystemEnv(), NoMetrics()
    blob = open_blob(location.blob, env=env, metrics=metrics)
    consensus = open_consensus(location.consensus, env=env, metrics=metrics)
    with PersistClient.open(location, create=False):
        pass
    assert blob.get(IDENTITY_KEY) is None
    assert consensus.head(IDENTITY_KEY) is None
    store_id = id_of(location)
    with PersistClient.open(location, create=False) as client:
        assert client.store_id == store_id
    blob.delete(IDENTITY_KEY)
    with pytest.raises(StoreLost):
        PersistClient.open(location, create=False)


@pytest.mark.slow
def test_a_listing_of_shards_leaves_out_the_entries_of_the_store_identity(locations):
    with opened(locations(0, 0)) as client:
        shard_id = ShardId.new()
        client.initialise(shard_id, SCHEMA)
        assert list(client.shards()) == [shard_id]


# -- crashes, races, faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, 12))
def test_the_first_opening_killed_at_any_call_is_completed_by_the_next(dies_at, after):
    """Spec 22.2."""
    blob, consensus = MemBlob(), MemConsensus()
    mortality = Mortality(dies_at, after=after)
    try:
        first = identify(mortality.wrap(blob), mortality.wrap(consensus), fresh=fresh_id(), create=True)
    except Killed:
        first = None
    second = identify(blob, consensus, fresh=fresh_id(), create=False)
    store_id = identify(blob, consensus, fresh=fresh_id(), create=True)
    assert store_id is not None
    assert {first, second} <= {None, store_id}
    log = consensus.scan(IDENTITY_KEY, SeqNo(0), SCAN_ALL)
    assert [decode_identity(entry.data, key="k").is_bound for entry in log] == [False, True]
    assert decode_identity(blob.get(IDENTITY_KEY), key="k").store_id == store_id
    with pytest.raises(StoreLost):
        identify(MemBlob(), consensus, fresh=fresh_id(), create=True)


@pytest.mark.slow
def test_concurrent_first_openings_agree(locations):
    location, count = locations(0, 0), 8
    barrier, found = threading.Barrier(count), []

    def open_one():
        barrier.wait()
        found.append(id_of(location))

    threads = [threading.Thread(target=open_one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == count
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "steps", [*itertools.product((1, 2), repeat=6), *itertools.product(range(1, 12), range(1, 12))], ids=str
)
def test_two_interleaved_first_openings_agree(steps):
    """One opener makes that many store calls, then the other, and so on."""
    blob, consensus = MemBlob(), MemConsensus()
    turns = Turns(steps)
    found = {}
    threads = [
        threading.Thread(
            target=lambda opener=opener: found.update(
                {
                    opener: turns.done(
                        opener,
                        lambda: identify(
                            turns.wrap(opener, blob), turns.wrap(opener, consensus), fresh=fresh_id(), create=True
                        ),
                    )
                }
            )
        )
        for opener in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == identify(blob, consensus, fresh=fresh_id(), create=True)


class Turns:
    """Lets two threads make store calls in turn, so many each."""

    def __init__(self, steps):
        self._order = [opener % 2 for opener, count in enumerate(steps) for _ in range(count)]
        self._ended = set()
        self._changed = threading.Condition()

    def done(self, opener, run):
        try:
            return run()
        finally:
            with self._changed:
                self._ended.add(opener)
                self._changed.notify_all()

    def _is_turn(self, opener):
        while self._order and self._order[0] in self._ended:
            self._order.pop(0)
        return not self._order or self._order[0] == opener

    def wrap(self, opener, store):
        turns = self

        class Turned:
            def __getattr__(self, name):
                method = getattr(store, name)

                def call(*args, **kwargs):
                    if name == "address":
                        return method()
                    with turns._changed:
                        turns._changed.wait_for(lambda: turns._is_turn(opener))
                        if turns._order:
                            turns._order.pop(0)
                        answer = method(*args, **kwargs)
                        turns._changed.notify_all()
                        return answer

                return call

        return Turned()


@pytest.mark.parametrize("seed", range(20))
def test_stores_that_fail_at_random_get_one_identity(seed):
    blob, consensus, faults = MemBlob(), MemConsensus(), Faults(seed, happens=0.7, answers=0.7)
    settings = Settings(retry=RetrySettings(initial_ms=0.01, clamp_ms=0.01))
    client = PersistClient(
        FaultyBlob(blob, faults),
        FaultyConsensus(consensus, faults),
        settings=settings,
        env=SystemEnv(),
        metrics=NoMetrics(),
    )
    assert client.store_id == identify(blob, consensus, fresh=fresh_id(), create=True)


def test_an_opening_of_unreachable_stores_raises_unavailable():
    faults = Faults()
    faults.break_down()
    settings = Settings(retry=RetrySettings(initial_ms=1, give_up_ms=5))
    blob = FaultyBlob(MemBlob(), faults)
    client = PersistClient(blob, MemConsensus(), settings=settings, env=SystemEnv(), metrics=NoMetrics())
    with pytest.raises(Unavailable, match="identify the stores"):
        assert client.store_id


@pytest.mark.parametrize(("data", "error"), [(b"junk", CorruptData), (None, Incompatible)], ids=["damaged", "newer"])
def test_an_unreadable_identity_is_never_overwritten(data, error):
    """Spec 22.4."""
    blob, consensus = MemBlob(), MemConsensus()
    identify(blob, consensus, fresh=fresh_id(), create=True)
    if data is None:
        front = struct.pack("<4sH", b"PSTI", 2)
        data = front + struct.pack("<I", zlib.crc32(front))
    blob.set(IDENTITY_KEY, data)
    with pytest.raises(error, match=IDENTITY_KEY):
        identify(blob, consensus, fresh=fresh_id(), create=True)
    assert blob.get(IDENTITY_KEY) == data
