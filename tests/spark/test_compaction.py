"""Compaction on executors: it gives what one process gives, beside writers and other compactions, and wherever its driver is killed."""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from persist_engine import Antichain, Location, MergeJob, PersistClient, Schema, ShardId, force_compaction
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import KIB, MEMORY_BYTES_LEAST, MIB, BatchSettings, Settings, within_memory
from persist_engine.codec.keys import blob_key, parse_deletions_key
from persist_engine.model.spine.compaction_plan import compaction_chunks
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_engine.work.deletions import recorded
from persist_spark.compaction.merger import CpuTime, MergeRanges, OnExecutors
from persist_spark.compaction.run import run_compaction
from persist_spark.failures import Terminated
from persist_spark.main import main
from persist_spark.report import Log
from persist_spark.spec import CompactionSpec
from pyspark.sql import SparkSession
from table_shard import Shard

pytestmark = pytest.mark.spark

A = Antichain.of
RUNS, ROWS = 12, 400


def row(i):
    return ((i, None if i % 5 == 0 else f"a{i % 3}"), (None if i % 7 == 3 else i % 10, f"s{i}"))


@pytest.fixture
def shard(tmp_path):
    """Twelve appends of interleaved keys, each of several parts; some rows are taken away again."""
    made = Shard(tmp_path)
    for run in range(RUNS):
        made.add([row(i * RUNS + run) for i in range(ROWS)])
    made.add([row(i) for i in range(0, 100, 3)], diff=-1)
    yield made
    made.client.close()


def small(merger):
    """The merger with so little memory that a request becomes several chunks, and parts become small."""
    settings = replace(
        merger.settings,
        batch=replace(merger.settings.batch, target_part_bytes=16 * KIB, inline_part_bytes_max=0),
        compaction=replace(merger.settings.compaction, memory_bytes_max=400 * KIB),
    )
    return replace(merger, settings=settings)


class Acting:
    """A merger before whose results something else happens, once."""

    def __init__(self, inner, *, act, before=0):
        self.inner, self.act, self.before = inner, act, before
        self.settings, self.chunks = inner.settings, 0

    def merged(self, job):
        self.chunks += len(job.chunks)
        for number, merged in enumerate(self.inner.merged(job)):
            if number == self.before and self.act is not None:
                act, self.act = self.act, None
                act()
            yield merged


def compacted(shard, merger):
    """Everything merged into one batch by a process of its own."""
    with PersistClient.open(shard.location, settings=merger.settings) as client:
        return force_compaction(client.machine(shard.id), full=True, merger=merger)


def runs(shard):
    return [len(batch.run_metas) for batch in shard.client.machine(shard.id).refresh().trace.batches() if batch.parts]


def part_files(shard):
    folder = shard.location.blob.removeprefix("file://")
    return {name for _, _, names in os.walk(folder) for name in names if name.startswith("p")}


def contents(shard):
    """The contents at each readable time."""
    with shard.client.open_leased_reader(shard.id, purpose="test") as reader:
        return [reader.snapshot(A(time)).to_table() for time in range(reader.since.time, shard.upper())]


def check(shard, before):
    assert all(now.equals(then) for now, then in zip(contents(shard), before, strict=True))
    assert verify_shard(shard.client.machine(shard.id)).findings == []


def test_optimize_on_executors_merges_everything_and_keeps_every_time(either_spark, shard):
    before = contents(shard)
    done = shard.table(either_spark).optimize(full=True, on_executors=True).collect()
    assert {(each.type, each.outcome) for each in done} == {("Compaction", "Succeeded")}
    assert runs(shard) == [1]
    check(shard, before)
    assert shard.table(either_spark).optimize(full=True, on_executors=True).collect() == []


def test_many_chunks_of_many_ranges_become_one_run(local_spark, shard):
    before = contents(shard)
    merger = Acting(small(OnExecutors.of(local_spark, blob=shard.location.blob)), act=None)
    done = compacted(shard, merger)
    assert merger.inner.spent.ns > 0
    assert {each.ending for each in done} == {"Succeeded"}
    assert merger.chunks > 3
    assert runs(shard) == [1]
    check(shard, before)


def test_a_writer_goes_on_during_the_compaction(local_spark, shard):
    before = shard.rows()
    merger = Acting(
        small(OnExecutors.of(local_spark, blob=shard.location.blob)),
        act=lambda: shard.add([row(-1), row(-2)]),
        before=1,
    )
    assert {each.ending for each in compacted(shard, merger)} == {"Succeeded"}
    assert merger.act is None
    before.update({row(-1): 1, row(-2): 1})
    assert shard.rows() == before
    assert verify_shard(shard.client.machine(shard.id)).findings == []


