"""Exceptions become failure classes, exit codes and messages without secrets, in the driver and in executors."""

import io
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import (
    BatchExpired,
    CodecMismatch,
    CorruptData,
    Fenced,
    Incompatible,
    Indeterminate,
    InvariantViolated,
    SchemaMismatch,
    ShardNotFound,
    Unavailable,
    UnsafeStore,
    UpdateBeyondUpper,
    UpdateNotBeyondLower,
)
from persist_spark.failures import (
    MESSAGE_BYTES_MAX,
    MESSAGE_CHARS_MAX,
    ExitCode,
    FailureClass,
    carried,
    classify,
    redact,
)
from persist_spark.report import Log, SinkReport, progress_lines, write_report
from persist_spark.spec import ConfigurationError

CASES = [
    (ConfigurationError("x"), ExitCode.CONFIGURATION, FailureClass.CONFIGURATION),
    (CodecMismatch("x"), ExitCode.CONFIGURATION, FailureClass.CONFIGURATION),
    (SchemaMismatch("x"), ExitCode.CONFIGURATION, FailureClass.CONFIGURATION),
    (ShardNotFound("x"), ExitCode.CONFIGURATION, FailureClass.CONFIGURATION),
    (Incompatible("x"), ExitCode.CONFIGURATION, FailureClass.CONFIGURATION),
    (UnsafeStore("x"), ExitCode.STORAGE, FailureClass.STORAGE),
    (Unavailable("x"), ExitCode.STORAGE, FailureClass.STORAGE),
    (Indeterminate("x"), ExitCode.STORAGE, FailureClass.STORAGE),
    (UpdateBeyondUpper("x"), ExitCode.APPLICATION, FailureClass.APPLICATION),
    (UpdateNotBeyondLower("x"), ExitCode.APPLICATION, FailureClass.APPLICATION),
    (BatchExpired("x"), ExitCode.APPLICATION, FailureClass.APPLICATION),
    (Fenced("x"), ExitCode.FENCED, FailureClass.FENCED),
    (CorruptData("x"), ExitCode.DIVERGENCE, FailureClass.STORAGE),
    (InvariantViolated("x"), ExitCode.DIVERGENCE, FailureClass.STORAGE),
    (RuntimeError("x"), ExitCode.APPLICATION, FailureClass.APPLICATION),
]


@pytest.mark.parametrize(("error", "exit_code", "failure_class"), CASES, ids=lambda case: type(case).__name__)
def test_an_exception_has_a_failure_class_and_an_exit_code(error, exit_code, failure_class):
    failure = classify(error)
    assert (failure.exit_code, failure.failure_class) == (exit_code, failure_class)


@pytest.mark.parametrize("error", [case[0] for case in CASES[:-1]], ids=lambda error: type(error).__name__)
def test_an_error_in_an_executor_is_classified_like_one_in_the_driver(error):
    """The driver gets it from the JVM as a text: the Python traceback between Java frames."""
    raised = carried(error)
    text = (
        f"Job aborted: Task 0 failed 4 times\nTraceback:\n  File x\n{type(raised).__name__}: {raised}\n\tat org.apache"
    )
    assert classify(RuntimeError(text)) == classify(error)


def test_a_truncated_error_of_an_executor_is_an_application_failure():
    cut = str(carried(Fenced("lease ran out")))[:30]
    assert classify(RuntimeError(cut)).exit_code is ExitCode.APPLICATION


def test_messages_contain_no_java_frames():
    assert classify(RuntimeError("it broke\n\tat a.b.C(D.java:1)\n\tat e.f")).message == "RuntimeError: it broke"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach redis://user:hunter2@host:6379/0", "cannot reach redis://***@host:6379/0"),
        ("cannot reach rediss://:hunter2@host", "cannot reach rediss://***@host"),
        ("s3://bucket/prefix?region=eu-1", "s3://bucket/prefix?region=eu-1"),
        ("redis://h/0?password_file=/run/pw&prefix=p", "redis://h/0?password_file=/run/pw&prefix=p"),
        ("url?password=hunter2&x=1", "url?password=***&x=1"),
        ("fs.s3a.secret.key=abc/def+g, fs.s3a.access.key: AKIA", "fs.s3a.secret.key=***, fs.s3a.access.key: ***"),
        ('{"sfPassword": "hunter2"}', '{"sfPassword": "***"}'),
        ("redis://:hun@ter2@host:6379", "redis://***@host:6379"),
        ('PlainLoginModule username="u" password="a;b c,d)e";', 'PlainLoginModule username="u" password="***";'),
        ("{'apiKey': 'a&b', 'n': 1}", "{'apiKey': '***', 'n': 1}"),
        ("connected with tok-123 to host", "connected with *** to host"),
    ],
)
def test_messages_contain_no_secrets(text, shown):
    assert redact(text, secrets=["tok-123"]) == shown


