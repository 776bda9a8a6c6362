"""Streaming sinks over a real Kafka broker that wants a password: every record once, and none passed over."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
from persist_engine import Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_kit.broker import jar_folder, kafka_broker
from persist_spark.failures import classify
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, OnError, SinkSpec, Stream, Write
from persist_spark.streaming.stream import run_stream
from py4j.protocol import Py4JJavaError
from standby_world import Driver as Standing

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SINK = "ns/s"
PARTITIONS = 2
RECORD = "id BIGINT, n BIGINT, at BIGINT"
ROWS = f"select r.* from (select from_json(cast(value as string), '{RECORD}', map('mode', 'FAILFAST')) as r from input)"
CHANGE = "before STRUCT<id: BIGINT>, after STRUCT<id: BIGINT, n: BIGINT>, op STRING, ts_ms BIGINT"
CHANGES = ROWS.replace(RECORD, CHANGE)
#: A Secret as a folder, read by Kafka's clients themselves: the sink holds no password.
FROM_FOLDER = {
    "config.providers": "secret",
    "config.providers.secret.class": "org.apache.kafka.common.config.provider.DirectoryConfigProvider",
}


class Died(Exception):
    """The driver is gone. Its checkpoint is, too."""


class Acts(Log):
    """A log that acts at the n-th event of a name."""

    def __init__(self, act=None, event="", count=1):
        super().__init__(io.StringIO(), SystemEnv())
        self.act, self.at, self.left = act, event, count

    def event(self, event, **fields):
        super().event(event, **fields)
        self.left -= event == self.at
        if event == self.at and self.left == 0:
            self.act()


def die():
    raise Died


class Kafka:
    """The broker as tests use it: topics, records and their deletion, by Kafka's own clients in Spark's JVM."""

    def __init__(self, broker, gateway):
        self.broker, self.gateway, self.jvm = broker, gateway, gateway.jvm
        jvm = self.jvm
        properties = jvm.java.util.Properties()
        for name, value in broker.client().items():
            properties.setProperty(name, value)
        self.admin = jvm.org.apache.kafka.clients.admin.Admin.create(properties)
        text = jvm.org.apache.kafka.common.serialization.StringSerializer
        self.producer = jvm.org.apache.kafka.clients.producer.KafkaProducer(properties, text(), text())

    def create(self, topic):
        new = self.jvm.org.apache.kafka.clients.admin.NewTopic(topic, PARTITIONS, 1)
        self.admin.createTopics(self.jvm.java.util.Collections.singleton(new)).all().get()
        # The answer comes before the broker leads the partitions, and only their leader says where they end. A producer that came earlier
        # was refused, and once not served for two minutes. Of a name that was deleted before, the broker may still say that there is none.
        latest, ends = self.jvm.java.util.HashMap(), self.jvm.org.apache.kafka.clients.admin.OffsetSpec.latest()
        for partition in range(PARTITIONS):
            latest.put(self.jvm.org.apache.kafka.common.TopicPartition(topic, partition), ends)
        for _ in range(600):
            try:
                self.admin.listOffsets(latest).all().get()
                return
            except Py4JJavaError as error:
                if "UnknownTopicOrPartitionException" not in str(error.java_exception):
                    raise
                threading.Event().wait(0.1)
        raise AssertionError(f"the broker does not know {topic} a minute after it was made")

    def delete(self, topic):
        self.admin.deleteTopics(self.jvm.java.util.Collections.singleton(topic)).all().get()

    def send(self, topic, *records):
        """Sends (key, record) in order. A key has one partition; a record that is None is a tombstone, and a text is sent as it is. Kafka's
        error for a record that the broker did not take: without a look at the answers it would only be missing.
        """
        answers = []
        for key, record in records:
            text = record if record is None or isinstance(record, str) else json.dumps(record)
            sent = self.jvm.org.apache.kafka.clients.producer.ProducerRecord(topic, key % PARTITIONS, str(key), text)
            answers.append(self.producer.send(sent))
        self.producer.flush()
        for answer in answers:
            answer.get()

    def forget(self, topic, offset):
        """Deletes the records before `offset` from each partition, as retention does."""
        until = self.jvm.java.util.HashMap()
        # A static method and another one share their name, which py4j cannot tell apart.
        kind = self.jvm.java.lang.Class.forName("org.apache.kafka.clients.admin.RecordsToDelete")
        before = next(
            one for one in kind.getMethods() if one.getName() == "beforeOffset" and one.getParameterCount() == 1
        )
        offsets = self.gateway.new_array(self.jvm.java.lang.Object, 1)
        offsets[0] = self.jvm.java.lang.Long.valueOf(str(offset))
        for partition in range(PARTITIONS):
            place = self.jvm.org.apache.kafka.common.TopicPartition(topic, partition)
            until.put(place, before.invoke(None, offsets))
        self.admin.deleteRecords(until).all().get()

    def close(self):
        self.producer.close()
        self.admin.close()


@pytest.fixture(scope="module")
def kafka(local_spark):
    jar_folder("connector")
    with kafka_broker() as broker:
        made = Kafka(broker, local_spark.sparkContext._gateway)
        yield made
        made.close()


class World:
    """A topic, a shard, and the drivers of the sink between them. The shard alone outlives a driver."""

    def __init__(self, spark, kafka, folder, topic):
        self.spark, self.kafka, self.topic = spark, kafka, topic
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client = PersistClient.open(self.location, settings=Settings(retain_ms=None))
        self.shard, self.logs = ShardId.new(), []
        self.client.initialise(self.shard, Schema.from_ddl("id BIGINT", "n BIGINT, at BIGINT"))
        kafka.create(topic)

    def options(self, **changes):
        client = {**self.kafka.broker.client(self.kafka.broker.login_from_file), **FROM_FOLDER}
        named = {f"kafka.{name}": value for name, value in client.items()}
        return {
            **named,
            "subscribe": self.topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "16",
            **changes,
        }

    def spec(
        self, envelope, *, run="r-1", sql=ROWS, stream=None, key="id BIGINT", value="n BIGINT, at BIGINT", **options
    ):
        return SinkSpec(
            sink_id=SINK,
            run_id=run,
            shard_id=self.shard,
            key_ddl=key,
            value_ddl=value,
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=Input(format="kafka", options=self.options(**options), sql=sql),
            envelope=envelope,
            write=Write(parallelism=1),
            stream=stream or Stream(is_bounded=True),
        )

    def run(self, envelope, log=None, *, stop=None, **changes):
        """One driver, until the broker has nothing new."""
        self.logs.append(log or Acts())
        spec = self.spec(envelope, **changes)
        return run_stream(self.spark, spec, stop=stop or threading.Event(), env=SystemEnv(), log=self.logs[-1])

    def dies(self, envelope, event, *, count=2, **changes):
        with pytest.raises(Died):
            self.run(envelope, Acts(die, event, count), **changes)

    def rows(self):
        """Every row and how often it is there."""
        upper = self.client.recent_upper(self.shard).time
        if upper == 0:
            return Counter()
        with self.client.open_leased_reader(self.shard, purpose="t") as reader, reader.snapshot(upper - 1) as found:
            rows = found.to_table().to_pylist()
        return Counter({(*row["key"].values(), *row["val"].values()): row["diff"] for row in rows})

    def progress(self):
        return self.client.progress(self.shard, SINK)


@pytest.fixture
def world(local_spark, kafka, tmp_path, request):
    made = World(local_spark, kafka, tmp_path, f"t-{request.node.originalname}"[:60] + tmp_path.name[-3:])
    yield made
    made.client.close()


def numbered(numbers):
    return [(id_, {"id": id_, "n": id_ % 7, "at": 0}) for id_ in numbers]


APPEND = Envelope(type=EnvelopeType.APPEND)


def test_upserts_are_those_of_the_last_records(world):
    """A key's records come in order and out of order. The first driver dies after its last commit, before Spark's."""
    envelope = Envelope(type=EnvelopeType.UPSERT, order_column="at")
    world.kafka.send(world.topic, *[(id_, {"id": id_, "n": n, "at": n}) for n in range(5) for id_ in range(4)])
    world.dies(envelope, "appended")
    late = [(id_, {"id": id_, "n": 0, "at": 1}) for id_ in range(4)]
    gone = [(3, {"id": 3, "n": None, "at": 9})]
    world.kafka.send(world.topic, *late, *gone, (0, {"id": 0, "n": 77, "at": 6}))
    assert world.run(envelope).batches == 1
    assert world.rows() == Counter({(0, 77, 6): 1, (1, 4, 4): 1, (2, 4, 4): 1})


def test_a_stream_from_kafka_stands_by_and_takes_over(world):
    """The driver that writes runs again and again, each time over what has come."""
    envelope, sent = Envelope(type=EnvelopeType.UPSERT, order_column="at"), []

    def more():
        at = len(sent)
        sent.append(at)
        world.kafka.send(world.topic, *[(id_, {"id": id_, "n": at * 10 + id_, "at": at}) for id_ in range(4)])

    more()
    world.run(envelope)
    green = Standing(world, "r-2", world.spec(envelope, stream=Stream(commit_interval_s=1, stands_by=True)))
    try:
        green.log.until("standing_by")
        for _ in range(20):  # it may look for the first time after some of these commits
            more()
            world.run(envelope)
            if green.log.events("followed"):
                break
        found = green.log.until("followed")
        assert (found["stage"], found["missing"], found["extra"]) == ("Proven", 0, 0)
        green.promoted.set()
        green.log.until("taken_over")
        more()
        last = sent[-1]
        expected = Counter({(id_, last * 10 + id_, last): 1 for id_ in range(4)})
        for count in range(1, 5):  # a batch begins with what the broker has by then, at times with a part of the four
            green.log.until("batch", count)
            if world.rows() == expected:
                break
    finally:
        green.stopped()
    assert world.rows() == expected


def test_records_that_do_not_decode_are_errors_with_their_offsets(world):
    """As docs/spark.md says it."""
    world.shard, key = ShardId.new(), "id BIGINT, err STRING"
    world.client.initialise(world.shard, Schema.from_ddl(key, "n BIGINT"))
    sql = (
        "select r.id, r.n, case when r._corrupt_record is not null then "
        "concat_ws(' ', 'offset', partition, offset, 'does not parse:', r._corrupt_record) end as err from (select "
        "from_json(cast(value as string), 'id BIGINT, n BIGINT, _corrupt_record STRING') as r, partition, offset from input)"
    )
    to = {"sql": sql, "key": key, "value": "n BIGINT"}
    envelope = Envelope(type=EnvelopeType.UPSERT, on_error=OnError.COLLECT)
    world.kafka.send(world.topic, (0, {"id": 0, "n": 1}), (2, "{no json"), (1, {"id": 1, "n": "x"}))
    world.dies(envelope, "appended", count=1, **to)
    world.kafka.send(world.topic, (0, {"id": 4, "n": 9}))
    world.run(envelope, **to)
    assert {row: diff for row, diff in world.rows().items() if row[1] is None} == {(0, None, 1): 1, (4, None, 9): 1}
    errors = [row[1] for row in world.rows() if row[1] is not None]
    assert sorted(errors) == sorted(
        ["offset 0 1 does not parse: {no json", 'offset 1 0 does not parse: {"id": 1, "n": "x"}']
    )


def test_change_events_with_tombstones(world):
    """A connector sends a tombstone, a record without a value, after each delete."""
    shard = ShardId.new()
    world.client.initialise(shard, Schema.from_ddl("id BIGINT", "n BIGINT"))
    world.shard, envelope, time = shard, Envelope(type=EnvelopeType.DEBEZIUM), iter(range(1000))

    def put(id_, n, op="c"):
        return id_, {"before": None, "after": {"id": id_, "n": n}, "op": op, "ts_ms": next(time)}

    def removed(id_):
        return [(id_, {"before": {"id": id_}, "after": None, "op": "d", "ts_ms": next(time)}), (id_, None)]

    world.kafka.send(world.topic, *[put(id_, 0, "r") for id_ in range(6)], *removed(1), *removed(2))
    world.dies(envelope, "decided", count=1, sql=CHANGES, value="n BIGINT")
    world.kafka.send(world.topic, put(3, 5, "u"), put(2, 6), *removed(4), (7, None))
    world.run(envelope, sql=CHANGES, value="n BIGINT")
    assert world.rows() == Counter({(0, 0): 1, (2, 6): 1, (3, 5): 1, (5, 0): 1})


def test_a_stream_that_begins_with_now_keeps_its_beginning(world):
    """The driver chose the offsets, and ended before a record came. What comes while no driver runs belongs to the stream."""
    world.kafka.send(world.topic, *numbered(range(4)))
    stop = threading.Event()
    begun = Acts(stop.set, "position", 2)  # the one that it began with, and the one that it commits
    world.run(APPEND, begun, stop=stop, stream=Stream(commit_interval_s=1), startingOffsets="latest")
    world.kafka.send(world.topic, *numbered(range(10, 14)))
    assert world.run(APPEND, startingOffsets="latest").rows_read == 4
    assert world.rows() == Counter((id_, id_ % 7, 0) for id_ in range(10, 14))


def test_records_that_the_broker_no_longer_has_stop_the_stream(world):
    """Nothing is passed over: neither records deleted after the position, nor a topic that was made anew."""
    world.kafka.send(world.topic, *numbered(range(8)))
    world.run(APPEND)
    expected, token = world.rows(), world.progress().token
    assert sum(expected.values()) == 8
    world.kafka.send(world.topic, *numbered(range(8, 20)))
    world.kafka.forget(world.topic, 7)  # of each partition; the position is at 4
    gone = rf"passes over nothing: Could not read records in offset \[4, \d+\) for topic partition {world.topic}-[01]\b"
    with pytest.raises(ConfigurationError, match=gone) as failed:
        world.run(APPEND)
    assert "failOnDataLoss" not in classify(failed.value).message
    assert (world.rows(), world.progress().token) == (expected, token)

    world.kafka.delete(world.topic)
    world.kafka.create(world.topic)
    world.kafka.send(world.topic, *numbered(range(2)))
    with pytest.raises(ConfigurationError, match=rf"Partition {world.topic}-[01] offset was changed from 4 to 1"):
        world.run(APPEND)
    assert (world.rows(), world.progress().token) == (expected, token)


CONF = (
    "spark.master local[2]\nspark.ui.enabled false\nspark.driver.memory 1g\n"
    "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    "spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={folder}/log4j2.properties\n"
    "spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir file://{folder}\n"
)

#: Spark and Kafka's clients say what they do. The gateway's level is the least that Spark shows to Python.
TALKATIVE = """
rootLogger.level = info
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c: %m%n%ex
"""


class Driver:
    """The driver as a process, with a disk of its own. All that it and Spark say is kept."""

    def __init__(self, folder, document):
        folder.mkdir()
        (folder / "sink.json").write_text(json.dumps(document))
        (folder / "spark-defaults.conf").write_text(CONF.format(folder=folder))
        (folder / "log4j2.properties").write_text(TALKATIVE)
        self.folder, self.lines = folder, []
        arguments = ["driver", "--spec", str(folder / "sink.json"), "--report", str(folder / "report.json")]
        arguments += ["--properties", str(folder / "spark-defaults.conf")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "persist_spark.main", *arguments],
            env={**os.environ, "SPARK_DIST_CLASSPATH": str(jar_folder("connector") / "*")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

    def until(self, event, count):
        """Reads what it says up to the event that is logged for the n-th time."""
        for line in self.process.stdout:
            self.lines.append(line)
            count -= line.startswith("{") and json.loads(line).get("event") == event
            if count == 0:
                return
        pytest.fail(f"the driver ended: {''.join(self.lines[-30:])}")

    def ends(self):
        """Waits for its end; returns its exit code."""
        self.lines += self.process.stdout
        return self.process.wait(120)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def said(self):
        """Everything but its own configuration."""
        (self.folder / "sink.json").unlink()
        files = [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]
        return b"".join([*files, "".join(self.lines).encode()])


def test_a_killed_driver_is_followed_by_one_with_an_empty_disk_and_neither_shows_the_password(world, tmp_path):
    kafka = world.kafka
    options = world.options(**{f"kafka.{name}": value for name, value in kafka.broker.client().items()})
    document = {
        "sink_id": SINK,
        "run_id": "u-1",
        "shard_id": str(world.shard),
        "schema": {"key": "id BIGINT", "value": "n BIGINT, at BIGINT"},
        "location": {"blob": world.location.blob, "consensus": world.location.consensus},
        "input": {"type": "Format", "format": {"name": "kafka", "options": options, "sql": ROWS}},
        "envelope": {"type": "Append"},
        "write": {"parallelism": 1},
        "stream": {"commitIntervalSeconds": 1},
    }
    kafka.send(world.topic, *numbered(range(40)))
    first = Driver(tmp_path / "first", document)
    try:
        first.until("staged", 2)
    finally:
        first.kill()  # with its Java, about when it commits
    kafka.send(world.topic, *numbered(range(40, 50)))
    second = Driver(tmp_path / "second", {**document, "stream": {"commitIntervalSeconds": 1, "bounded": True}})
    try:
        assert second.ends() == 0
    finally:
        second.kill()
    assert world.rows() == Counter((id_, id_ % 7, 0) for id_ in range(50))
    said = first.said() + second.said()
    for own in (b"INFO org.apache.kafka.clients", b"SparkListenerSQLExecutionStart"):
        assert own in said, "the logs of Spark are in it"
    assert kafka.broker.password.encode() not in said
    stored = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert any(world.topic.encode() in one for one in stored), "the position is in the shard"
    assert all(kafka.broker.password.encode() not in one for one in stored)
