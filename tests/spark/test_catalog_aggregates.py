"""Counts, least and greatest values of tables of the catalog from metadata: never another answer than that of a scan."""

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from persist_engine import Schema
from persist_engine.work.repair.force import force_compaction

pytestmark = pytest.mark.spark

SCHEMA = Schema.from_ddl(
    "id BIGINT",
    "n INT, i SMALLINT, x DOUBLE, f FLOAT, m DECIMAL(20,2), d DATE, t TIMESTAMP, w TIMESTAMP_NTZ, b BOOLEAN, s STRING",
)
NAMES = ("id", *SCHEMA.val.names)
KNOWN = ("id", "n", "i", "m", "d", "t", "w", "b")
#: A condition that the engine does not answer, so that Spark scans the rows.
SCANNED = "rand() >= 0"


def row(n: int, rng: random.Random):
    at = datetime(1965, 1, 1, tzinfo=UTC) + timedelta(days=n, microseconds=n)
    value = (
        n - 20, n % 100 - 50, rng.choice([-1.5, 2.0, -0.0, 0.0, float("nan")]), n / 3 + 1, Decimal(n * 10**13 - 5).scaleb(-2),
        date(1969, 12, 1) + timedelta(days=n), at, at.replace(tzinfo=None), bool(n % 2), f"s{n}",
    )  # fmt: skip
    return (n,), tuple(None if rng.random() < 0.1 else each for each in value)


def is_from_metadata(frame) -> bool:
    return "LocalTableScan" in frame._jdf.queryExecution().executedPlan().toString()


def aggregates(names=NAMES):
    return ", ".join(["count(*)", *(f"count({n}), min({n}), max({n})" for n in names)])


def test_every_type_is_answered_as_spark_answers_it_and_without_a_scan(catalog):
    rng = random.Random(1)
    catalog.add(catalog.make(schema=SCHEMA), [row(n, rng) for n in range(60)], 5, SCHEMA)
    table = "{n}.flights"
    known = catalog.frame(f"SELECT {aggregates(KNOWN)} FROM {table}")
    assert is_from_metadata(known)
    assert known.schema == catalog.frame(f"SELECT {aggregates(KNOWN)} FROM {table} WHERE {SCANNED}").schema
    # As texts: NaN is not equal to itself.
    shown = [repr(catalog.sql(f"SELECT {aggregates()} FROM {table}{where}")) for where in ("", f" WHERE {SCANNED}")]
    assert shown[0] == shown[1]
    for asked, is_known in (
        ("count(*)", True), ("count(1) + max(id)", True), ("min(f)", True), ("max(x)", False), ("max(s)", False),
        ("count(DISTINCT n)", False), ("sum(n)", False), ("count(*), sum(n)", False), ("max(n + 1)", False),
        ("count(*) FILTER (WHERE n > 1)", False),
    ):  # fmt: skip
        assert is_from_metadata(catalog.frame(f"SELECT {asked} FROM {table}")) is is_known, asked
    for where, is_known in (("id >= 0", True), ("id < 0", True), (f"id < 10 AND {SCANNED}", False)):
        assert is_from_metadata(catalog.frame(f"SELECT count(*) FROM {table} WHERE {where}")) is is_known, where
    assert not is_from_metadata(catalog.frame(f"SELECT b, count(*) FROM {table} GROUP BY b"))
    assert catalog.sql(f"SELECT max(id), min(n), count(n) FROM {table} WHERE id < 0") == [(None, None, 0)]


@pytest.mark.parametrize("session", ["classic", "connect"])
def test_random_batches_times_retractions_and_conditions(catalog, connect_spark, monkeypatch, session):
    """Many questions in one action for each side; the questions themselves are drawn. Spark answers those on one table at one time in one
    scan.
    """
    rng = random.Random(session)
    questions, scans = [], {}
    for number in range(3):
        shard = catalog.make(f"t{number}", schema=SCHEMA)
        rows = [row(n, rng) for n in range(40)]
        for time in range(1, 8):
            if time == 1 or rng.random() < 0.7:
                catalog.add(shard, rng.sample(rows, rng.randrange(20)), time, SCHEMA)
            if rng.random() < 0.3:
                catalog.add(shard, rows[:5], time + 1, SCHEMA)
                catalog.add(shard, rows[:5], time + 2, SCHEMA, diff=-1)
                break
        upper = catalog.client.recent_upper(shard).newest_complete
        if number == 2:
            force_compaction(catalog.client.machine(shard), full=True)
        times = [rng.randrange(1, upper + 1) for _ in range(3)]
        for _ in range(10):
            time = rng.choice(times)
            of = rng.choice(KNOWN)
            where = rng.choice(["true", "id < 20", "id >= 0", "n IS NOT NULL", "d > DATE '1970-01-01' OR b"])
            asked = rng.choice(["count(*)", f"count({of})", f"min({of})", f"max({of})"])
            table = f"{catalog.name}.{catalog.namespace}.t{number} VERSION AS OF {time}"
            scans.setdefault(table, []).append((len(questions), f"CAST({asked} FILTER (WHERE {where}) AS STRING)"))
            questions.append(f"SELECT {len(questions)} AS q, CAST({asked} AS STRING) AS a FROM {table} WHERE {where}")
    spark = catalog.spark
    if session == "connect":
        monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        catalog.seen_by(connect_spark)
        spark = connect_spark
    found = dict(map(tuple, spark.sql(" UNION ALL ".join(f"({question})" for question in questions)).collect()))
    parts = (
        f"(SELECT array({', '.join(str(q) for q, _ in asked)}), array({', '.join(text for _, text in asked)}) FROM {table} WHERE {SCANNED})"
        for table, asked in scans.items()
    )
    scanned = {q: a for row in spark.sql(" UNION ALL ".join(parts)).collect() for q, a in zip(*row, strict=True)}
    assert len(found) == len(scanned) == len(questions)
    different = [(questions[q], a, scanned[q]) for q, a in found.items() if a != scanned[q]]
    assert different == []


def test_an_answer_holds_no_reader_and_a_frame_keeps_its_time(catalog, small):
    frame = catalog.frame("SELECT * FROM {n}.small")
    catalog.add(small, [((3,), (30,))], 3000)
    assert frame.count() == 2
    assert is_from_metadata(frame.groupBy().count())
    assert catalog.sql("SELECT count(*), max(n) FROM {n}.small") == [(3, 30)]
    assert catalog.readers(small) <= 2, "an answer leaves none behind but those of its tables"
