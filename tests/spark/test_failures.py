"""Exceptions become classes, exit codes and messages that hold no secret, wherever they were raised."""

import io
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import (
    BatchExpired,
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
def test_class_and_exit_code(error, exit_code, failure_class):
    failure = classify(error)
    assert (failure.exit_code, failure.failure_class) == (exit_code, failure_class)


@pytest.mark.parametrize("error", [case[0] for case in CASES[:-1]], ids=lambda error: type(error).__name__)
def test_an_error_of_an_executor_is_classified_as_if_it_were_here(error):
    """The JVM hands the driver a text: the Python traceback between Java frames."""
    raised = carried(error)
    text = (
        f"Job aborted: Task 0 failed 4 times\nTraceback:\n  File x\n{type(raised).__name__}: {raised}\n\tat org.apache"
    )
    assert classify(RuntimeError(text)) == classify(error)


def test_a_message_that_was_cut_is_still_a_failure():
    cut = str(carried(Fenced("lease ran out")))[:30]
    assert classify(RuntimeError(cut)).exit_code is ExitCode.APPLICATION


def test_java_frames_do_not_fill_the_message():
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
def test_secrets_do_not_stand_in_messages(text, shown):
    assert redact(text, secrets=["tok-123"]) == shown


def test_messages_are_bounded():
    assert len(redact("x" * 10_000)) == MESSAGE_CHARS_MAX
    for text in ("\u5217" * 10_000, '\x00\n"' * 5_000, "\U0001f600" * 800):
        assert 0.9 * MESSAGE_BYTES_MAX < len(json.dumps(redact(text), ensure_ascii=False).encode()) <= MESSAGE_BYTES_MAX
    assert len(redact("k" * 200_000)) == MESSAGE_CHARS_MAX, (
        "by work that is linear: squared it takes a quarter of an hour"
    )
    assert redact("named \ud800").encode() == b"named ?"


def test_a_long_message_says_what_failed_and_why():
    """Spark puts a Python traceback behind its own words: the error is its last line."""
    frames = "".join(f'  File "lib{number}.py", line 1, in call\n' for number in range(500))
    message = classify(
        RuntimeError(f"Task 3 failed 4 times\nTraceback:\n{frames}ArrowInvalid: no room\n\tat a.b.C")
    ).message
    assert message.startswith("RuntimeError: Task 3 failed 4 times\n")
    assert message.endswith("ArrowInvalid: no room")


def test_the_report_is_the_last_line_and_in_the_file(tmp_path):
    out, path = io.StringIO("earlier\n"), tmp_path / "termination-log"
    out.seek(0, io.SEEK_END)
    report = SinkReport(run_id="r", lower=0, upper=8, rows_read=3, updates_written=2, executors=2)
    write_report(report.to_json(duration_ms=5), path=path, stdout=out)
    written = json.loads(out.getvalue().splitlines()[-1])
    assert written == json.loads(path.read_text())
    assert written["outcome"] == "Succeeded"
    assert written["class"] is None
    assert set(written) == {
        "type", "outcome", "class", "message", "run_id", "upper", "lower", "rows_read",
        "updates_written", "executors", "duration_ms", "already_done",
    }  # fmt: skip


def test_a_report_that_cannot_be_written_is_still_on_stdout(tmp_path):
    out = io.StringIO()
    report = SinkReport(run_id="r").to_json(duration_ms=5, failure=classify(Fenced("gone")))
    write_report(report, path=tmp_path / "no" / "such" / "folder", stdout=out)
    first, last = (json.loads(line) for line in out.getvalue().splitlines())
    assert first["event"] == "report_not_written"
    assert (last["outcome"], last["class"], last["message"]) == ("Failed", "Fenced", "gone")


def test_log_lines_are_json_with_the_sink_on_each():
    out = io.StringIO()
    Log(out, SeededEnv(start_ms=7), sink="ns/a").event("staged", rows=3)
    assert json.loads(out.getvalue()) == {"time_ms": 7, "event": "staged", "sink": "ns/a", "rows": 3}


def test_while_a_job_runs_its_stages_are_told():
    """The body ends when two lines were seen; the thread is gone after it."""
    seen, out = threading.Semaphore(0), io.StringIO()

    class Tracker:
        def getActiveStageIds(self):
            seen.release()
            return [4, 5]

        def getStageInfo(self, stage_id):
            if stage_id == 5:
                return None  # it ended meanwhile
            return SimpleNamespace(stageId=4, numTasks=8, numCompletedTasks=3, numFailedTasks=1)

    before = threading.active_count()
    with progress_lines(Log(out, SeededEnv(start_ms=7)), Tracker(), interval_s=0.001):
        assert seen.acquire(timeout=10)
        assert seen.acquire(timeout=10)
    assert threading.active_count() == before
    line = json.loads(out.getvalue().splitlines()[0])
    assert line == {"time_ms": 7, "event": "stage", "stage": 4, "tasks": 8, "done": 3, "failed": 1}


#: As Spark 4 words them, with fewer frames: what was done, and what the message must have.
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


def spark_error(seen):
    return type(seen["type"], (Exception,), {})(seen["text"])


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_input_is_a_matter_of_configuration_and_says_which_file_record_and_value(spark_errors, what):
    failure = classify(spark_error(spark_errors[what]))
    assert failure.exit_code is ExitCode.CONFIGURATION
    first = failure.message.splitlines()[0] if what not in {"cast", "div"} else failure.message
    assert [each for each in MALFORMED[what] if each not in first] == []
    assert "\tat " not in failure.message
    assert "calling o" not in failure.message


def test_a_file_that_went_away_while_it_was_read_is_read_again(spark_errors):
    failure = classify(spark_error(spark_errors["gone"]))
    assert failure.exit_code is ExitCode.APPLICATION
    assert "FILE_NOT_EXIST" in failure.message


def test_a_store_that_hung_while_a_file_was_read_is_no_matter_of_configuration(spark_errors):
    text = spark_errors["pq"]["text"].replace("java.lang.RuntimeException", "java.net.SocketTimeoutException")
    text = text.replace("is not a Parquet file. Expected magic number at tail", "timed out")
    assert classify(RuntimeError(text)).exit_code is ExitCode.APPLICATION
