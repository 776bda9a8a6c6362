"""A real Redis that lost acknowledged versions, each time in the way it really happens: nothing wrong is read or written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.errors import ForkedLog
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.servers import RedisServer, redis_server
from persist_kit.world import SCHEMA, row

pytestmark = pytest.mark.redis
A = Antichain.of
SETTINGS = Settings(retry=RetrySettings(clamp_ms=50, give_up_ms=60_000))
PATIENCE_S = 60.0


class Shop:
    """One shard on two servers: `primary`, and `other`, which stands in its place after a fail-over."""

    def __init__(self, primary: RedisServer, other: RedisServer, folder: Path) -> None:
        self.primary, self.other, self.folder = primary, other, folder
        self.shard_id = ShardId.new()
        self.clients: list[PersistClient] = []

    def client(self, server: RedisServer | None = None) -> PersistClient:
        """A process of its own."""
        location = Location(blob=f"file://{self.folder}/blobs", consensus=(server or self.primary).url + "?unsafe=true")
        client = PersistClient.open(location, settings=SETTINGS)
        self.clients.append(client)
        return client

    def append(self, client: PersistClient, name: str, times: int = 1) -> None:
        with client.open_writer(self.shard_id, SCHEMA, purpose=name) as writer:
            for _ in range(times):
                upper = writer.fetch_recent_upper().time or 0
                writer.append([row(upper, name, upper)], lower=A(upper), upper=A(upper + 1))

    def names(self, client: PersistClient) -> list[str]:
        upper = client.recent_upper(self.shard_id).time or 0
        with client.open_leased_reader(self.shard_id, purpose="test") as reader:
            return [each["val"]["name"] for each in reader.snapshot(upper - 1).to_table().to_pylist()]

    def log(self, client: PersistClient) -> list[int]:
        machine = client.machine(self.shard_id)
        return [entry.seqno for entry in machine.versions.fetch_all_live_diffs(self.shard_id)]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    """What they keep, they keep in dumps: a crash brings the last one back."""
    at_once = {"repl-diskless-sync-delay": "0"}
    with (
        redis_server(appendonly=False, settings=at_once) as primary,
        redis_server(appendonly=False, settings=at_once) as other,
    ):
        yield primary, other


@pytest.fixture
def shop(servers: tuple[RedisServer, RedisServer], tmp_path: Path) -> Iterator[Shop]:
    for server in servers:
        server.command("REPLICAOF", "NO", "ONE")
        server.command("FLUSHALL")
    shop = Shop(*servers, tmp_path)
    yield shop
    for client in shop.clients:
        client.close()


def until(condition, what: str) -> None:  # noqa: ANN001 - a question
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what


def roll_back(shop: Shop, *, how: str) -> tuple[PersistClient, list[PersistClient]]:
    """One append that stays, two that Redis acknowledges and then loses; a process that knows them, and some that append
    on what stands.
    """
    primary, other = shop.primary, shop.other
    shop.append(shop.client(), "before")
    if how == "a lagging replica is promoted":
        host, port = primary.address.split(":")
        other.command("REPLICAOF", host, port)
        until(lambda: b"master_link_status:up" in other.command("INFO", "replication"), "the replica follows")
        size = primary.command("DBSIZE")
        until(lambda: other.command("DBSIZE") == size, "the replica has it all")
        other.command("REPLICAOF", "127.0.0.1", "1")  # it hears no more
    elif how == "an old dump is restored":
        # Refused while a replica of the test before is still being served: the dump would be one of that test.
        until(lambda: primary.command("SAVE") == b"+OK\r\n", "the dump is written")
    stale = shop.client()
    shop.append(stale, "lost", 2)
    if how == "a lagging replica is promoted":
        other.command("REPLICAOF", "NO", "ONE")
        move(stale, shop.client(other))
        return stale, [shop.client(other), shop.client(other)]
    # The dump is what the server finds when it starts again.
    primary.kill()
    primary.start()
    return stale, [shop.client(), shop.client()]


def move(client: PersistClient, target: PersistClient) -> None:
    """The address of the primary is that of the other server now."""
    ours, theirs = client._versions.consensus, target._versions.consensus
    while hasattr(ours, "_inner"):
        ours, theirs = ours._inner, theirs._inner
    ours._pool = theirs._pool  # type: ignore[attr-defined]


WAYS = ["an old dump is restored", "a lagging replica is promoted"]


@pytest.mark.parametrize("regrown", [0, 2, 9])
@pytest.mark.parametrize("how", WAYS)
def test_a_process_that_knows_lost_versions_stops(shop: Shop, how: str, regrown: int) -> None:
    """It applied foreign diffs onto what was lost, read on, and its next append made the shard unreadable to others."""
    stale, (fresh, another) = roll_back(shop, how=how)
    if regrown:
        shop.append(fresh, "stands", regrown)
    log = shop.log(another)
    for act in (
        lambda: shop.names(stale),
        lambda: shop.append(stale, "phantom"),
        lambda: stale.recent_upper(shop.shard_id),
        lambda: write_rollup(stale.machine(shop.shard_id)),
        lambda: gc_and_truncate(stale.machine(shop.shard_id)),
    ):
        with pytest.raises(ForkedLog):
            act()
    assert shop.log(another) == log
    assert shop.names(another) == ["before"] + ["stands"] * regrown
    shop.append(another, "stands")
    assert shop.names(shop.clients[-1] if how == WAYS[1] else shop.client()) == ["before"] + ["stands"] * (regrown + 1)


@pytest.mark.parametrize("how", WAYS)
def test_an_append_and_a_rollup_without_a_look_before_change_nothing(shop: Shop, how: str) -> None:
    """The head had the very seqno: the append went through, or the rollup, and fresh readers saw what was lost."""
    shop.append(shop.client(), "first")
    stale, (fresh, another) = roll_back(shop, how=how)
    machine = stale.machine(shop.shard_id)
    known = machine.state
    while fresh.machine(shop.shard_id).refresh().seqno < known.seqno:
        fresh.machine(shop.shard_id).overtake()
    assert fresh.machine(shop.shard_id).state.seqno == known.seqno
    rollups = {info.key for info in fresh.machine(shop.shard_id).blob.list_prefix(f"{shop.shard_id}/v")}
    with pytest.raises(ForkedLog):
        machine.versions.write_rollup_for_state(known)
    with pytest.raises(ForkedLog):
        machine.raise_staging_floor(1)
    assert fresh.machine(shop.shard_id).refresh().seqno == known.seqno
    assert {info.key for info in fresh.machine(shop.shard_id).blob.list_prefix(f"{shop.shard_id}/v")} == rollups
    assert shop.names(another) == ["first", "before"]


def test_two_primaries_are_two_histories(shop: Shop) -> None:
    """Each side acknowledges. A process that comes over from the losing side is stopped; one that only wrote on the other goes on."""
    host, port = shop.primary.address.split(":")
    shop.append(shop.client(), "before")
    shop.other.command("REPLICAOF", host, port)
    until(lambda: b"master_link_status:up" in shop.other.command("INFO", "replication"), "the replica follows")
    until(lambda: shop.other.command("DBSIZE") == shop.primary.command("DBSIZE"), "the replica has it all")
    shop.other.command("REPLICAOF", "NO", "ONE")
    left, right = shop.client(), shop.client(shop.other)
    shop.append(left, "left", 3)
    shop.append(right, "right", 2)
    assert shop.names(left) == ["before", "left", "left", "left"]
    move(left, shop.client(shop.other))
    with pytest.raises(ForkedLog):
        shop.names(left)
    with pytest.raises(ForkedLog):
        shop.append(left, "left")
    shop.append(right, "right")
    assert shop.names(right) == ["before", "right", "right", "right"]
    assert shop.names(shop.client(shop.other)) == shop.names(right)
