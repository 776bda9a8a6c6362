"""Filters on days and instants over frames that Spark's own Parquet reader reads, in time zones that lack days and change their offsets."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import reduce

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from persist_engine import Appended, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import BatchSettings, Settings
from persist_spark.datasource import register
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

pytestmark = pytest.mark.spark
SCHEMA = Schema.from_ddl("id INT", "d DATE, t TIMESTAMP, w TIMESTAMP_NTZ, p STRUCT<d: DATE, t: TIMESTAMP>")
#: Zones, with days that they lack or on which their offset changed.
ZONES = {
    "Pacific/Apia": (date(1892, 7, 4), date(2011, 12, 30)),
    "Pacific/Kwajalein": (date(1993, 8, 21),),
    "Europe/Moscow": (date(1919, 7, 1), date(1930, 6, 21)),
    "America/St_Johns": (date(1884, 1, 1), date(1935, 3, 30)),
    "America/Chicago": (date(1883, 11, 18),),
    "UTC": (),
}
#: Days that the Julian calendar lacks, and from which on Java's old and new classes agree on offsets.
ODD_DAYS = (date(1, 1, 1), date(1582, 10, 4), date(1582, 10, 15), date(1900, 1, 1))
OPS = {
    "=": lambda one, other: one == other,
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}


def day_of(at: datetime) -> date:
    return at.date()


def instant(at: datetime) -> str:
    return f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S}Z'".replace("'1-", "'0001-")


#: The fields: what a row holds in them, and a literal of SQL.
FIELDS = {
    "d": (day_of, lambda day: f"DATE '{day.isoformat()}'"),
    "p.d": (day_of, lambda day: f"DATE '{day.isoformat()}'"),
    "t": (lambda at: at, instant),
    "p.t": (lambda at: at, instant),
    "w": (lambda at: at, lambda at: instant(at).replace("TIMESTAMP", "TIMESTAMP_NTZ").replace("Z'", "'")),
}


#: In the ten minutes before Chicago moved its clocks, and after them.
GAP, AFTER = (datetime(1883, 11, 18, *clock, tzinfo=UTC) for clock in ((17, 55), (18, 50)))


def around(days: tuple[date, ...]) -> list[datetime]:
    """An instant of each of these days, and of the days before and after them."""
    near = {day + timedelta(days=shift) for day in days for shift in (-1, 0, 1) if day.year > 1 or shift >= 0}
    return sorted([GAP, AFTER, *(datetime(day.year, day.month, day.day, 17, tzinfo=UTC) for day in near)])


ALL = around((*ODD_DAYS, *(day for days in ZONES.values() for day in days)))
#: Of two shards, the rows of the old days and of those since 1900: what one holds must not protect the other.
HELD = ([at for at in ALL if at.year < 1900], [at for at in ALL if at.year >= 1900])


@pytest.fixture(scope="module")
def frames(local_spark, tmp_path_factory):
    """For each of HELD a frame. Each row is in a part of its own, so that a filter that reaches the reader skips all the others."""
    register(local_spark)
    folder = tmp_path_factory.mktemp("days")
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    small = Settings(batch=BatchSettings(inline_part_bytes_max=0))
    made = []
    with PersistClient.open(location, settings=small) as client:
        for instants in HELD:
            shard = ShardId.new()
            client.initialise(shard, SCHEMA)
            with client.open_writer(shard, SCHEMA, purpose="test") as writer:
                for time, at in enumerate(instants):
                    updates = [(((time,), (at.date(), at, at.replace(tzinfo=None), (at.date(), at))), time, 1)]
                    answer = writer.compare_and_append(updates, expected_upper=time, new_upper=time + 1)
                    assert isinstance(answer, Appended)
            stores = {"blob": location.blob, "consensus": location.consensus}
            made.append(local_spark.read.format("persist").options(shard=shard, **stores).load())
            assert "FileScan parquet" in made[-1]._jdf.queryExecution().executedPlan().toString()
    return made


@contextmanager
def in_zone(spark, name: str) -> Iterator[None]:
    """The JVM and the session in the zone."""
    zones, setting = spark._jvm.java.util.TimeZone, "spark.sql.session.timeZone"
    before, shown = zones.getDefault(), spark.conf.get(setting)
    zones.setDefault(zones.getTimeZone(name))
    spark.conf.set(setting, name)
    try:
        yield
    finally:
        zones.setDefault(before)
        spark.conf.set(setting, shown)


def asked_in(zone: str) -> st.SearchStrategy:
    condition = st.tuples(
        st.sampled_from([*FIELDS]), st.sampled_from([*OPS]), st.sampled_from(around((*ODD_DAYS, *ZONES[zone])))
    )
    return st.tuples(st.just(zone), st.lists(condition, min_size=2, max_size=4))


@given(asked=st.sampled_from([*ZONES]).flatmap(asked_in))
@example(asked=("Pacific/Apia", [(name, "=", datetime(2011, 12, 30, 17, tzinfo=UTC)) for name in ("d", "p.d")]))
@example(
    asked=("UTC", [(name, op, datetime(1582, 10, 5, 17, tzinfo=UTC)) for name in ("d", "t") for op in ("=", "<=")])
)
@example(asked=("America/Chicago", [(name, op, GAP) for name in ("t", "p.t") for op in ("=", ">=")]))
@settings(max_examples=6, deadline=None)
def test_no_filter_on_days_or_instants_loses_rows_in_any_time_zone(frames, asked):
    zone, conditions = asked
    found, expected = [], []
    for number, (name, op, at) in enumerate(conditions):
        value, literal = FIELDS[name]
        which = at.year >= 1900
        kept = frames[which].where(f"{name} {op} {literal(value(at))}")
        found.append(kept.select(F.lit(number).alias("number"), "id"))
        expected += [(number, row) for row, one in enumerate(HELD[which]) if OPS[op](value(one), value(at))]
    with in_zone(frames[0].sparkSession, zone):
        assert sorted(map(tuple, reduce(DataFrame.unionAll, found).collect())) == expected