def test_messages_are_bounded():
    assert len(redact("x" * 10_000)) == MESSAGE_CHARS_MAX
    for text in ("\u5217" * 10_000, '\x00\n"' * 5_000, "\U0001f600" * 800):
        assert 0.9 * MESSAGE_BYTES_MAX < len(json.dumps(redact(text), ensure_ascii=False).encode()) <= MESSAGE_BYTES_MAX
    assert len(redact("k" * 200_000)) == MESSAGE_CHARS_MAX, (
        "the work is linear: quadratic work would take a quarter of an hour"
    )
    assert redact("named \ud800").encode() == b"named ?"


def test_a_long_message_keeps_its_beginning_and_the_last_line_of_the_traceback():
    """Spark puts a Python traceback after its own message. The error is the last line."""
    frames = "".join(f'  File "lib{number}.py", line 1, in call\n' for number in range(500))
    message = classify(
        RuntimeError(f"Task 3 failed 4 times\nTraceback:\n{frames}ArrowInvalid: no room\n\tat a.b.C")
    ).message
    assert message.startswith("RuntimeError: Task 3 failed 4 times\n")
    assert message.endswith("ArrowInvalid: no room")


def test_the_report_is_the_last_line_of_stdout_and_in_the_file(tmp_path):
    out, path = io.StringIO("earlier\n"), tmp_path / "termination-log"
    out.seek(0, io.SEEK_END)
    report = SinkReport(run_id="r", lower=0, upper=8, rows_read=3, updates_written=2, executors=2)
    write_report(report.to_json(duration_ms=5), path=path, stdout=out)
    written = json.loads(out.getvalue().splitlines()[-1])
    assert written == json.loads(path.read_text())
    assert written["outcome"] == "Succeeded"
    assert written["class"] is None
    assert set(written) == {
        "type", "outcome", "class", "message", "run_id", "upper", "lower", "rows_read", "errors", "missing", "extra",
        "updates_written", "executors", "duration_ms", "already_done", "batches", "stopped", "input_upper",
    }  # fmt: skip


def test_a_report_whose_file_cannot_be_written_is_still_on_stdout(tmp_path):
    out = io.StringIO()
    report = SinkReport(run_id="r").to_json(duration_ms=5, failure=classify(Fenced("gone")))
    write_report(report, path=tmp_path / "no" / "such" / "folder", stdout=out)
    first, last = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["event"] == "report_not_written"
    assert (last["outcome"], last["class"], last["message"]) == ("Failed", "Fenced", "gone")


def test_log_lines_are_json_and_each_has_the_sink():
    out = io.StringIO()
    Log(out, SeededEnv(start_ms=7), sink="ns/a").event("staged", rows=3)
    assert json.loads(out.getvalue()) == {"time_ms": 7, "event": "staged", "sink": "ns/a", "rows": 3}


def test_while_a_job_runs_its_stages_are_logged():
    """The body ends after two lookups of the tracker. Then the thread has ended."""
    looked, out = threading.Semaphore(0), io.StringIO()

    class Tracker:
        def getActiveStageIds(self):
            looked.release()
            return [4, 5]

        def getStageInfo(self, stage_id):
            if stage_id == 5:
                return None  # it ended meanwhile
            return SimpleNamespace(stageId=4, numTasks=8, numCompletedTasks=3, numFailedTasks=1)

    before = threading.active_count()
    with progress_lines(Log(out, SeededEnv(start_ms=7)), Tracker(), interval_s=0.001):
        assert looked.acquire(timeout=60)
        assert looked.acquire(timeout=60)
    assert threading.active_count() == before
    line = json.loads(out.getvalue().splitlines()[0])
    assert line == {"time_ms": 7, "event": "stage", "stage": 4, "tasks": 8, "done": 3, "failed": 1}


