"""Redis that lost data, split or is full: 28 outcomes for processes and operators, which docs/operations.md documents.

Each fault hits one real Redis. A process that was running, a process that starts then, and the operator continue their work:
reading, appending, GC, scanning for orphans, reconciling. None of them reads a wrong row, begins a log over existing blobs, or
deletes a part. The table in the document equals the outcomes here, word for word.
"""

import contextlib
import json
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, ShardId
from persist_engine.base.errors import PersistError, StoreLost
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, RetrySettings, Settings
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.repair.force import force_gc
from persist_engine.work.repair.recover import recover_shard
from persist_engine.work.rollup import write_rollup
from persist_kit.servers import redis_server
from persist_kit.world import SCHEMA, row

pytestmark = [pytest.mark.redis, pytest.mark.slow]
A = Antichain.of
DOCUMENT = Path(__file__).parents[2] / "docs/operations.md"
BEGIN, END = "<!-- outcomes: begin, tests/operator/test_lost_redis.py -->", "<!-- outcomes: end -->"
SETTINGS = Settings(
    retry=RetrySettings(give_up_ms=60_000),
    batch=BatchSettings(inline_part_bytes_max=0),
    maintenance=MaintenanceSettings(gc_versions_min=1),
)
#: For faults during which the store does not answer. A busy machine may need a second for a new connection after them.
HASTY = replace(SETTINGS, retry=RetrySettings(give_up_ms=2000))
SPEC = {"schema": {"key": "id BIGINT", "value": "name STRING"}, "retention": {"sinceLagSeconds": 3600}}
PROCESSES = ("process that was running", "fresh process", "operator running", "operator restarted")
FOLDER = "appendonlydir"


def outcome(act):
    """The kind of the error that `act` raised, or `goes on`."""
    try:
        act()
    except PersistError as error:
        return error.kind.value
    return "goes on"


class Site:
    """A shard on a real Redis, with a writing process and an operator."""

    def __init__(self, server, folder, operated, settings=SETTINGS):
        self.server, self.folder, self.settings = server, folder, settings
        self.location = Location(blob=f"file://{folder}/blobs", consensus=server.url)
        self.operated = operated(self.location, spec=SPEC)
        self.shard_id = ShardId(self.operated.settle(6)["shardId"])
        self.client = self.open()
        self.writer = self.client.open_writer(self.shard_id, SCHEMA, purpose="running")
        self.reader = self.client.open_leased_reader(self.shard_id, SCHEMA, purpose="running")
        self.acknowledged: set[tuple[int, str]] = set()
        self.attempted: set[tuple[int, str]] = set()
        self.loses, self.is_over = True, False
        self.append(self.writer, "early", 3)
        self.operated.settle()

    def open(self):
        return PersistClient.open(self.location, settings=self.settings)

    def append(self, writer, name, times=1):
        for _ in range(times):
            time = writer.fetch_recent_upper().time
            self.attempted.add((time, name))
            done = writer.compare_and_append([row(time, name, time)], expected_upper=A(time), new_upper=A(time + 1))
            assert isinstance(done, Appended)
            self.acknowledged.add((time, name))

    def work_on(self):
        """Commit versions, parts and a rollup, which the fault loses later."""
        self.append(self.writer, "late", 3)
        write_rollup(self.client.machine(self.shard_id))
        self.append(self.writer, "late", 2)
        assert self.operated.settle()["log"]["seqno"] == self.client.machine(self.shard_id).refresh().seqno

    def read(self, client, reader):
        """Every row that is read was acknowledged; there is one row for each time, and all are of one history. Where nothing is
        lost, all acknowledged rows are read, and an append of unknown outcome may be among them.
        """
        upper = client.machine(self.shard_id).state.trace.upper.time
        table = reader.snapshot(A(upper - 1)).to_table().to_pylist()
        rows = [(each["key"]["id"], each["val"]["name"], each["diff"]) for each in table]
        assert sorted(key for key, _, _ in rows) == list(range(upper))
        assert {diff for _, _, diff in rows} == {1}
        found = {(key, name) for key, name, _ in rows}
        if self.loses:
            assert found <= self.acknowledged
            assert not {"late", "new"} <= {name for _, name in found}, "rows of two histories"
        else:
            assert {each for each in self.acknowledged if each[0] < upper} <= found <= self.attempted

    def data_folder(self, server):
        return server._log.parent / FOLDER

    def parts(self):
        return {str(path.relative_to(self.folder)) for path in self.folder.glob("blobs/s*/n*/*")}

    def maintain(self, client):
        """Try everything that deletes: a rollup, GC, and the deletion of orphans."""
        for act in (
            lambda: write_rollup(client.machine(self.shard_id)),
            lambda: force_gc(client.machine(self.shard_id)),
            lambda: scan_orphans(client.machine(self.shard_id), older_than_ms=0, commit=True),
        ):
            with contextlib.suppress(PersistError):
                act()

    def running(self):
        found = outcome(lambda: self.append(self.writer, "stale"))
        with contextlib.suppress(PersistError):
            self.read(self.client, self.reader)
        self.maintain(self.client)
        return found

    def fresh(self):
        def work():
            with self.open() as client, client.open_writer(self.shard_id, SCHEMA, purpose="fresh") as writer:
                self.append(writer, "new", 12)
                with client.open_leased_reader(self.shard_id, SCHEMA, purpose="fresh") as reader:
                    self.read(client, reader)

        found = outcome(work)
        with contextlib.suppress(PersistError), self.open() as client:
            self.maintain(client)
        return found

    def operator(self):
        self.operated.settle()
        pause = threading.Event()
        for _ in range(1200):
            # A call that began while the store was away may still be running. The operator makes another one after it.
            if not self.is_over or self.operated.condition()["reason"] != "StorageUnreachable":
                break
            pause.wait(0.1)
            self.operated.settle()
        return self.operated.condition()["reason"]

    def observe(self):
        """The four outcomes in the order of the table."""
        parts = self.parts()
        found = [self.running(), self.fresh(), self.operator()]
        self.operated.restart()
        found.append(self.operator())
        if self.loses:
            if self.log_exists():
                with self.open() as client:
                    assert verify_shard(client.machine(self.shard_id)).is_corrupt
            assert parts <= self.parts(), "a part was deleted"
        return found

    def log_exists(self):
        return b":1\r\n" in self.server.command("EXISTS", f"{{{self.shard_id}}}:m")


