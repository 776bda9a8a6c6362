"""The settings that give a session the SQL catalog, and the jar that they name.

The jar is data of this package. `make catalog` builds it from spark-images/catalog, and wheels contain it. A session without the jar lacks
only the catalog.
"""

from __future__ import annotations

import re
from pathlib import Path

from persist_engine.base.errors import InvalidUsage

#: The class that Spark loads.
CATALOG_CLASS = "io.persistshard.spark.PersistCatalog"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def jar_path() -> Path:
    """The jar of this installation. Raises InvalidUsage when there is none."""
    found = Path(__file__).with_name("persist-catalog.jar")
    if not found.is_file():
        raise InvalidUsage(
            f"this installation of persist_spark has no jar of the SQL catalog at {found}: its wheel was built without one. Install the "
            "wheel of a release, or run `make catalog` in the checkout and build again; persist_spark.attach needs no jar"
        )
    return found


def catalog_settings(
    *, blob: str, consensus: str, name: str = "persist", namespace: str | None = None, jar: bool = True
) -> dict[str, str]:
    """The settings of a session whose SQL has the tables of a location as NAME.NAMESPACE.TABLE, for `SparkSession.builder.config(map=...)`.

    `blob` and `consensus` are the stores. They must have no credentials, because Spark shows settings; the catalog refuses credentials.
    `namespace`: the namespace after `USE NAME`. `jar` False: Spark already has the jar, as in the image persist-spark. Otherwise add your
    other jars to `spark.jars`, separated by a comma. Raises InvalidUsage for a name that SQL would have to quote, and when there is no jar.
    """
    if not _NAME.fullmatch(name):
        raise InvalidUsage(f"catalog {name[:64]!r}: give it a name of letters, digits and _, which SQL need not quote")
    setting = f"spark.sql.catalog.{name}"
    found = {setting: CATALOG_CLASS, f"{setting}.blob": blob, f"{setting}.consensus": consensus}
    if namespace is not None:
        found[f"{setting}.namespace"] = namespace
    if jar:
        found["spark.jars"] = str(jar_path())
    return found
