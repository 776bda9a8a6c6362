"""What a driver reports while its run goes on: the object, and where it is published."""

import http.server
import io
import json
import threading
import time

import pytest
from persist_engine.base.env import SeededEnv
from persist_operator.api.sink_status import RunningProgress
from persist_spark.progress.live import TEXT_MAX, Live
from persist_spark.progress.publish import published, to_annotation
from persist_spark.report import Log

pytestmark = pytest.mark.spark
WAIT_S = 60


def until(condition):
    for _ in range(WAIT_S * 50):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


@pytest.fixture
def api_server():
    """An object that takes patches. `answers` are the codes of the next requests, then 200."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PATCH(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.patches.append((self.path, dict(self.headers), body))
            self.send_response(server.answers.pop(0) if server.answers else 200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.patches, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def url(server):
    return f"http://127.0.0.1:{server.server_address[1]}/api/v1/namespaces/a/pods/p#example.io/progress"


def test_the_events_of_a_run_become_stages_and_numbers():
    live = Live()
    assert live.text() is None
    live.note("minted", {"time": 5})
    assert json.loads(live.text()) == {"stage": "Reading"}
    live.note("staged", {"rows": 7, "errors": 2, "updates": 3, "batches": 1})
    assert json.loads(live.text()) == {"stage": "Appending", "rows_read": 7, "errors": 2}


def test_the_batches_of_a_stream_add_up_and_its_stage_stays():
    live, batch = Live(), {"rows": 7, "errors": 2, "updates": 3, "upper": 50, "input_upper": None, "lag_ms": 1200}
    for event, fields in [
        ("position", {}),
        *[("minted", {}), ("staged", {"rows": 7, "errors": 2}), ("batch", batch)] * 2,
    ]:
        live.note(event, fields)
    assert json.loads(live.text()) == {
        "stage": "Streaming", "batches": 2, "rows_read": 14, "errors": 4, "updates_written": 6, "upper": 50, "lag_ms": 1200,
    }  # fmt: skip
    assert RunningProgress.parse(live.text()) == RunningProgress(
        stage="Streaming", batches=2, rows_read=14, errors=4, updates_written=6, upper="50", lag_seconds=1
    )


def test_the_operator_reads_every_field_that_a_driver_can_write(local_spark):
    live = Live()
    live.note("standing_by", {"stage": "StandingBy"})
    assert RunningProgress.parse(live.text()).stage == "StandingBy"
    live.note("followed", {"stage": "Differs", "compared": 1, "missing": 2, "extra": 3, "lag_ms": 5000, "batch": 7})
    standing = RunningProgress.parse(live.text())
    assert (standing.stage, standing.missing, standing.extra, standing.lag_seconds) == ("Differs", 2, 3, 5)
    live.note("position", {})
    live.note("batch", {"rows": 1, "errors": 2, "updates": 2, "upper": 3, "input_upper": 4, "lag_ms": 5000})
    live.note("fresh", {"fresh_ms": 1_790_000_000_000})
    live.count(local_spark)
    read = RunningProgress.parse(live.text())
    unread = {name for name in RunningProgress.__slots__ if getattr(read, name) is None}
    assert unread == {"observed_time", "compared", "missing", "extra"}
    assert {name for name in unread if getattr(standing, name) is None} == {"observed_time"}


def test_the_object_stays_small_with_the_greatest_numbers(local_spark):
    live, most = Live(), 2**63
    live.note("position", {})
    live.note(
        "batch", {"rows": most, "errors": most, "updates": most, "upper": most, "input_upper": most, "lag_ms": most}
    )
    live.count(local_spark)
    assert len(live.text()) <= TEXT_MAX // 2


def test_a_file_shows_a_running_job_with_its_tasks_and_rows(local_spark, tmp_path):
    """The job waits until the file shows that it runs."""
    (tmp_path / "in.csv").write_text("1\n2\n")
    gate, target, live = tmp_path / "gate", tmp_path / "progress.json", Live()
    live.note("minted", {})

    def waiting(rows):
        for one in rows:
            while not gate.exists():
                time.sleep(0.02)
            yield one

    def seen():
        document = json.loads(target.read_text()) if target.exists() else {}
        return document.get("tasks", 0) >= 1 and document["stage"] == "Reading"

    rows = local_spark.read.csv(f"{tmp_path}/in.csv").rdd.mapPartitions(waiting)
    job = threading.Thread(target=rows.count)
    with published(live, str(target), local_spark, Log(io.StringIO(), SeededEnv()), interval_s=0.01, look_s=0.01):
        job.start()
        try:
            until(seen)
        finally:
            gate.touch()
            job.join()
    assert json.loads(target.read_text())["tasks_done"] <= 1


def test_a_new_stage_is_published_at_once_and_numbers_wait(local_spark, api_server):
    live = Live()
    live.note("minted", {})
    with published(live, url(api_server), local_spark, Log(io.StringIO(), SeededEnv()), interval_s=1e9, look_s=0.01):
        until(lambda: len(api_server.patches) == 1)
        live.note("staged", {"rows": 7, "errors": 2})
        until(lambda: len(api_server.patches) == 2)
        live.note("staged", {"rows": 8, "errors": 2})
        live.note("position", {})
        until(lambda: len(api_server.patches) == 3)
    stages = [
        json.loads(body["metadata"]["annotations"]["example.io/progress"])["stage"] for _, _, body in api_server.patches
    ]
    assert stages == ["Reading", "Appending", "Streaming"]
    path, headers, _ = api_server.patches[0]
    assert (path, headers["Content-Type"]) == ("/api/v1/namespaces/a/pods/p", "application/merge-patch+json")


def test_a_refusal_is_logged_once_and_the_run_goes_on(local_spark, api_server):
    live, out = Live(), io.StringIO()
    api_server.answers += [403, 403]
    live.note("minted", {})
    with published(live, url(api_server), local_spark, Log(out, SeededEnv()), interval_s=0.02, look_s=0.01):
        until(lambda: len(api_server.patches) >= 3)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["progress_not_published"]
    assert "403" in lines[0]["error"]


def test_the_token_goes_to_https_only(api_server, tmp_path):
    (tmp_path / "token").write_text("the-token")
    to_annotation(url(api_server), account=tmp_path)("{}")
    ((_, headers, _),) = api_server.patches
    assert "Authorization" not in headers