@contextlib.contextmanager
def replica_of(site):
    """Another Redis that has replicated all data of `site` and is then detached."""
    primary = site.server
    primary.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")  # for more replicas, which never come
    with redis_server(settings={"replicaof": f"127.0.0.1 {primary.port}"}) as replica:
        waiting = threading.Event()
        for _ in range(3000):
            if b"master_link_status:up" in replica.command("INFO", "replication") and replica.command(
                "DBSIZE"
            ) == primary.command("DBSIZE"):
                break
            waiting.wait(0.02)
        replica.command("REPLICAOF", "NO", "ONE")
        yield replica


def promote(site, replica):
    """From now on the address serves the data of `replica`, or an empty Redis if it is None."""
    site.server.kill()
    mine = site.data_folder(site.server)
    shutil.rmtree(mine)
    if replica is not None:
        replica.stop()
        shutil.copytree(site.data_folder(replica), mine)
    site.server.start()


def flushed(site):
    site.work_on()
    site.server.command("FLUSHALL")
    found = site.observe()
    assert not site.log_exists()
    return found


def restored(site):
    copy = site.folder / "backup"
    shutil.copytree(site.data_folder(site.server), copy)
    site.work_on()
    site.server.kill()
    shutil.rmtree(site.data_folder(site.server))
    shutil.copytree(copy, site.data_folder(site.server))
    site.server.start()
    return site.observe()


def lagging(site):
    with replica_of(site) as replica:
        site.work_on()
        promote(site, replica)
    return site.observe()


def empty(site):
    site.work_on()
    promote(site, None)
    found = site.observe()
    assert not site.log_exists()
    return found


def split(site):
    """Both primaries take commits. Then the one that the running process and the operator did not use wins."""
    with replica_of(site) as replica:
        site.work_on()
        other = Location(blob=site.location.blob, consensus=replica.url)
        with (
            PersistClient.open(other, settings=SETTINGS) as client,
            client.open_writer(site.shard_id, SCHEMA, purpose="split") as writer,
        ):
            site.append(writer, "new", 12)
        promote(site, replica)
    return site.observe()


def in_turn(site, ends):
    """The outcomes during a fault that loses nothing, and after `ends` has ended it."""
    site.loses = False
    during = site.observe()
    ends()
    site.is_over = True
    after = site.observe()
    return [one if one == two else f"{one}, then {two}" for one, two in zip(during, after, strict=True)]


