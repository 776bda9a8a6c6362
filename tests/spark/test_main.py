"""The executor's command line, made from the environment that Spark's Kubernetes scheduler sets, and the driver's refusals."""

import json
import os
import shlex
import signal
import threading
from base64 import b64encode

import pytest
from persist_engine import ShardId
from persist_spark import main as main_module
from persist_spark.failures import Terminated
from persist_spark.main import executor_command, main, set_by_sigterm
from persist_spark.spec import CompactionSpec, ConfigurationError
from pyspark.errors import IllegalArgumentException

ENVIRON = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_EXECUTOR_POD_NAME": "sink-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_HOME": "/opt/spark",
    "SPARK_CONF_DIR": "/etc/persist",
    "JAVA_HOME": "/opt/java",
}


def test_the_executor_is_the_jvm_that_the_environment_describes():
    options = {f"SPARK_JAVA_OPT_{n}": f"-Dopt{n}=a b" for n in (10, 2, 0, 1)}
    command = executor_command({**ENVIRON, **options, "SPARK_EXTRA_CLASSPATH": "/extra/*"})
    assert command == [
        "/opt/java/bin/java", "-Dopt0=a b", "-Dopt1=a b", "-Dopt2=a b", "-Dopt10=a b",
        "-Dspark.master=k8s://executor", "-Xms1024m", "-Xmx1024m",
        "-cp", "/etc/persist:/opt/spark/jars/*:/extra/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url", "spark://CoarseGrainedScheduler@driver:7078", "--executor-id", "3", "--cores", "2",
        "--app-id", "spark-1",
        "--hostname", "10.0.0.7",
        "--resourceProfileId", "0", "--podName", "sink-exec-3",
    ]  # fmt: skip


def test_without_spark_home_the_jars_are_those_of_the_installed_pyspark():
    without_home = {name: value for name, value in ENVIRON.items() if name != "SPARK_HOME"}
    classpath = executor_command(without_home)[executor_command(without_home).index("-cp") + 1]
    assert classpath.split(":")[1].endswith("/pyspark/jars/*")


def test_missing_environment_variables_are_named():
    with pytest.raises(ConfigurationError, match="SPARK_DRIVER_URL, SPARK_EXECUTOR_MEMORY not set"):
        executor_command({k: v for k, v in ENVIRON.items() if k not in ("SPARK_DRIVER_URL", "SPARK_EXECUTOR_MEMORY")})


def test_a_missing_java_is_a_configuration_error(tmp_path):
    without_java = {name: value for name, value in ENVIRON.items() if name != "JAVA_HOME"}
    with pytest.raises(ConfigurationError, match="java was not found"):
        executor_command({**without_java, "PATH": str(tmp_path)})


