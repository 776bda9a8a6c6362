"""A Python data source that takes filters gives wrong rows: all scans of one loaded frame share what the last one pushed.

    python spark_python_pushdown.py

Plain PySpark 4.1 or later. Prints each query with the rows that it should give and those that it gave; exits with 1 when
any of them is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    InputPartition,
)

ROWS = 10
SETTING = "spark.sql.python.filterPushdown.enabled"


class Numbers(DataSource):
    """One column: the numbers from 0 to 9."""

    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "id bigint"

    def reader(self, schema: object) -> NumbersReader:
        return NumbersReader()


class NumbersReader(DataSourceReader):
    """Takes `id = n` and nothing else, as the documentation of `pushFilters` shows it."""

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name for it
        for found in filters:
            if isinstance(found, EqualTo):
                self.wanted.append(found.value)
            else:
                yield found

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((n,) for n in range(ROWS) if all(n == wanted for wanted in self.wanted))


def ids(frame: DataFrame) -> list[int]:
    return sorted(row["id"] for row in frame.collect())


def findings(spark: SparkSession) -> list[tuple[str, list[int], list[int]]]:
    """(query, what it should give, what it gives); each starts from a frame of its own. The session's settings stay."""
    before = spark.conf.get(SETTING)
    spark.conf.set(SETTING, "true")
    spark.dataSource.register(Numbers)

    def load() -> DataFrame:
        return spark.read.format("numbers").load()

    try:
        df = load()
        union = ids(df.where("id = 1").union(df.where("id = 2")))
        df = load()
        join = ids(df.where("id = 1").crossJoin(df.where("id = 2").select(F.col("id").alias("other"))).select("id"))
        df = load()
        anti = ids(df.join(df.where("id = 3"), "id", "left_anti"))
        df = load()
        ids(df.where("id = 3"))
        later = ids(df)
    finally:
        spark.conf.set(SETTING, before)
    return [
        ("df.where('id = 1').union(df.where('id = 2'))", [1, 2], union),
        ("df.where('id = 1').crossJoin(df.where('id = 2'))", [1], join),
        ("df.join(df.where('id = 3'), 'id', 'left_anti')", [n for n in range(ROWS) if n != 3], anti),
        ("df.where('id = 3').collect(), and then df.collect()", list(range(ROWS)), later),
    ]


def main() -> int:
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    print(f"Spark {spark.version}")
    found = findings(spark)
    for query, expected, actual in found:
        print(f"{'right' if actual == expected else 'WRONG'}  {query}\n    expected {expected}\n    actual   {actual}")
    spark.stop()
    return int(any(actual != expected for _, expected, actual in found))


if __name__ == "__main__":
    sys.exit(main())
