"""Sinks that read shards: at every time that both shards have, one holds what the SQL makes of the other."""

import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_spark.report import Log
from persist_spark.sink import run_sink
from persist_spark.spec import ConfigurationError, SinkSpec
from persist_spark.streaming.position import Position, encode_position
from persist_spark.streaming.stream import run_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
A = Antichain.of
#: The rows of the first shard are (id, n), those of the second and the third (m, id): only even n, and their halves.
SCHEMA, HALVES = Schema.from_ddl("id BIGINT", "n BIGINT"), Schema.from_ddl("m BIGINT", "id BIGINT")
SQL = "select n div 2 as m, id, _time, _diff from input where n % 2 = 0"
DIFF = {"type": "Diff", "diffColumn": "_diff", "timestampColumn": "_time"}
CONF = (
    "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 512m\nspark.log.level ERROR\n"
    "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    "spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC\n"
)


def halves(rows):
    found = Counter()
    for (id_, n), count in rows.items():
        found[n // 2, id_] += count if n % 2 == 0 else 0
    return +found


class Chain:
    """Shards in one pair of stores, what was written to the first one, and the sinks between them."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder
        self.location = {"blob": f"file://{folder}/blobs", "consensus": f"sqlite://{folder}/consensus.db"}
        self.client = PersistClient.open(Location(**self.location), settings=Settings(retain_ms=None))
        self.ids = [ShardId.new() for _ in range(3)]
        for shard, schema in zip(self.ids, (SCHEMA, HALVES, HALVES), strict=True):
            self.client.initialise(shard, schema)
        self.dice, self.upper, self.rows = random.Random(7), 0, Counter()
        self.history = {}

    def write(self, appends):
        """So many appends to the first shard, each with rows that come, that go, and that get another value."""
        with self.client.open_writer(self.ids[0], SCHEMA, purpose="test") as writer:
            for _ in range(appends):
                lower, self.upper, updates = self.upper, self.upper + 10, Counter()
                for row in self.dice.sample(sorted(self.rows), min(4, len(self.rows))):
                    updates[row] -= self.rows[row]
                    updates[row[0], self.dice.randrange(9)] += self.dice.choice([0, 1, 2])
                for _ in range(5):
                    updates[self.dice.randrange(40), self.dice.randrange(9)] += 1
                self.rows = Counter({row: self.rows[row] + updates[row] for row in {*self.rows, *updates}})
                self.rows = +self.rows
                rows = [(((id_,), (n,)), lower, diff) for (id_, n), diff in updates.items() if diff]
                answer = writer.compare_and_append(rows, expected_upper=A(lower), new_upper=A(self.upper))
                assert isinstance(answer, Appended)
                self.history[lower] = self.rows

    def contents(self, shard, time):
        with (
            self.client.open_leased_reader(self.ids[shard], purpose="test") as reader,
            reader.snapshot(A(time)) as found,
        ):
            rows = found.to_table().to_pylist()
        return Counter({(*row["key"].values(), *row["val"].values()): row["diff"] for row in rows})

    def readable(self, shard):
        """The times of appends to the first shard at which this shard is complete, too."""
        upper = self.client.recent_upper(self.ids[shard]).time
        return [time for time in self.history if time < upper]

    def document(self, reads, writes, run="r-1", *, envelope=DIFF, stream=True, schema=HALVES, **shard):
        made = {
            "sink_id": f"ns/{reads}-{writes}",
            "run_id": run,
            "shard_id": self.ids[writes],
            "schema": {"key": schema.key_ddl, "value": schema.val_ddl},
            "location": self.location,
            "input": {"type": "Shard", "shard": {"name": "source", **shard}},
            "envelope": envelope,
            "write": {"parallelism": 1},
            "source": {"shard_id": self.ids[reads], "location": self.location},
        }
        return {**made, "stream": {"bounded": True, "commitIntervalSeconds": 1}} if stream else made

    def run(self, reads, writes, run="r-1", **changes):
        """One driver in this process, from its start to its end."""
        spec = SinkSpec.parse(self.document(reads, writes, run, **changes))
        log = Log(io.StringIO(), SystemEnv())
        if spec.stream is None:
            return run_sink(self.spark, spec, log=log)
        return run_stream(self.spark, spec, stop=threading.Event(), env=SystemEnv(), log=log)

    def killed(self, event, count):
        """A driver of the first sink as a process, killed with its Java when it logs `event` for the n-th time. Rows come all the time."""
        document = self.document(0, 1, sql=SQL)
        (self.folder / "sink.json").write_text(json.dumps({**document, "stream": {"commitIntervalSeconds": 1}}))
        (self.folder / "spark-defaults.conf").write_text(CONF)
        files = {"--spec": "sink.json", "--report": "report.json", "--properties": "spark-defaults.conf"}
        given = [word for option, name in files.items() for word in (option, str(self.folder / name))]
        driver = subprocess.Popen(
            [sys.executable, "-m", "persist_spark.main", "driver", *given],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, text=True,
        )  # fmt: skip
        try:
            for line in driver.stderr:
                found = json.loads(line)["event"] if line.startswith("{") else ""
                if found == "batch":
                    self.write(2)
                count -= found == event
                if count == 0:
                    return
            pytest.fail("the driver ended")
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.communicate()


@pytest.fixture
def chain(local_spark, tmp_path):
    made = Chain(local_spark, tmp_path)
    yield made
    made.client.close()


def test_a_chain_of_streams_is_right_at_every_time_although_a_driver_was_killed(chain):
    chain.write(3)
    chain.killed("staged", 2)
    began = chain.upper - 10
    report = chain.run(0, 1, sql=SQL)
    assert report.input_upper == chain.upper
    chain.run(1, 2)
    chain.write(5)
    chain.run(0, 1, sql=SQL)
    chain.run(1, 2)
    first, second = chain.readable(1), chain.readable(2)
    assert first == second
    assert len([time for time in second if time > began]) >= 5
    # The first batch of the first sink holds the contents at 29.
    wanted = {time: halves(chain.history[time]) for time in second if time >= 30}
    assert any(later[row] < rows[row] for rows, later in itertools.pairwise(wanted.values()) for row in rows)
    assert {time: chain.contents(1, time) for time in wanted} == wanted
    assert {time: chain.contents(2, time) for time in wanted if time >= began} == {
        time: rows for time, rows in wanted.items() if time >= began
    }
    again = chain.run(1, 2)
    assert (again.batches, again.updates_written) == (0, 0)
    assert again.input_upper == chain.client.recent_upper(chain.ids[1]).time


def test_a_stream_with_refreshes_shows_its_input_as_it_was_at_each_of_them(chain):
    times = [25, 45, 46, 72, 900]
    refresh = {"at": [f"1970-01-01T00:00:00.{time:03}Z" for time in times]}
    chain.write(4)
    assert chain.run(0, 1, sql=SQL, refresh=refresh).input_upper == 26
    chain.write(2)
    chain.run(0, 1, sql=SQL, refresh=refresh)
    chain.write(4)
    assert chain.run(0, 1, sql=SQL, refresh=refresh).input_upper == 73
    history = {
        time: next(chain.history[at] for at in sorted(chain.history, reverse=True) if at <= time)
        for time in range(25, 73)
    }
    shown = {25: 25, 44: 25, 45: 45, 46: 46, 71: 46, 72: 72}
    assert {time: chain.contents(1, time) for time in shown} == {
        time: halves(history[at]) for time, at in shown.items()
    }
    assert chain.client.recent_upper(chain.ids[1]).time == 73


def test_a_mirror_of_an_aggregate_is_that_of_one_time_which_the_report_names(chain):
    sums = {
        "envelope": {"type": "Mirror"},
        "stream": False,
        "sql": "select n as m, count(*) as id from input group by n",
    }

    def wanted(rows):
        counts = Counter()
        for (_, n), count in rows.items():
            counts[n] += count
        return Counter(dict.fromkeys(counts.items(), 1))

    chain.write(4)
    report = chain.run(0, 1, **sums)
    assert report.input_upper == chain.upper
    assert chain.contents(1, report.upper - 1) == wanted(chain.rows)
    assert report.to_json(duration_ms=0)["input_upper"] == chain.upper
    chain.write(4)
    assert chain.run(0, 1, **sums).already_done
    report = chain.run(0, 1, "r-2", **sums)
    assert (report.input_upper, chain.contents(1, report.upper - 1)) == (chain.upper, wanted(chain.rows))
    report = chain.run(0, 1, "r-3", asOf="25", where="id < 30", columns=["id", "n"], **sums)
    then = Counter({row: count for row, count in chain.history[20].items() if row[0] < 30})
    assert (report.input_upper, chain.contents(1, report.upper - 1)) == (26, wanted(then))
    purposes = [one["purpose"] for one in chain.client.metadata(chain.ids[0], "holds").to_pylist()]
    assert not [one for one in purposes if "ns/0-1" in one], "a run leaves no lease behind"


def test_a_sink_written_by_hand_names_a_shard_of_its_own_stores(chain):
    chain.write(2)
    document = chain.document(
        0, 2, envelope={"type": "Append"}, stream=False, schema=HALVES, sql="select n as m, id from input"
    )
    document["input"]["shard"]["name"] = str(chain.ids[0])
    del document["source"]
    report = run_sink(chain.spark, SinkSpec.parse(document), log=Log(io.StringIO(), SystemEnv()))
    assert report.rows_read == sum(chain.rows.values())


BATCH = {"stream": False, "envelope": {"type": "Mirror"}}
REFUSED = {
    "itself": ({"writes": 0}, "input.shard.name: the sink writes shard s.*, so it cannot read it"),
    "itself in a stream": ({"writes": 0, **BATCH}, "input.shard.name: the sink writes shard"),
    "a later time": ({**BATCH, "asOf": "99"}, r"input.shard.asOf: 99 .*cannot be read: shard s.* is readable from 0 .*to 19"),
    "a condition on no column": ({**BATCH, "where": "nonsense > 1"}, "input.shard: .*nonsense"),
    "a column that is not there in a stream": ({"columns": ["nonsense"]}, "input.shard: .*nonsense"),
    "wrong SQL": ({**BATCH, "sql": "select nonsense from input"}, "input.shard.sql: .*nonsense"),
    "wrong columns": (BATCH, "missing: m"),
    "dropped diffs": ({"sql": "select n as m, id, _time, 1 as _diff from input"}, "input.shard.sql: it drops _diff"),
    "dice": ({"sql": "select n as m, id, _time, _diff from input where rand() > 0.5"}, "use no random functions"),
    "a count": ({"sql": "select n as m, count(*) as id, max(_time) as _time, sum(_diff) as _diff from input group by n"},
                "input.shard.sql: Aggregate keeps a state"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_and_nothing_is_written(chain, name):
    changes, message = REFUSED[name]
    chain.write(2)
    writes = changes.get("writes", 1)
    before = chain.client.recent_upper(chain.ids[writes])
    with pytest.raises(ConfigurationError, match=message):
        chain.run(0, writes, **{key: value for key, value in changes.items() if key != "writes"},
                  schema=HALVES if writes else SCHEMA)  # fmt: skip
    assert chain.client.recent_upper(chain.ids[writes]) == before
    assert chain.client.progress(chain.ids[writes], f"ns/0-{writes}") is None


def test_a_shard_without_any_time_has_no_contents_and_is_a_stream_that_waits(chain):
    with pytest.raises(ConfigurationError, match="input.shard: nothing was written to shard"):
        chain.run(0, 1, **BATCH)
    report = chain.run(0, 1, sql=SQL)
    assert (report.updates_written, report.input_upper) == (0, None)


def test_a_stream_skips_no_changes_that_its_input_has_forgotten(chain):
    """Its position is from before since. Another driver stored it."""
    chain.write(4)
    source, target, offsets = chain.ids[0], chain.ids[1], 'v1\n{}\n{"upper": 20}'
    stored = Position(source=f"persist {source}", query="q", batch=0, run="r-0", driver="d", offsets=offsets)
    with chain.client.open_writer(target, HALVES, purpose="test") as writer:
        upper, progress = writer.fetch_recent_upper(), ("ns/0-1", encode_position(stored))
        answer = writer.compare_and_append_batch([], expected_upper=upper, new_upper=upper, progress=progress)
        assert isinstance(answer, Appended)
    chain.client.set_retention(source, 1)
    with pytest.raises(ConfigurationError, match="has read shard s.* up to 20.*, and its since is 39.*no longer known"):
        chain.run(0, 1, sql=SQL)
    assert chain.client.progress(target, "ns/0-1").token == encode_position(stored)
