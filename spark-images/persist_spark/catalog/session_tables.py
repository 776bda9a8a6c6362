"""Frames of format `persist` as tables of the catalog, which the driver's own process keeps. A scan reads only the columns that its query
needs, the engine answers the conditions that it can, and counts, minima and maxima come from the metadata of the shard.

For sessions whose JVM has the jar of the catalog. The JVM sends its requests to a desk in this process, not to a catalog process.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from persist_engine import Location
from persist_engine.base.errors import PersistError
from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from persist_spark.catalog.desk import Desk
from persist_spark.catalog.tables import Tables
from persist_spark.held_frames import HeldFrames
from persist_spark.options import Options
from persist_spark.source.loaded import new_name
from persist_spark.source.native import java_class

_JAVA_CLASS = "io.persistshard.spark.PersistFrame"


@dataclass(frozen=True, slots=True)
class _Served:
    tables: Tables
    desk: Desk
    address: Path


class SessionTables:
    """The tables of one session. Thread-safe. `held` outlives it. `keeper` is the address from which planners get its frames."""

    def __init__(self, held: HeldFrames, keeper: str) -> None:
        self._held, self._keeper = held, keeper
        self._lock = threading.Lock()
        self._served: dict[Location, _Served] = {}
        self._is_closed = False

    def frame(self, spark: SparkSession, options: Options) -> DataFrame | None:
        """The frame for `options`, held until the JVM can no longer read it. None when the session has no jar of the catalog, and when the
        load fails; the caller's next load then reports the error. Starts no job.
        """
        loader = java_class(spark._jvm, _JAVA_CLASS)
        if not isinstance(loader, JavaClass):  # py4j treats the name of a missing class as a package
            return None
        served = self._at(options.location)
        if served is None:
            return None
        name = new_name()
        try:
            loaded = json.dumps(served.tables.open(name, options, store=served.address.name))
            return DataFrame(loader.of(spark._jsparkSession, str(served.address), name, loaded), spark)
        except (PersistError, Py4JError, PySparkException):
            served.tables.drop_frame(name)
            return None

    def close(self) -> None:
        """Stops answering the JVM. Idempotent."""
        with self._lock:
            self._is_closed = True
            served, self._served = list(self._served.values()), {}
        for each in served:
            each.desk.close()
            each.tables.disconnect()

    def _at(self, location: Location) -> _Served | None:
        with self._lock:
            if self._is_closed:
                return None
            if location not in self._served:
                tables = Tables(location, self._held, keeper=self._keeper)
                address = Path(self._keeper).with_name(f"tables{len(self._served)}")
                self._served[location] = _Served(tables, Desk(tables, address), address)
            return self._served[location]
