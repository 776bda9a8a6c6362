"""The entry point of the image. `driver --spec FILE [--properties FILE] [--report FILE]` runs a sink; `compact --shard ID --blob URL
--consensus URL` compacts a shard; `executor` becomes the JVM of an executor that such a driver requested from Kubernetes.

The only file that reads the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from traceback import format_exception
from types import FrameType
from typing import NoReturn

from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import Metrics
from persist_engine.base.secrets import without_secrets
from persist_engine.base.settings import Settings, with_environ
from persist_engine.model.ids import ShardId

from persist_spark.failures import ExitCode, Terminated, classify, ignore_stop, is_stopped
from persist_spark.memory import give_back_freed_memory
from persist_spark.progress.hidden_output import hidden_output
from persist_spark.progress.stop_asked import StopPort, stop_served
from persist_spark.report import Log, SinkReport, progress_lines, write_report
from persist_spark.spec import CompactionSpec, ConfigurationError, SinkSpec

_EXECUTOR_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
#: The arguments of the backend, and the environment variables in which Spark's Kubernetes scheduler passes them.
_BACKEND_ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
#: Spark reads the run's secret from a file only when it knows that it is on Kubernetes. An executor would learn that from the driver, but
#: must authenticate first.
_MASTER = "-Dspark.master=k8s://executor"
#: The same limit as in `persist maintain compact --record-days`.
_RECORD_DAYS_MAX = 3650
_JAVA_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")
#: The time until a SIGTERM is repeated that a finalizer dropped. By then, the finalizer has ended.
_REPEAT_S = 0.05
_SHA256 = re.compile(r"[0-9a-f]{64}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog="persist-spark", description="Spark sinks over persist shards")
    commands = parser.add_subparsers(dest="command", required=True)
    driver = commands.add_parser("driver", help="run a sink once")
    driver.add_argument("--spec", type=Path, required=True, help="sink.json")
    compact = commands.add_parser("compact", help="do the compactions of a shard that are due, on executors")
    compact.add_argument("--shard", required=True, type=ShardId, help="the id of the shard")
    compact.add_argument("--blob", required=True, help="the address of its blob store")
    compact.add_argument("--consensus", required=True, help="the address of its consensus store")
    compact.add_argument("--full", action="store_true", help="merge all batches into one, not only those that are due")
    compact.add_argument("--max-bytes", type=int, help="leave out merges that would read more than this together")
    compact.add_argument(
        "--record-days",
        type=_record_days,
        default=90,
        help="the number of days for which records of deleted blobs are kept; 0: write none",
    )
    compact.add_argument("--pod", help="the name of the pod that this process runs in, which then owns its executors")
    compact.add_argument("--host", help="the address of this pod, at which its executors reach it")
    for command in (driver, compact):
        command.add_argument(
            "--properties",
            type=Path,
            help="Spark's settings, in the form of spark-defaults.conf; default: as Spark finds them, in SPARK_CONF_DIR",
        )
        command.add_argument(
            "--report",
            type=Path,
            help="where to write the JSON report; default: the container's termination log, if it exists",
        )
    _add_driver_options(driver)
    commands.add_parser("executor", help="become a Spark executor; arguments are in SPARK_* variables")
    arguments = parser.parse_args(argv)
    compacts = arguments.command == "compact"
    if compacts and (arguments.pod or arguments.host) and not arguments.properties:
        parser.error("--pod and --host complete --properties: give the file too")
    if arguments.command == "driver" and (arguments.stop_port is None) != (arguments.stop_digest is None):
        parser.error("--stop-port and --stop-digest belong together: give both")
    if arguments.command == "executor":
        become_executor(os.environ)
    own = {"spark.kubernetes.driver.pod.name": arguments.pod, "spark.driver.host": arguments.host} if compacts else {}
    if arguments.properties:
        use_properties(arguments.properties, os.environ, {name: value for name, value in own.items() if value})
    if compacts:
        compaction = CompactionSpec(
            arguments.shard,
            arguments.blob,
            arguments.consensus,
            full=arguments.full,
            max_bytes=arguments.max_bytes,
            record_days=arguments.record_days,
        )
        with _waiting_sigterm():
            return run_compact(compaction, arguments.report)
    stop = None if arguments.stop_port is None else StopPort(arguments.stop_port, arguments.stop_digest)
    with _waiting_sigterm(), stop_served(stop, Log(sys.stderr, SystemEnv())):
        return run_driver(
            arguments.spec,
            arguments.report,
            options=arguments.options,
            code=arguments.code,
            progress=arguments.progress,
            promote=arguments.promote,
            metrics_port=arguments.metrics_port,
        )


def _record_days(text: str) -> int:
    days = int(text)
    if not 0 <= days <= _RECORD_DAYS_MAX:
        raise argparse.ArgumentTypeError(f"{days} is not from 0 to {_RECORD_DAYS_MAX}")
    return days


def _digest(text: str) -> str:
    if _SHA256.fullmatch(text) is None:
        raise argparse.ArgumentTypeError("not a SHA-256 of 64 hex digits in lower case")
    return text


def _add_driver_options(driver: argparse.ArgumentParser) -> None:
    driver.add_argument(
        "--progress",
        help="where to report the progress of the run: a file, or the URL of an object of the API server with the name of an "
        "annotation as its fragment; default: nowhere",
    )
    driver.add_argument(
        "--options",
        type=Path,
        help="the folder with the options of the input that come from a Secret, a file for each; default: there are none",
    )
    driver.add_argument(
        "--code",
        type=Path,
        help="the folder with the files of the ConfigMap that input.python names; default: there are none",
    )
    driver.add_argument(
        "--promote",
        type=Path,
        help="for a stream on standby: the file whose appearance orders it to take over; default: it never takes over",
    )
    driver.add_argument(
        "--metrics-port", type=int, help="the port on which Prometheus finds the engine's metrics; default: none"
    )
    driver.add_argument(
        "--stop-port", type=int, help="the port on which POST /stop does what SIGTERM does; default: none"
    )
    driver.add_argument(
        "--stop-digest", type=_digest, help="the SHA-256, in hex, of the token that POST /stop must bear"
    )


def use_properties(file: Path, environ: MutableMapping[str, str], own: Mapping[str, str] | None = None) -> None:
    """Makes the Spark that this process starts read `file`, and neither arguments nor a configuration folder of the environment. `own`:
    settings that only the pod knows, which override the file. Spark needs brackets around an IPv6 address.

    Spark would put the folder on the JVM's class path. A folder with files there keeps the JVM from using archived classes, which save a
    third of the CPU time of its start.
    """
    environ.pop("SPARK_CONF_DIR", None)
    bracketed = {name: f"[{value}]" if ":" in value else value for name, value in (own or {}).items()}
    settings = [part for name, value in bracketed.items() for part in ("--conf", f"{name}={value}")]
    environ["PYSPARK_SUBMIT_ARGS"] = shlex.join(["--properties-file", str(file), *settings, "pyspark-shell"])


def run_driver(
    spec_path: Path,
    report_path: Path | None,
    *,
    options: Path | None = None,
    code: Path | None = None,
    progress: str | None = None,
    promote: Path | None = None,
    metrics_port: int | None = None,
) -> int:
    """Runs the sink and writes a report in every case. Returns the exit code. `options`: the folder with secret options of the input;
    `code`: the folder with the files of its ConfigMap; `progress`: the place for the run's progress; `promote`: the file that orders a
    stream on standby to take over; `metrics_port`: the port for the engine's metrics.
    """
    from persist_spark.progress.scraped import Meters

    env, meters = SystemEnv(), Meters()
    started = env.monotonic_s()
    # Driver and executors run the same image and must use the same interpreter, not the `python3` on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    give_back_freed_memory()
    spec: SinkSpec | None = None
    report, failure = SinkReport(run_id=""), None
    try:
        with _terminated_by_sigterm():
            spec = SinkSpec.load(spec_path, options, code)
            report = SinkReport(run_id=spec.run_id)
            with hidden_output(spec.secrets()):
                log = Log(sys.stderr, env, sink=spec.sink_id, run=spec.run_id, shard=spec.shard_id)
                with meters.served(metrics_port, log):
                    report = _run(spec, env, log, meters.metrics, progress=progress, promote=promote)
    except (Exception, Terminated) as error:  # noqa: BLE001 - the outermost frame: every error becomes a report
        secrets = spec.secrets() if spec else ()
        failure = classify(_stop_or(error), secrets=secrets)
        Log(sys.stderr, env).event("failed", error=without_secrets("".join(format_exception(error)), secrets=secrets))
    duration_ms = round((env.monotonic_s() - started) * 1000)
    document = meters.tally.added_to(report.to_json(duration_ms=duration_ms, failure=failure))
    write_report(document, path=report_path, stdout=sys.stdout)
    return int(failure.exit_code if failure else ExitCode.SUCCEEDED)


def _run(
    spec: SinkSpec, env: SystemEnv, log: Log, metrics: Metrics, *, progress: str | None, promote: Path | None
) -> SinkReport:
    from persist_spark.progress.live import Live
    from persist_spark.progress.publish import published
    from persist_spark.session import start_session
    from persist_spark.sink import run_sink
    from persist_spark.streaming.stream import run_stream

    stop = threading.Event()
    if spec.stream is not None:
        # The signal raises no exception, so that the batch in flight is committed before the stream ends.
        set_by_sigterm(stop)
    log.event("starting", envelope=spec.envelope.type, format=spec.input.format)
    spark = start_session(f"persist sink {spec.sink_id}")
    live = Live()
    log.listener = live.note
    try:
        telling = nullcontext() if progress is None else published(live, progress, spark, log)
        with telling, progress_lines(log, spark.sparkContext.statusTracker()):
            if spec.stream is not None:
                is_promoted = promote.exists if promote is not None else lambda: False
                return run_stream(spark, spec, stop=stop, env=env, log=log, is_promoted=is_promoted, metrics=metrics)
            return run_sink(spark, spec, env=env, log=log, metrics=metrics)
    finally:
        spark.stop()


def run_compact(spec: CompactionSpec, report_path: Path | None) -> int:
    """Compacts the shard and writes a report in every case. Returns the exit code. PERSIST_COMPACTION_DISABLED disables it."""
    from persist_spark.compaction.run import failed_report, run_compaction
    from persist_spark.progress.scraped import Meters
    from persist_spark.session import start_session

    env, meters = SystemEnv(), Meters()
    started, failure = env.monotonic_s(), None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    enabled = with_environ(Settings(), os.environ).compaction.enabled
    log = Log(sys.stderr, env, shard=spec.shard_id)
    try:
        with _terminated_by_sigterm():
            log.event("starting")
            spark = start_session(f"persist compaction {spec.shard_id}")
            try:
                with progress_lines(log, spark.sparkContext.statusTracker()):
                    report = run_compaction(spark, spec, enabled=enabled, env=env, log=log, metrics=meters.metrics)
            finally:
                spark.stop()
    except (Exception, Terminated) as error:  # noqa: BLE001 - the outermost frame: every error becomes a report
        failure = classify(_stop_or(error))
        log.event("failed", error=without_secrets("".join(format_exception(error))))
        duration_ms = round((env.monotonic_s() - started) * 1000)
        report = failed_report(spec, failure.message, duration_ms=duration_ms)
    write_report(meters.tally.added_to(report), path=report_path, stdout=sys.stdout)
    return int(failure.exit_code if failure else ExitCode.SUCCEEDED)


@contextmanager
def _waiting_sigterm() -> Iterator[None]:
    """Within the block, a SIGTERM waits for `_terminated_by_sigterm`, so that it costs no report. One that still waits at the end of the
    block has no effect.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ignore_stop)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """Within the block, the first SIGTERM raises Terminated in the main thread, also when it arrives within a finalizer, whose exceptions
    Python drops. After the block a SIGTERM has no effect.
    """
    show = sys.unraisablehook

    def again() -> None:
        if signal.getsignal(signal.SIGTERM) is _terminate:
            os.kill(os.getpid(), signal.SIGTERM)

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, Terminated):
            signal.signal(signal.SIGTERM, _terminate)
            threading.Timer(_REPEAT_S, again).start()
        else:
            show(dropped)

    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = repeat
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # raises for a signal that has just arrived
        finally:
            sys.unraisablehook = show
            # Threads of the block may still take a signal, and Python then runs its handler in the main thread, which blocks the signal.
            if signal.getsignal(signal.SIGTERM) is _terminate:
                signal.signal(signal.SIGTERM, _late)


