"""One local Spark session for all Spark tests of a test process. The first test that needs it starts it; it stops at the end."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from persist_kit.broker import jar_folder
from persist_kit.neighbours import neighbours
from persist_kit.servers import ServerMissing
from persist_spark.session import start_session
from py4j.java_gateway import JavaClass, JavaMember, JVMView
from pyspark.sql import SparkSession

twins_module, landing_run, envelope_run, catalog_world, warm_daemon, *_ = neighbours(
    __file__,
    "twins",
    "landing_run",
    "envelope_run",
    "catalog_world",
    "warm_daemon",
    "table_shard",
    "collectors",
    "standby_world",
    "stream_world",
    "query_modes",
    "query_shard",
    "mirror_files",
    "all_types",
)
(build_catalog,) = neighbours(str(Path(__file__).parents[2] / "spark-images/catalog/README.md"), "build_catalog")


@pytest.fixture(autouse=True)
def _same_sigterm() -> Iterator[None]:
    """A driver in this process leaves a handler of SIGTERM. Another test would take it for a stop."""
    handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.signal(signal.SIGTERM, handler)
    assert signal.pthread_sigmask(signal.SIG_SETMASK, mask) == mask


def remember_classes() -> None:
    """Lets py4j ask the JVM once for each class and each static method, not at each use: they do not change. A name without a package costs
    the JVM a look into all of its jars.
    """
    for view in (JVMView, JavaClass):

        def ask(self: Any, name: str, *, real: Any = view.__getattr__) -> Any:
            found = real(self, name)
            if isinstance(found, JavaClass | JavaMember):
                setattr(self, name, found)
            return found

        view.__getattr__ = ask


@pytest.fixture
def run() -> Iterator[Any]:
    """A run of a sink on a shard of its own."""
    made = landing_run.Run()
    yield made
    made.close()


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory) -> Iterator[SparkSession]:
    """Two threads and four attempts per task. Only the driver's own ports listen, on the loopback."""
    if os.environ.get("PERSIST_NO_SERVERS"):
        pytest.fail("Spark is barred in this run (`make test-fast`): mark the test `spark`")
    os.environ["PYSPARK_PYTHON"] = str(warm_daemon.program(tmp_path_factory.mktemp("python")))
    if not build_catalog.is_built():
        build_catalog.build()
    conf = {
        "spark.jars": str(build_catalog.JAR),
        "spark.master": "local[2,4]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": "-Xms1g -Xmn400m",
        # Each task that sorts, groups or joins takes a page. By default it has many megabytes, which keeps the garbage collector busy.
        "spark.buffer.pageSize": "256k",
        # Runs of a sink generate the same code again and again; of the 100 compiled classes that Spark keeps few are of a former run.
        "spark.sql.codegen.cache.maxEntries": "5000",
        # What Spark retains for its user interface, also without one.
        "spark.sql.ui.explainMode": "simple",
        "spark.sql.ui.retainedExecutions": "10",
        "spark.ui.retainedJobs": "50",
        "spark.ui.retainedStages": "50",
        "spark.ui.retainedTasks": "200",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "ERROR",
        # For the server of `connect_spark`, if a test asks for it.
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
    }
    arguments = " ".join(f"--conf '{name}={value}'" for name, value in conf.items())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{arguments} pyspark-shell"
    with suppress(ServerMissing):  # the tests that need the connector say so
        os.environ["SPARK_DIST_CLASSPATH"] = str(jar_folder("connector") / "*")
    remember_classes()
    session = start_session("tests")
    os.environ["PYSPARK_PYTHON"] = sys.executable  # for drivers that tests start
    try:
        yield session
    finally:
        session.stop()
        del os.environ["PYSPARK_SUBMIT_ARGS"]
        os.environ.pop("SPARK_DIST_CLASSPATH", None)


@pytest.fixture(scope="session")
def connect_spark(local_spark) -> Iterator[Any]:
    """A session over Spark Connect. Its server is in the JVM of `local_spark`; this process is a client like any other."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    package = local_spark._jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    service.start(local_spark.sparkContext._jsc.sc())
    session = ConnectSession.builder.remote(f"sc://127.0.0.1:{service.localPort()}").create()
    try:
        yield session
    finally:
        session.stop()
        none = local_spark._jvm.scala.Option.empty()
        service.stop(none, none)


@pytest.fixture
def connect_alone(connect_spark, monkeypatch) -> Any:
    """A session over Spark Connect. Functions of pyspark make its columns, as in a process that has no other session."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    return connect_spark


@pytest.fixture(params=["classic", "connect"])
def either_spark(request) -> Any:
    """A classic session, and one over Spark Connect."""
    return request.getfixturevalue("local_spark" if request.param == "classic" else "connect_alone")


@pytest.fixture(scope="session")
def twins(local_spark, tmp_path_factory):
    """One collection in a shard and in Parquet: twins.Twins."""
    return twins_module.make(local_spark, tmp_path_factory.mktemp("twins"))


@pytest.fixture
def make_target(tmp_path_factory, local_spark):
    """Makes shards for sinks with commands on keys, of a key and a value in DDL: envelope_run.Target. They are checked at the end."""
    made = []

    def make(key: str, value: str):
        made.append(envelope_run.Target(tmp_path_factory.mktemp("target"), local_spark, key, value))
        return made[-1]

    yield make
    for target in made:
        target.close()


@pytest.fixture(scope="session")
def connect_views(twins, connect_spark):
    """The same collection in views of a session over Spark Connect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        return twins_module.seen_by(connect_spark, twins.given, twins.folder)


@pytest.fixture
def connect_twins(connect_views, connect_alone):
    """See connect_views."""
    return connect_views


@pytest.fixture(scope="session")
def shared_catalog(local_spark, tmp_path_factory) -> Iterator[Any]:
    """A catalog of the session on files: catalog_world.Catalog."""
    made = catalog_world.Catalog(local_spark, tmp_path_factory.mktemp("catalog"))
    yield made
    made.client.close()


@pytest.fixture
def catalog(shared_catalog) -> Any:
    """The catalog, with a namespace of the test's own."""
    shared_catalog.namespace = f"demo{next(catalog_world.names)}"
    return shared_catalog


@pytest.fixture
def small(catalog) -> Any:
    """A table `small`: (1, 10) from time 5 on, (2, 20) from time 2000 on."""
    shard = catalog.make("small")
    catalog.add(shard, [((1,), (10,))], 5)
    catalog.add(shard, [((2,), (20,))], 2000)
    return shard
