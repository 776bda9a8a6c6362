"""The delays of flights as they were reported: one file for each hour. A departure comes with its delay, an arrival hours later with
its own. The flights are real, and the hours are those of their departures and arrivals.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

KEY = ["time_hour", "carrier", "flight", "origin"]
COLUMNS = [*KEY, "dep_delay", "arr_delay", "reported"]
#: The first hour with reports, in UTC: the first flights of 2013 leave New York after 5 in the morning.
BEGIN = datetime(2013, 1, 1, 10, tzinfo=UTC)


def reports(flights: pa.Table) -> pa.Table:
    """All reports of the flights. Cancelled flights have none, and diverted flights have none of their arrival."""
    flown = flights.filter(pc.is_valid(flights["dep_delay"]))
    minutes = pc.add(flown["minute"], flown["dep_delay"])
    departed = _later(flown["time_hour"], minutes)
    unknown = pa.nulls(len(flown), pa.int32())
    departures = (
        flown.select([*KEY, "dep_delay"]).append_column("arr_delay", unknown).append_column("reported", departed)
    )
    landed = flown.append_column("departed", departed).filter(pc.is_valid(flown["arr_delay"]))
    arrivals = landed.select([*KEY, "dep_delay", "arr_delay"])
    arrivals = arrivals.append_column("reported", _later(landed["departed"], landed["air_time"]))
    return pa.concat_tables([departures, arrivals])


def drop(flights: pa.Table, folder: Path, *, first_hour: int, hours: int) -> int:
    """Drop the files of so many hours after BEGIN into `folder`, each as a whole. Returns the number of reports."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    every = reports(flights)
    for hour in range(first_hour, first_hour + hours):
        begin = BEGIN + timedelta(hours=hour)
        found = between(every, begin, begin + timedelta(hours=1))
        target = folder / f"{begin:%Y-%m-%dT%H}.parquet"
        # Spark ignores names that begin with a dot. A file that is still being written must not be read.
        pq.write_table(found, folder / f".{target.name}", coerce_timestamps="us")
        (folder / f".{target.name}").rename(target)
        total += len(found)
    return total


def between(every: pa.Table, begin: datetime, end: datetime) -> pa.Table:
    """The reports of [begin, end)."""
    at = every["reported"]
    return every.filter(pc.and_(pc.greater_equal(at, pa.scalar(begin, at.type)), pc.less(at, pa.scalar(end, at.type))))


def known(flights: pa.Table, *, hours: int) -> pa.Table:
    """What is known of each flight so many hours after BEGIN: its last report."""
    found = between(reports(flights), BEGIN, BEGIN + timedelta(hours=hours))
    last = found.group_by(KEY).aggregate([("reported", "max")]).rename_columns([*KEY, "reported"])
    return found.join(last, keys=[*KEY, "reported"], join_type="inner").select(COLUMNS)


def carrier_days(delays: pa.Table) -> pa.Table:
    """What the delays add up to for each carrier and day of New York."""
    day = pc.cast(pc.local_timestamp(pc.cast(delays["time_hour"], pa.timestamp("us", "America/New_York"))), pa.date32())
    sums = delays.append_column("day", day).group_by(["carrier", "day"])
    counted = sums.aggregate(
        [("dep_delay", "count"), ("dep_delay", "sum"), ("arr_delay", "count"), ("arr_delay", "sum")]
    )
    return counted.rename_columns(["carrier", "day", "departed", "dep_minutes", "arrived", "arr_minutes"])


def _later(at: pa.ChunkedArray, minutes: pa.ChunkedArray) -> pa.ChunkedArray:
    span = pc.multiply(pc.cast(minutes, pa.int64()), 60_000_000)
    return pc.add(at, pc.cast(span, pa.duration("us")))
