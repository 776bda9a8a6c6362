"""The console on the live cluster, in Chromium: each viewer sees what the viewer may see, and approves what the viewer may patch.

`persist ui` runs here with the kubeconfig of a service account; the Deployment is reached through a port-forward, with tokens. With
PERSIST_SCREENSHOTS=FOLDER the pages are left there as pictures.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sink_manifests import airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

NAMESPACE, SYSTEM = "persist-e2e", "persist-system"
SCREENSHOTS = os.environ.get("PERSIST_SCREENSHOTS")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
CUT = "[...document.querySelectorAll('svg text')].filter((one) => one.getBBox().x < 0).map((one) => one.textContent)"
WAITING = {
    "compaction": {"maxUncompactedBatches": 2},
    "maintenance": {"approval": "Required"},
    "gc": {"enabled": False},
    "rollup": {"everySeqnos": 1000},
}


@pytest.fixture
def account(cluster: Any) -> Iterator[Callable[..., str]]:
    """Makes a service account that has this ClusterRole in the namespace of the tests; without one it may do nothing."""
    made: list[str] = []

    def make(role: str = "") -> str:
        name = f"{role or 'stranger'}-{uuid.uuid4().hex[:6]}"
        made.append(name)
        cluster.kubectl("create", "serviceaccount", name)
        if role:
            cluster.kubectl(
                "create", "rolebinding", name, f"--clusterrole={role}", f"--serviceaccount={NAMESPACE}:{name}"
            )
        return name

    yield make
    cluster.delete("rolebinding", *made)
    cluster.delete("serviceaccount", *made)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: `bash .ci/tools.sh chromium` installs one")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def own_console(cluster: Any, account: str, folder: Path) -> Iterator[str]:
    """The URL of `persist ui` with the rights of a service account."""
    (folder / account).write_text(cluster.kubeconfig_of(account))
    command = [sys.executable, "-m", "persist_engine.cli", "ui", "--namespace", NAMESPACE, "--port", "0"]
    environ = {**cluster.environment, "KUBECONFIG": str(folder / account), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            assert "http://127.0.0.1:" in said, said
            yield next(word for word in said.split() if word.startswith("http://")).rstrip("/")
        finally:
            server.send_signal(signal.SIGTERM)
            _, errors = server.communicate(timeout=30)
    assert "Traceback" not in errors, errors


@contextlib.contextmanager
def opened(chromium: Any, **options: Any) -> Iterator[Any]:
    """A page whose complaints fail the test."""
    problems: list[str] = []
    context = chromium.new_context(viewport={"width": 1240, "height": 900}, **options)
    page = context.new_page()
    page.on("console", lambda message: message.type in {"error", "warning"} and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        yield page
    finally:
        context.close()
    assert [one for one in problems if "status of 40" not in one] == []


def look(page: Any, url: str, name: str) -> str:
    """Opens a page, which has one heading, does not scroll sideways and cuts no label of a picture. Returns its text."""
    page.goto(url)
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png", full_page=True)
    assert page.locator("h1").count() == 1, name
    assert page.evaluate("document.documentElement.scrollWidth") <= 1240, name
    assert page.evaluate(CUT) == [], name
    return str(page.inner_text("main"))


def compactions(cluster: Any, shard: str) -> list[str]:
    history = cluster.status("persistshard", shard).get("history", [])
    return [run["outcome"] for run in history if run["type"] == "Compaction"]


def test_a_click_on_the_page_starts_the_run_for_a_user_who_may_patch_and_for_no_other(
    cluster: Any,
    programs: Any,
    account: Callable[..., str],
    new_shard: Callable[..., tuple[str, str]],
    chromium: Any,
    tmp_path: Path,
) -> None:
    shard, shard_id = new_shard("page", **WAITING)
    programs.result("write_batches", shard_id, "12", "50")
    before = programs.result("content", shard_id)
    cluster.wait_condition("persistshard", shard, "CompactionCurrent", "False", reason="AwaitingApproval", timeout_s=90)
    plan = cluster.status("persistshard", shard)["plan"]["id"]
    path = f"/shards/{NAMESPACE}/{shard}"

    with own_console(cluster, account("view"), tmp_path) as url, opened(chromium) as page:
        assert plan in look(page, url + path, "plan-may-not-patch")
        assert page.get_by_role("button", name="Approve").count() == 0
        assert "patch persistshards.persistshard.io" in page.inner_text("main")
    assert compactions(cluster, shard) == []

    with own_console(cluster, account("edit"), tmp_path) as url, opened(chromium) as page:
        assert plan in look(page, url + path, "plan-may-patch")
        page.get_by_role("button", name="Approve").click()
        page.wait_for_url(f"**{path}")
        cluster.wait("the compaction", lambda: compactions(cluster, shard), timeout_s=300)
        assert "Compaction" in look(page, url + path, "plan-has-run")
    assert compactions(cluster, shard) == ["Succeeded"]
    assert programs.result("content", shard_id)["hash"] == before["hash"]


def test_every_page_of_the_deployment_and_no_approval_there(
    cluster: Any,
    programs: Any,
    account: Callable[..., str],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    chromium: Any,
) -> None:
    """The Deployment reads with its own account, which may patch nothing, for each viewer."""
    shard, shard_id = new_shard("shown", key="carrier STRING", value="name STRING", **WAITING)
    held = programs.result("hold", shard_id, "weekly report <b>of June</b>")["reader"]
    sink = named("shown")
    cluster.apply(airlines_sink(sink, shard))
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)

    def blocks() -> bool:
        holds = cluster.status("persistshard", shard).get("holds", {})
        return any(one["id"] == held for one in holds.get("blocking", []))

    cluster.wait("the hold to be on the status", blocks, timeout_s=120)
    token = cluster.kubectl("create", "token", account("edit")).strip()
    with cluster.forwarded("service/persist-operator-console", 8787, SYSTEM) as port:
        url = f"http://127.0.0.1:{port}"
        for scheme in ("light", "dark"):
            with opened(chromium, color_scheme=scheme, extra_http_headers={"Authorization": f"Bearer {token}"}) as page:
                assert shard in look(page, url, f"fleet-{scheme}")
                assert "weekly report <b>of June</b>" in look(page, f"{url}/holds", f"holds-{scheme}")
                shown = look(page, f"{url}/shards/{NAMESPACE}/{shard}", f"shard-{scheme}")
                assert shard_id in shown
                assert held in shown
                assert "Completed" in look(page, f"{url}/sinks/{NAMESPACE}/{sink}", f"sink-{scheme}")
                assert page.get_by_role("button", name="Approve").count() == 0
                look(page, f"{url}/nothing", f"no-page-{scheme}")
                elsewhere = look(page, f"{url}/shards/persist-e2e-other/{shard}", f"no-right-{scheme}")
                assert "get persistshards.persistshard.io in namespace persist-e2e-other" in elsewhere


def fetched(port: int, path: str, token: str = "") -> tuple[int, str]:
    """The code and the page."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_console_shows_each_viewer_what_the_viewer_may_see(
    cluster: Any, account: Callable[..., str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("console")
    viewer, stranger = (cluster.kubectl("create", "token", account(role)).strip() for role in ("view", ""))
    path = f"/shards/{NAMESPACE}/{shard}"
    with cluster.forwarded("service/persist-operator-console", 8787, SYSTEM) as port:
        assert fetched(port, "/")[0] == 401
        assert fetched(port, "/", "x" * 20)[0] == 401
        code, text = fetched(port, path, stranger)
        assert (code, shard_id in text) == (403, False)
        assert "get persistshards.persistshard.io" in text
        code, text = fetched(port, "/", viewer)
        assert (code, shard in text) == (200, True)
        code, text = fetched(port, path, viewer)
        assert (code, shard_id in text) == (200, True)
        assert fetched(port, f"/shards/persist-e2e-other/{shard}", viewer)[0] == 403
