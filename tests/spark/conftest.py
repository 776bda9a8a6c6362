"""One local Spark session for the tests that need one: started once, stopped at the end."""

import os
import sys
from collections.abc import Iterator

import pytest
from persist_spark.session import start_session
from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def local_spark() -> Iterator[SparkSession]:
    """Two threads, four attempts per task, nothing listening but the driver's own ports on the loopback."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = {
        "spark.master": "local[2,4]",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "ERROR",
    }
    arguments = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{arguments} pyspark-shell"
    session = start_session("tests")
    try:
        yield session
    finally:
        session.stop()
        del os.environ["PYSPARK_SUBMIT_ARGS"]