def test_a_compaction_that_another_one_overtakes_deletes_its_output_and_no_input(local_spark, shard):
    before = contents(shard)
    named = set()

    def overtake():
        with PersistClient.open(shard.location) as client:
            machine = client.machine(shard.id)
            for each in [batch for batch in machine.refresh().trace.spine_batches() if not batch.is_compact]:
                assert compact(machine, each.request()).applied
            named.update(key.rpartition("/")[2] for batch in machine.state.trace.batches() for key in batch.blob_keys())

    inputs = part_files(shard)
    merger = Acting(OnExecutors.of(local_spark, blob=shard.location.blob), act=overtake)
    done = compacted(shard, merger)
    assert "Conflict" in {each.ending for each in done}
    assert part_files(shard) == inputs | named
    check(shard, before)


@pytest.mark.parametrize("days", [0, 7])
def test_records_of_what_a_compaction_deleted_are_kept_as_long_as_it_was_given(local_spark, shard, monkeypatch, days):
    """Spec 14.16. Another one overtakes it, so it deletes its output."""

    def overtake():
        with PersistClient.open(shard.location) as client:
            machine = client.machine(shard.id)
            for each in [batch for batch in machine.refresh().trace.spine_batches() if not batch.is_compact]:
                assert compact(machine, each.request()).applied

    merger = Acting(OnExecutors.of(local_spark, blob=shard.location.blob), act=overtake)
    merger.spent = CpuTime()
    monkeypatch.setattr(OnExecutors, "of", lambda *_, **__: merger)
    spec = CompactionSpec(shard.id, shard.location.blob, shard.location.consensus, full=True, record_days=days)
    env = SystemEnv()
    began_ms = env.now_ms()
    report = run_compaction(local_spark, spec, enabled=True, env=env, log=Log(io.StringIO(), env))
    assert report["blobs_deleted"] > 0
    found = [parse_deletions_key(blob_key(shard.id, one.key)) for one in recorded(shard.client.machine(shard.id))]
    assert bool(found) == bool(days)
    for one in found:
        assert began_ms <= one.expires_ms - days * 24 * 3600 * 1000 <= env.now_ms()


DRIVER = """
import sys
from persist_engine import Location, PersistClient, force_compaction
from persist_spark.session import start_session
from test_compaction import Acting, OnExecutors, small

def stand_still():
    print("at the boundary", flush=True)
    sys.stdin.read()

blob, consensus, shard, before = sys.argv[1:]
merger = Acting(small(OnExecutors.of(start_session("test"), blob=blob)), act=stand_still, before=int(before))
with PersistClient.open(Location(blob=blob, consensus=consensus), settings=merger.settings) as client:
    force_compaction(client.machine(shard), full=True, merger=merger)
"""


class Stopped:
    """A merger whose driver is stopped as it waits for results."""

    def __init__(self, inner):
        self.inner, self.settings = inner, inner.settings

    def merged(self, job):
        def check():
            raise Terminated

        yield from self.inner.merged(replace(job, check=check))


@pytest.mark.slow
def test_a_compaction_that_ends_interrupts_its_chunks(either_spark, shard):
    """They read parts that never come. The tag of the jobs was one that Spark finds only in the thread that set it, so nothing was
    interrupted, and a driver that was stopped went on until it was killed.
    """
    parts = [path for path in Path(shard.location.blob.removeprefix("file://")).rglob("p*") if path.is_file()]
    for path in parts:
        path.unlink()
        os.mkfifo(path)
    merger = Stopped(small(OnExecutors.of(either_spark, blob=shard.location.blob)))
    with ThreadPoolExecutor(1) as pool:
        compacting = pool.submit(compacted, shard, merger)
        try:
            with pytest.raises(Terminated):
                compacting.result(timeout=120)
        finally:
            for path in parts:  # ends readers that were not interrupted
                end = os.open(path, os.O_RDWR)
                path.unlink()
                os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize("finished", [0, 2])
def test_a_killed_driver_loses_only_what_it_had_not_swapped_in(local_spark, shard, finished):
    before, appended = contents(shard), sum(runs(shard))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", DRIVER, shard.location.blob, shard.location.consensus, shard.id, str(finished)]
    driver = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    )
    try:
        lines = iter(driver.stdout.readline, "")
        assert any("at the boundary" in line for line in lines)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    left = sum(runs(shard))
    assert (left < appended) is (finished > 0)
    check(shard, before)
    done = compacted(shard, small(OnExecutors.of(local_spark, blob=shard.location.blob)))
    assert {each.ending for each in done} == {"Succeeded"}
    assert runs(shard) == [1]
    check(shard, before)


def test_executors_with_too_little_memory_are_refused_with_the_needed_amount(local_spark, shard):
    given = {"spark.executor.memory": "1g", "spark.executor.memoryOverhead": "600m", "spark.executor.cores": "1"}

    class Session:
        """What the merger asks of a session: the configuration of executors, which a running session cannot change."""

        class conf:  # noqa: N801
            get = staticmethod(given.get)

    with pytest.raises(InvalidUsage, match=r"needs 512 MiB .* has 216 MiB: raise spark.executor.memoryOverhead"):
        OnExecutors.of(Session(), blob=shard.location.blob)