@pytest.mark.parametrize(("host", "shown"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")])
def test_a_compaction_in_a_pod_tells_spark_the_name_and_the_address_of_the_pod(monkeypatch, tmp_path, host, shown):
    """These win against the file, which is the same for all pods."""
    (tmp_path / "conf files").mkdir()
    properties = tmp_path / "conf files" / "spark-defaults.conf"
    properties.touch()
    given = []
    monkeypatch.setattr(main_module, "run_compact", lambda spec, report: given.append((spec, report)) or 0)
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "")
    monkeypatch.setenv("SPARK_CONF_DIR", "/somewhere")
    shard = ShardId.new()
    stores = ["--shard", str(shard), "--blob", "mem://a", "--consensus", "mem://b"]
    assert main(["compact", *stores, "--properties", str(properties), "--pod", "flights-x", "--host", host]) == 0
    assert given == [(CompactionSpec(shard, "mem://a", "mem://b"), None)]
    assert main(["compact", *stores, "--max-bytes", "700"]) == 0
    assert main(["compact", *stores, "--record-days", "7"]) == 0
    assert given[1:] == [
        (CompactionSpec(shard, "mem://a", "mem://b", max_bytes=700), None),
        (CompactionSpec(shard, "mem://a", "mem://b", record_days=7), None),
    ]
    for days in ("-1", "3651", "a week"):
        with pytest.raises(SystemExit):
            main(["compact", *stores, "--record-days", days])
    assert shlex.split(os.environ["PYSPARK_SUBMIT_ARGS"]) == [
        "--properties-file", str(properties), "--conf", "spark.kubernetes.driver.pod.name=flights-x",
        "--conf", f"spark.driver.host={shown}", "pyspark-shell",
    ]  # fmt: skip
    assert "SPARK_CONF_DIR" not in os.environ
    with pytest.raises(SystemExit):
        main(["compact", *stores, "--pod", "flights-x"])


def test_a_broken_specification_is_reported_without_starting_spark(tmp_path, capsys):
    spec, report = tmp_path / "sink.json", tmp_path / "report.json"
    spec.write_text("[]")
    assert main(["driver", "--spec", str(spec), "--report", str(report)]) == 72
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads(report.read_text())
    assert (last["type"], last["outcome"], last["class"]) == ("Sink", "Failed", "Configuration")
    assert "must be an object" in last["message"]


def stopped_at(monkeypatch, step):
    """SIGTERM arrives as `main` takes this step."""
    take = getattr(main_module, step)

    def stopped(*given, **named):
        signal.raise_signal(signal.SIGTERM)
        return take(*given, **named)

    monkeypatch.setattr(main_module, step, stopped)


@pytest.mark.parametrize(
    ("command", "step", "message"),
    [
        ("driver", "give_back_freed_memory", "stopped by SIGTERM"),
        ("driver", "without_secrets", "must be an object"),
        ("driver", "write_report", "must be an object"),
        ("compact", "with_environ", "stopped by SIGTERM"),
    ],
)
def test_a_stop_before_or_after_a_run_costs_no_report(monkeypatch, tmp_path, capsys, command, step, message):
    """The exception left `main`, and there was no report."""
    (tmp_path / "sink.json").write_text("[]")
    stores = ["--shard", str(ShardId.new()), "--blob", "mem://a", "--consensus", "mem://b"]
    given = stores if command == "compact" else ["--spec", str(tmp_path / "sink.json")]
    stopped_at(monkeypatch, step)
    try:
        assert main([command, *given, "--report", str(tmp_path / "report.json")]) in (1, 72)
    except Terminated:
        pytest.fail("the stop left main")  # pytest would end at a KeyboardInterrupt
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["outcome"] == "Failed"
    assert message in report["message"]


class Noted(threading.Event):
    """Notes which thread sets it."""

    def set(self):
        self.by = threading.current_thread()
        super().set()


def test_a_handler_of_the_main_thread_never_sets_what_the_main_thread_waits_for():
    """A handler that ran within `wait`, while this held the lock of the event, waited for that lock for ever."""
    stop = Noted()
    set_by_sigterm(stop)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert stop.wait(60)
    assert stop.by is not threading.main_thread()


@pytest.mark.spark
def test_an_executor_reads_the_secret_of_the_run_from_its_file(local_spark, tmp_path):
    """Spark's own SecurityManager gets the options of the executor's command line, and its key is that of the file. Without the master,
    which Spark itself does not pass to executors, it does not read the file.
    """
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    options = ("-Dspark.authenticate=true", f"-Dspark.authenticate.secret.file={secret}")
    command = executor_command({**ENVIRON, **{f"SPARK_JAVA_OPT_{n}": one for n, one in enumerate(options)}})
    settings = dict(one.removeprefix("-D").split("=", 1) for one in command if one.startswith("-Dspark."))
    assert key_of(local_spark, settings) == b64encode(bytes(range(32))).decode()
    with pytest.raises(IllegalArgumentException, match="A secret key must be specified"):
        key_of(local_spark, {name: one for name, one in settings.items() if name != "spark.master"})


def key_of(spark, settings):
    """The key with which an executor of these settings would authenticate itself."""
    jvm = spark._jvm
    conf = jvm.org.apache.spark.SparkConf(False)
    for name, value in settings.items():
        conf.set(name, value)
    entries = getattr(getattr(jvm.org.apache.spark.internal.config, "package$"), "MODULE$")
    manager = jvm.org.apache.spark.SecurityManager(conf, jvm.scala.Option.empty(), entries.AUTH_SECRET_FILE_EXECUTOR())
    return manager.getSecretKey()
