"""Reads a shard through Spark's data source and prints the number of rows, of keys, and the sum of a column.

Usage: BLOB CONSENSUS SHARD_ID KEY COLUMN.
"""

import json
import sys


def main(blob: str, consensus: str, shard: str, key: str, column: str) -> None:
    from persist_spark.datasource import register
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    # A progress bar would share the line of the result.
    conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master("local[1]").config(map=conf).getOrCreate()
    register(spark, blob=blob, consensus=consensus)
    frame = spark.read.format("persist").load(shard)
    row = frame.agg(F.count("*").alias("rows"), F.countDistinct(key).alias("keys"), F.sum(column).alias("sum")).first()
    print(json.dumps(row.asDict()))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