#: Spark 4's own messages, with fewer frames, are in spark_errors.json. By what was wrong: what our message must contain.
MALFORMED = {
    "csv": ["/data/csv/part.csv", "[null,b]", 'NumberFormatException: For input string: "x2"'],
    "json": ["/data/json/part.json", "JsonEOFException: Unexpected end-of-input", "line: 1"],
    "pq": ["x.parquet is not a Parquet file"],
    "pqtype": ["snappy.parquet", "column [id]", "Expected Spark type string, actual Parquet type INT64"],
    "cast": ["The value 'x2'", "cast(id as int)"],
    "div": ["DIVIDE_BY_ZERO"],
    "arrow": ["/data/csv/part.csv", "[null,b]", 'For input string: "x2"'],
    "raise": ["mine"],
}


@pytest.fixture(scope="module")
def spark_errors():
    return json.loads((Path(__file__).parent / "spark_errors.json").read_text())


def spark_error(recorded):
    return type(recorded["type"], (Exception,), {})(recorded["text"])


@pytest.mark.parametrize(
    "problem",
    [
        "CSV header does not conform to the schema.\n Header: n, id",
        "Number of column in CSV header is not equal to number of fields in the schema:\n Header length: 3, schema size: 2",
    ],
)
def test_another_header_of_a_csv_file_is_a_configuration_failure(spark_errors, problem):
    text = spark_errors["pq"]["text"].replace(
        "java.lang.RuntimeException", "org.apache.spark.SparkIllegalArgumentException"
    )
    text = re.sub(r"\S+ is not a Parquet file", f"{problem}\nCSV file: file:///x.csv", text)
    failure = classify(spark_error({**spark_errors["pq"], "text": text}))
    assert (failure.failure_class, "CSV file: file:///x.csv" in failure.message) == ("Configuration", True)


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_input_is_a_configuration_failure_that_names_file_record_and_value(spark_errors, what):
    failure = classify(spark_error(spark_errors[what]))
    assert failure.exit_code is ExitCode.CONFIGURATION
    first = failure.message.splitlines()[0] if what not in {"cast", "div"} else failure.message
    assert [each for each in MALFORMED[what] if each not in first] == []
    assert "\tat " not in failure.message
    assert "calling o" not in failure.message


@pytest.mark.parametrize(
    "problem",
    [
        "file:/data/a b.parquet is not a Parquet file. Expected magic number at tail, but found [0, 40, 13, 8]",
        "file:/data/a b.parquet is not a Parquet file (length is too low: 3)",
        "Malformed ORC file file:/data/a b.parquet. Invalid postscript length 0",
        "Not a valid ORC file file:/data/a b.parquet (maxFileLength= 9223372036854775807)",
    ],
)
def test_a_file_that_is_not_whole_is_named_first(spark_errors, problem):
    """The message began with Spark's error condition, and did not say that the file may still be being written."""
    text = re.sub(r"\S+ is not a Parquet file.*", problem, spark_errors["pq"]["text"])
    failure = classify(spark_error({**spark_errors["pq"], "text": text}))
    assert failure.exit_code is ExitCode.CONFIGURATION
    assert failure.message.startswith(
        "file:/data/a b.parquet: the file is damaged, or still being written, or has another format"
    )


def test_a_file_that_vanished_during_the_read_is_an_application_failure(spark_errors):
    failure = classify(spark_error(spark_errors["gone"]))
    assert failure.exit_code is ExitCode.APPLICATION
    file = "file:///data/gone/part-00000-b29fa3b7-89d2-44bf-a88c-322afd0b9d55-c000.csv"
    assert failure.message.startswith(f"{file}: gone after the input was listed and before the file was read. Nothing ")
    assert "the next attempt lists the input again" in failure.message
    assert "REFRESH TABLE" not in failure.message


def test_a_timeout_during_the_read_of_a_file_is_an_application_failure(spark_errors):
    text = spark_errors["pq"]["text"].replace("java.lang.RuntimeException", "java.net.SocketTimeoutException")
    text = text.replace("is not a Parquet file. Expected magic number at tail", "timed out")
    assert classify(RuntimeError(text)).exit_code is ExitCode.APPLICATION