#: Runs one task and prints the peak memory of its process, which Linux counts.
MEASURED = """
import pickle, sys
from pathlib import Path
import pyarrow as pa
import pyspark.worker
merge = pickle.loads(Path(sys.argv[1]).read_bytes())
for batch in merge(iter([pa.RecordBatch.from_pydict({"id": [int(sys.argv[2])]})])):
    assert batch.num_rows == 1
print(*[line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")])
"""


@pytest.mark.slow
def test_a_task_stays_within_its_memory(tmp_path):
    """A range of a chunk of 24 runs, with keys between one another's, which do not fit into the memory at once."""
    schema = Schema.from_ddl("id BIGINT", "text STRING")
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/log.db")
    shard_id, rng, count, wide = ShardId.new(), np.random.default_rng(0), 50_000, 256
    settings = within_memory(Settings(batch=BatchSettings()), MEMORY_BYTES_LEAST)
    with PersistClient.open(location, settings=settings) as client:
        with client.open_writer(shard_id, schema, purpose="test") as writer:
            for run in range(24):
                raw = pa.py_buffer(rng.bytes(count * wide // 2).hex().encode())
                offsets = pa.py_buffer(np.arange(0, (count + 1) * wide, wide, dtype=np.int32))
                texts = pa.StringArray.from_buffers(count, offsets, raw)
                table = pa.table(
                    {
                        "key": pa.StructArray.from_arrays([pa.array(np.arange(count) * 24 + run)], ["id"]),
                        "val": pa.StructArray.from_arrays([texts], ["text"]),
                        "time": pa.array(np.full(count, run)),
                        "diff": pa.array(np.ones(count, dtype=np.int64)),
                    }
                )
                writer.compare_and_append(table, expected_upper=A(run), new_upper=A(run + 1))
        machine = client.machine(shard_id)
        while len(held := [each for each in machine.refresh().trace.spine_batches() if each.rows]) > 1:
            machine.spine_exert(1 << 40)
        chunk = max(compaction_chunks(held[0].request(), settings), key=lambda each: len(each.runs))
        assert len(chunk.runs) > 1
        job = MergeJob(machine, (chunk,), schema, machine.schema_id, lambda: None)
        merge = MergeRanges(blob=location.blob, settings=settings, staging_floor_ms=0, tasks=job.task(chunk).split(2))
    (tmp_path / "merge").write_bytes(pickle.dumps(merge))
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "merge"), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak_mib = int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) >> 10
    assert peak_mib <= MEMORY_BYTES_LEAST // MIB


@pytest.mark.slow
def test_the_driver_of_the_image_compacts_a_shard_and_reports_as_a_maintenance_pod_does(shard, tmp_path):
    """A process of its own, which the shard's id and stores are enough for."""
    before, appended = contents(shard), sum(runs(shard))
    properties, report = tmp_path / "spark-defaults.conf", tmp_path / "report.json"
    properties.write_text(
        "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\n"
        "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    )
    stores = ["--blob", shard.location.blob, "--consensus", shard.location.consensus]
    command = [sys.executable, "-m", "persist_spark.main", "compact", "--shard", shard.id, *stores]
    command += ["--properties", str(properties), "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(report.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == said
    assert (said["type"], said["outcome"], said["shard_id"], said["executors"]) == (
        "Compaction",
        "Succeeded",
        shard.id,
        1,
    )
    assert said["applied"] == said["requests"] > 0
    assert said["bytes_written"] > 0
    assert said["cpu_ms"] > 0
    assert sum(said["stores"]["commits"]) >= said["applied"]
    assert sum(runs(shard)) < appended
    check(shard, before)


@pytest.mark.parametrize(
    ("variable", "stores", "code", "outcome", "message"),
    [
        ("1", "blobs", 0, "Skipped", "nothing was due"),
        ("", "nowhere", 72, "Failed", "nowhere"),
    ],
    ids=["disabled", "no-stores"],
)
def test_a_driver_that_compacts_nothing_reports_it(
    local_spark, shard, tmp_path, monkeypatch, variable, stores, code, outcome, message
):
    """In this process and in the shared session, which the driver must not stop."""
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    monkeypatch.setenv("PERSIST_COMPACTION_DISABLED", variable)
    appended = runs(shard)
    where = ["--blob", f"file://{tmp_path}/{stores}", "--consensus", shard.location.consensus]
    assert main(["compact", "--shard", shard.id, *where, "--report", str(tmp_path / "report.json")]) == code
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["type"], report["outcome"], report["executors"]) == ("Compaction", outcome, int(code == 0))
    assert message in report["message"]
    assert runs(shard) == appended