def full_memory(site):
    site.work_on()
    site.server.command("CONFIG", "SET", "maxmemory", "1")
    return in_turn(site, lambda: site.server.command("CONFIG", "SET", "maxmemory", "0"))


def full_disk(site):
    """The append-only file cannot grow. Redis must keep what it acknowledges, so its process ends."""
    site.work_on()
    (log,) = site.data_folder(site.server).glob("*.incr.aof")
    resource.prlimit(site.server.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, resource.RLIM_INFINITY))

    def room():
        site.server.kill()
        site.server.start()

    return in_turn(site, room)


FAULTS = {
    "FLUSHALL": flushed,
    "older RDB or AOF restored": restored,
    "lagging replica promoted": lagging,
    "empty replica promoted": empty,
    "two primaries": split,
    "full memory": full_memory,
    "full disk": full_disk,
}


def line(cells):
    return f"| {' | '.join(cells)} |"


def documented():
    table = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    return [each for each in table.splitlines() if each]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_outcome_is_the_one_that_is_documented(fault, tmp_path, operated):
    with redis_server() as server:
        site = Site(server, tmp_path, operated, HASTY if fault.startswith("full") else SETTINGS)
        try:
            outcomes = line([fault, *FAULTS[fault](site)])
        finally:
            site.operated.stop()
            site.client.close()
    assert outcomes in documented(), f"{DOCUMENT.name} differs: {outcomes}"


def test_the_documented_table_has_every_fault_and_every_process():
    head, rule, *rows = documented()
    assert (head, rule) == (line(["", *PROCESSES]), "|---" * (len(PROCESSES) + 1) + "|")
    assert [each.split(" | ")[0].removeprefix("| ") for each in rows] == list(FAULTS)


def test_a_shard_whose_redis_was_rolled_back_is_recovered_from_the_rollup_of_the_lost_versions(tmp_path, operated):
    with redis_server() as server:
        site = Site(server, tmp_path, operated)
        copy = site.folder / "backup"
        shutil.copytree(site.data_folder(server), copy)
        site.work_on()
        server.kill()
        shutil.rmtree(site.data_folder(server))
        shutil.copytree(copy, site.data_folder(server))
        server.start()
        site.client.close()
        with site.open() as client:
            found = recover_shard(client.versions, site.shard_id, commit=True, replace_log=True)
            assert found.seqno is not None
        with site.open() as client, client.open_leased_reader(site.shard_id, SCHEMA, purpose="check") as reader:
            assert client.recent_upper(site.shard_id) == A(6)
            site.read(client, reader)
        site.operated.settle()
        site.operated.settle()
        assert site.operated.condition()["reason"] == "Healthy"


def test_recover_store_pairs_an_emptied_redis_again_and_recovers_the_shard(tmp_path, operated, persist):
    """The complete recovery, in the steps of the document."""
    with redis_server() as server:
        site = Site(server, tmp_path, operated)
        site.work_on()
        server.command("FLUSHALL")
        site.client.close()
        store = ["--blob", site.location.blob, "--consensus", site.location.consensus]
        code, _, err = persist("admin", "recover", site.shard_id, "--commit", *store)
        assert (code, "StoreLost" in err) == (64, True)
        code, out, _ = persist("admin", "recover-store", "--json", *store)
        report = json.loads(out)
        assert (code, report["forgot"], report["shards_without_log"], report["committed"]) == (
            0,
            "consensus",
            [site.shard_id],
            False,
        )
        with pytest.raises(StoreLost):
            site.open()
        assert persist("admin", "recover-store", "--commit", *store)[0] == 0
        site.operated.settle()
        assert site.operated.condition()["reason"] == "ShardLost"
        assert persist("admin", "recover", site.shard_id, "--commit", *store)[0] == 0
        with site.open() as client, client.open_leased_reader(site.shard_id, SCHEMA, purpose="check") as reader:
            assert client.recent_upper(site.shard_id) == A(6)
            site.read(client, reader)
        site.operated.settle()
        site.operated.settle()
        assert site.operated.condition()["reason"] == "Healthy"
        code, out, _ = persist("admin", "recover-store", "--json", "--commit", *store)
        assert (json.loads(out)["forgot"], json.loads(out)["committed"]) == (None, False)
