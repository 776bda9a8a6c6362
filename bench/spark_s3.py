"""Reads of a compacted shard on S3 against `spark.read.parquet` of the same rows over S3A, in one session of two cores with the jar of the
catalog. Both sides read from one versitygw on this machine, so the network costs nothing. The processor time is that of driver, JVM,
Python workers and server.

S3A_JARS is a folder with `org.apache.hadoop:hadoop-aws` in the version of pyspark's Hadoop, and its modules of the AWS SDK (`mvn
dependency:copy-dependencies` with the modules s3, s3-transfer-manager, apache-client, sts and arns instead of the bundle).
"""

from __future__ import annotations

import os
from pathlib import Path

from persist_kit.servers import s3_server
from persist_spark.catalog.jar import jar_path

from bench.measure import Row
from bench.spark import Bench, session_in


def run(folder: Path, quick: bool) -> list[Row]:
    """Count, sum, a range of keys and whole rows. ROWS= sets a size other than 5M."""
    rows = int(os.environ.get("ROWS") or (500_000 if quick else 5_000_000))
    jars = sorted(Path(os.environ.get("S3A_JARS", "none")).glob("*.jar"))
    if not jars:
        raise SystemExit("spark_s3: set S3A_JARS, see bench/spark_s3.py")
    with s3_server() as server:
        os.environ.update(server.environment)
        s3a = "spark.hadoop.fs.s3a"
        more = {
            "spark.jars": ",".join(map(str, [jar_path(), *jars])),
            f"{s3a}.endpoint": f"http://{server.address}", f"{s3a}.endpoint.region": server.region,
            f"{s3a}.path.style.access": "true", f"{s3a}.connection.ssl.enabled": "false",
            f"{s3a}.aws.credentials.provider": "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider",
        }  # fmt: skip
        session = session_in(folder, more)
        try:
            bench = Bench(session, folder, blob=server.location("shards"), plain=f"s3a://{server.bucket}")
            return bench.reads(rows, repeat=3 if quick else 5)
        finally:
            session.stop()
