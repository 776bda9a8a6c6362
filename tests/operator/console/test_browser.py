"""The pages in a real Chromium, served by `persist local ui` as a process. Skipped where there is no Chromium."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PAGES = ["", "holds", "shards/local/orders", "sinks/local/load", "nothing"]
#: The least contrast of text of this size by WCAG 2.2, AA.
CONTRAST_MIN = 4.5
#: Texts of a page with too little contrast to what is behind them.
FAINT = """(least) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.fillStyle = "#fff"; canvas.fillRect(0, 0, 1, 1);
    for (const one of colours) { canvas.fillStyle = one; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => { const found = []; for (let at = one; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor); return found; };
  const faint = [];
  for (const one of document.querySelectorAll("body *:not(svg *)")) {
    const has = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!has || !one.checkVisibility()) continue;
    const back = behind(one), [a, b] = [light(over([...back, getComputedStyle(one).color])), light(over(back))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least) faint.push(`${one.tagName}.${one.className} ${one.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return faint;
}"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: `bash .ci/tools.sh chromium` installs one"),
]


@contextlib.contextmanager
def serving(laptop):
    """The URL of a console over the laptop's folder, by the command."""
    command = [sys.executable, "-m", "persist_engine.cli", "local", "ui", "--state", str(laptop.state), "--port", "0"]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as server:
        try:
            said = server.stdout.readline()
            assert "http://127.0.0.1:" in said, said + server.stderr.read()
            yield next(word for word in said.split() if word.startswith("http://"))
        finally:
            server.send_signal(signal.SIGTERM)
            _, errors = server.communicate(timeout=30)
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def served(filled_laptop):
    filled_laptop.plan()
    with serving(filled_laptop) as url:
        yield url


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, served):
    """Makes a page, whose complaints and requests to other hosts fail the test."""
    problems, contexts = [], []

    def make(**options):
        context = chromium.new_context(viewport={"width": 1240, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: message.type in {"error", "warning"} and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: request.url.startswith(served) or problems.append(request.url))
        return page

    yield make
    for context in contexts:
        context.close()
    assert [one for one in problems if "404" not in one] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_legible_in_both_schemes_and_need_nothing_else(opened, served, scheme):
    page, grounds = opened(color_scheme=scheme), set()
    for path in PAGES:
        page.goto(served + path)
        assert page.locator("h1").count() == 1
        assert page.evaluate(FAINT, CONTRAST_MIN) == [], path
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 1
    assert (grounds == {"rgb(17, 19, 23)"}) == (scheme == "dark")


def test_a_narrow_screen_scrolls_tables_and_not_the_page(opened, served):
    page = opened()
    page.set_viewport_size({"width": 390, "height": 800})
    for path in PAGES:
        page.goto(served + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_the_keyboard_reaches_the_content_the_filter_and_the_rows(opened, served):
    page = opened()
    page.goto(served)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("nowhere")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?q=nowhere**")
    assert "No shard matches the filter" in page.inner_text("main")


def test_a_reader_of_the_screen_gets_pictures_as_sentences(opened, served):
    page = opened()
    page.goto(f"{served}shards/local/orders")
    tree = page.locator("main").aria_snapshot()
    assert 'img "The spine of orders' in tree
    assert 'img "The frontiers of orders' in tree
    assert 'table "Versions in the log, newest first"' in tree
    assert 'heading "orders PersistShard Ready Healthy" [level=1]' in tree


def test_without_script_the_pages_filter_sort_and_show_tables(opened, served):
    page = opened(java_script_enabled=False)
    page.goto(served)
    assert not page.locator(".live").is_visible()
    page.get_by_role("link", name="Bytes").click()
    assert page.url.endswith("/?shards=-bytes")
    page.get_by_role("searchbox").fill("orders")
    page.get_by_role("button", name="Apply").click()
    assert "q=orders" in page.url
    assert "shards=-bytes" in page.url
    page.get_by_role("link", name="orders").first.click()
    page.get_by_text("Batches as a table").click()
    assert page.get_by_role("columnheader", name="Hollow batches").is_visible()


def test_live_brings_a_new_state_without_a_reload(opened, served, filled_laptop):
    page = opened()
    page.clock.install()
    page.goto(f"{served}shards/local/orders")
    page.evaluate("window.isSame = true")
    page.get_by_label("Live").check()
    page.evaluate("document.activeElement.blur()")
    status = filled_laptop.objects.get("PersistShard", "orders")["status"]
    changed = [{**status["conditions"][0], "reason": "CompactionRunning"}]
    filled_laptop.objects.set_status("PersistShard", "orders", {**status, "conditions": changed})
    page.clock.run_for(6000)
    page.get_by_role("heading", level=1).get_by_text("CompactionRunning").wait_for()
    assert page.evaluate("window.isSame")
    filled_laptop.objects.set_status("PersistShard", "orders", status)


def test_live_shows_that_a_shard_is_gone_and_that_the_console_does_not_answer(chromium, served, filled_laptop):
    filled_laptop.apply("PersistShard", "passing", {"schema": {"key": "id BIGINT"}}, {})
    with chromium.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.goto(f"{served}shards/local/passing")
        page.get_by_label("Live").check()
        page.evaluate("document.activeElement.blur()")
        filled_laptop.objects.remove("PersistShard", "passing")
        page.clock.run_for(6000)
        page.get_by_text("There is no PersistShard local/passing.").wait_for()
        assert page.title() == "Not found · persist"
        context.set_offline(True)
        page.clock.run_for(6000)
        page.get_by_text("what you see is old").wait_for()
        context.set_offline(False)
        page.goto(f"{served}shards/local/orders")
        assert not page.get_by_text("what you see is old").is_visible()


def test_a_click_approves_the_plan(opened, served, filled_laptop):
    filled_laptop.plan()
    page = opened()
    page.goto(f"{served}shards/local/orders")
    page.get_by_role("button", name="Approve").click()
    page.wait_for_url("**/shards/local/orders")
    assert filled_laptop.approved() == "compact-9"


def test_ids_of_holds_stay_legible_on_a_narrow_screen(opened, served):
    page = opened()
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{served}holds")
    assert "the newest 7 days" in page.inner_text("main")
    rows = page.locator("tbody tr")
    assert rows.count() == 2
    assert all(rows.nth(index).bounding_box()["height"] < 100 for index in range(2))
    assert page.locator("tbody th .ns").first.inner_text() == "local"