def _late(_signal: int, _frame: FrameType | None) -> None:
    """The handler of SIGTERM after a run. Not `ignore_stop`, because the run was not stopped."""


def set_by_sigterm(stop: threading.Event) -> None:
    """From now on, SIGTERM sets `stop`.

    SUBTLE: not in the handler. The main thread, which runs the handler, may just then hold the lock of the event in `wait`, and would wait
    for itself. A `SimpleQueue` takes an item at any point.
    """
    asked: SimpleQueue[None] = SimpleQueue()

    def hear() -> None:
        asked.get()
        stop.set()

    threading.Thread(name="sigterm", target=hear, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: asked.put(None))


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    # The exception unwinds the stack, so that leases are released and Spark is stopped. Another signal must not disturb this.
    signal.signal(signal.SIGTERM, ignore_stop)
    raise Terminated


def _stop_or(error: BaseException) -> BaseException:
    """The error to report: a stop, if `error` followed one, such as an error of a call that the stop broke off."""
    return Terminated() if is_stopped() else error


def become_executor(environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by the executor's JVM. The JVM then gets the signals and the memory limit, and its exit code counts."""
    command = executor_command(environ)
    home = {"SPARK_HOME": str(_spark_home(environ)), "PYSPARK_PYTHON": environ.get("PYSPARK_PYTHON", sys.executable)}
    os.execve(command[0], command, {**environ, **home})  # noqa: S606 - no shell: that is the point


def executor_command(environ: Mapping[str, str]) -> list[str]:
    """The command line of the JVM. Raises ConfigurationError, which names missing variables."""
    missing = [name for name in (*_BACKEND_ARGUMENTS.values(), "SPARK_EXECUTOR_MEMORY") if not environ.get(name)]
    if missing:
        raise ConfigurationError(f"not started as a Spark executor: {', '.join(missing)} not set")
    numbered = {int(match[1]): value for name, value in environ.items() if (match := _JAVA_OPTION.fullmatch(name))}
    memory = environ["SPARK_EXECUTOR_MEMORY"]
    arguments = [part for option, name in _BACKEND_ARGUMENTS.items() for part in (option, environ[name])]
    options = [numbered[number] for number in sorted(numbered)]
    return [
        _java(environ),
        *options,
        _MASTER,
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        _classpath(environ),
        _EXECUTOR_BACKEND,
        *arguments,
    ]


def _classpath(environ: Mapping[str, str]) -> str:
    """The class path: the configuration, then Spark's jars, then additions of the image or the user."""
    added = [environ.get(name, "") for name in ("SPARK_EXTRA_CLASSPATH", "SPARK_DIST_CLASSPATH")]
    parts = [environ.get("SPARK_CONF_DIR", ""), str(_spark_home(environ) / "jars" / "*"), *added]
    return ":".join(part for part in parts if part)


def _spark_home(environ: Mapping[str, str]) -> Path:
    if environ.get("SPARK_HOME"):
        return Path(environ["SPARK_HOME"])
    import pyspark

    return Path(pyspark.__file__).parent


def _java(environ: Mapping[str, str]) -> str:
    home = environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environ.get("PATH"))
    if java is None:
        raise ConfigurationError("java was not found: set JAVA_HOME or put java on the PATH")
    return java


if __name__ == "__main__":
    sys.exit(main())
