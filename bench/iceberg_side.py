"""Iceberg on Spark, for `bench.spark_iceberg`: a program for an interpreter that has the pyspark of Iceberg's runtime, and none of our
packages.

`iceberg_side.py JAR FOLDER INPUT` starts a session, makes a table of the Parquet file INPUT for each mode of writing, and reports that.
Then it reads lines `TABLE PATH` from standard input. For each line it merges the file into the table, so that the table equals the file,
and answers. With `once` instead of lines it ends after the first table.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

#: How Iceberg writes a merge: it rewrites the files with a changed row, or writes the positions of changed rows into further files.
MODES = {"cow": "copy-on-write", "mor": "merge-on-read"}


def main() -> None:
    """See above."""
    jar, folder, source, *once = sys.argv[1:]
    conf = {
        "spark.master": "local[2]", "spark.ui.enabled": "false", "spark.driver.memory": "2g", "spark.log.level": "ERROR", "spark.jars": jar,
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.showConsoleProgress": "false",
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.ice.type": "hadoop", "spark.sql.catalog.ice.warehouse": f"{folder}/warehouse",
    }  # fmt: skip
    spark = SparkSession.builder.config(map=conf).getOrCreate()
    for name, mode in list(MODES.items())[: 1 if once else None]:
        properties = f"'format-version' = '2', 'write.merge.mode' = '{mode}'"
        select = f"SELECT * FROM parquet.`{source}`"
        spark.sql(f"CREATE TABLE ice.db.{name} USING iceberg TBLPROPERTIES ({properties}) AS {select}")
    _say("ready")
    for line in [] if once else sys.stdin:
        table, path = line.split()
        spark.sql(
            f"MERGE INTO ice.db.{table} t USING (SELECT * FROM parquet.`{path}`) s ON t.id = s.id "
            "WHEN MATCHED AND NOT (t.name <=> s.name AND t.amount <=> s.amount) THEN UPDATE SET * "
            "WHEN NOT MATCHED THEN INSERT * WHEN NOT MATCHED BY SOURCE THEN DELETE"
        )
        total = spark.sql(f"SELECT count(*), sum(amount) FROM ice.db.{table}").first() if path.endswith("last") else ""
        _say(f"done {total}")
    spark.stop()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
