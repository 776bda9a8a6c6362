"""Sends records to a topic of Kafka, with Spark: ROUNDS times ROWS of them, numbered on from FIRST, in half-second steps.

Usage: BLOB CONSENSUS OPTIONS TOPIC FIRST ROUNDS ROWS KEYS. OPTIONS is a JSON object with the options of Spark's Kafka sink. The record with the
number N has the key N % KEYS. Prints how many were sent. A record may come twice: it is sent again when a slow broker does not answer.
"""

import json
import sys
import time


def main(_blob: str, _consensus: str, options: str, topic: str, first: str, rounds: str, rows: str, keys: str) -> None:
    from pyspark.sql import SparkSession

    # A progress bar would share the line of the result.
    conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    spark = SparkSession.builder.master("local[1]").config(map=conf).getOrCreate()
    fields = f"'id', id % {int(keys)}, 'number', id"
    for begin in range(int(first), int(first) + int(rounds) * int(rows), int(rows)):
        records = spark.range(begin, begin + int(rows))
        records = records.selectExpr(f"string(id % {int(keys)}) as key", f"to_json(named_struct({fields})) as value")
        # Otherwise one lost answer of a slow broker ends the producer, by an OutOfOrderSequenceException.
        again = {"kafka.enable.idempotence": "false"}
        records.write.format("kafka").options(**json.loads(options), **again, topic=topic).save()
        print(json.dumps({"sent": begin + int(rows)}), flush=True)
        time.sleep(0.5)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
