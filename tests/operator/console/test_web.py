"""The pages over HTTP: a laptop's source with real stores, headers, forms, errors, hostile values."""

import re

import pytest
from persist_kit.command_line import persist
from persist_operator.console.guard import Hosts, host_name
from persist_operator.console.port import EngineView, Forbidden, Right, Unseen

PAGES = ["/", "/holds", "/shards/local/orders", "/sinks/local/load"]
HOME = "http://127.0.0.1:8787"


@pytest.fixture
def pages(filled_laptop, browser):
    source = filled_laptop.source()
    yield browser(source)
    source.close()


def token_of(text):
    return re.search(r'name="token" value="([0-9a-f]+)"', text)[1]


@pytest.mark.parametrize("path", [*PAGES, "/nothing", "/static/console.css"])
def test_every_answer_has_the_headers(pages, path):
    answer = pages.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_no_other_host_and_no_inline_style_or_script(pages, path):
    text = pages.get(path).text
    assert not re.findall(r"(?:src|href|action)=\"(?:https?:)?//", text)
    assert "style=" not in text
    assert not re.search(r"<script(?! src=\"/static/)", text)
    assert not re.search(r"\son\w+=", text)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_can_be_used_without_seeing_it(pages, path):
    text = pages.get(path).text
    assert text.count("<h1") == 1
    assert '<html lang="en">' in text
    assert all(landmark in text for landmark in ("<main", "<nav", "<header", 'class="skip"'))
    assert text.count("<table") == text.count("<caption")
    assert "<th>" not in text
    assert text.count('role="img"') == len(re.findall(r"<desc id=", text))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8787", 200),
        ("localhost", 200),
        ("[::1]:8787", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8787", 421),
        ("10.0.0.7", 421),
        ("", 421),
    ],
)
def test_the_host_must_be_the_consoles(pages, host, status):
    assert pages.get("/", headers={"Host": host}).status_code == status


def test_a_name_can_be_allowed(filled_laptop, browser):
    named = browser(filled_laptop.source(), hosts=["console.example"])
    assert named.get("/", headers={"Host": "Console.Example:443"}).status_code == 200
    assert not Hosts.of(["console.example"], loopback=False).allows("localhost")
    assert host_name("[::1]:80") == "::1"


def test_the_page_of_a_shard_draws_its_spine_and_shows_its_versions(pages):
    text = pages.get("/shards/local/orders").text
    assert 'class="box' in text
    assert "level 0" in text or "level " in text
    assert "weekly report" in text
    assert re.search(r"spine batch(es)? in", text)
    assert "1 schema" in text
    assert "12.3 kB" in text
    assert 'href="/sinks/local/load"' in text


def test_a_look_at_a_shard_changes_nothing_in_it(laptop, browser):
    source, before = laptop.source(), laptop.seqno()
    for path in PAGES:
        assert browser(source).get(path).status_code == 200
    source.close()
    assert laptop.seqno() == before


def test_the_engine_view_is_what_the_stores_hold(filled_laptop):
    source = filled_laptop.source()
    seen = source.engine(filled_laptop.objects.get("PersistShard", "orders"))
    source.close()
    assert isinstance(seen, EngineView)
    assert sum(row["rows"] for row in seen.batches) == 40
    assert {row["purpose"] for row in seen.holds} >= {"weekly report"}
    assert [row["seqno"] for row in seen.versions] == sorted(row["seqno"] for row in seen.versions)


def test_new_stores_under_the_same_folder_are_read_anew(laptop):
    source, shard = laptop.source(), laptop.objects.get("PersistShard", "orders")
    assert isinstance(source.engine(shard), EngineView)
    persist("local", "down", "--purge", "--state", str(laptop.state))
    gone = source.engine(shard)
    assert isinstance(gone, Unseen)
    assert not (laptop.state / "store").exists(), "a look creates no store"
    laptop.fill()
    assert isinstance(source.engine(shard), EngineView)
    source.close()


def test_a_body_without_a_length_is_refused(pages):
    """A sender that does not say how much comes could go on for ever."""
    answer = pages.post("/shards/local/orders/approve", content=iter([b"plan=x"]), headers={"Origin": HOME})
    assert answer.request.headers["transfer-encoding"] == "chunked"
    assert answer.status_code == 413


def approve(client, path, **changes):
    text = client.get("/shards/local/orders").text
    form = {"plan": "compact-9", "token": token_of(text), **changes.pop("form", {})}
    headers = {"Origin": HOME, **changes.pop("headers", {})}
    return client.post(path, data=form, headers={name: value for name, value in headers.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 303),
        ({"headers": {"Sec-Fetch-Site": "same-origin"}}, 303),
        ({"headers": {"Origin": "http://evil.example"}}, 403),
        ({"headers": {"Origin": "null"}}, 403),
        ({"headers": {"Origin": None}}, 403),
        ({"headers": {"Sec-Fetch-Site": "cross-site"}}, 403),
        ({"headers": {"Host": "evil.example"}}, 421),
        ({"form": {"token": "0" * 64}}, 403),
        ({"form": {"token": "ü"}}, 403),
        ({"form": {"token": ""}}, 403),
        ({"form": {"plan": ""}}, 400),
        ({"form": {"plan": "compact-8"}}, 409),
        ({"form": {"plan": "x" * 5000}}, 413),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_plan_is_approved_by_the_form_of_its_page_only(filled_laptop, browser, changes, status):
    filled_laptop.plan()
    source = filled_laptop.source()
    answer = approve(browser(source), "/shards/local/orders/approve", **changes)
    source.close()
    assert answer.status_code == status
    assert filled_laptop.approved() == ("compact-9" if status == 303 else "")
    if status == 303:
        assert answer.headers["location"] == "/shards/local/orders"


def test_the_token_of_one_browser_is_no_token_of_another(filled_laptop, browser):
    filled_laptop.plan()
    source = filled_laptop.source()
    client = browser(source)
    stolen = token_of(client.get("/shards/local/orders").text)
    client.cookies.clear()
    client.cookies.set("persist-console", "ab" * 16)
    assert approve(client, "/shards/local/orders/approve").status_code == 303
    filled_laptop.plan()
    assert approve(client, "/shards/local/orders/approve", form={"token": stolen}).status_code == 403
    source.close()
    assert filled_laptop.approved() == ""


def test_the_cookie_is_for_this_server_only(pages):
    cookie = pages.get("/").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


@pytest.mark.parametrize(
    "path",
    [
        "/shards/local/absent",
        "/shards/other/orders",
        "/shards/local/..%2Fx",
        "/shards/local/%2e%2e",
        "/static/../web.py",
    ],
)
def test_what_does_not_exist_is_not_found(pages, path):
    assert pages.get(path).status_code == 404


def test_hostile_values_are_text_on_every_page(laptop, browser, hostile):
    status = laptop.objects.get("PersistShard", "orders")["status"]
    conditions = [{"type": hostile, "status": hostile, "reason": hostile, "message": hostile}]
    conditions += [{"type": "Ready", "status": "False", "reason": hostile, "message": hostile}]
    run = {"id": hostile, "type": hostile, "outcome": hostile, "message": hostile, "reason": hostile}
    held = [{"id": hostile, "purpose": hostile, "kind": hostile, "host": hostile, "since": hostile}]
    laptop.objects.set_status(
        "PersistShard",
        "orders",
        {
            **status,
            "shardId": hostile,
            "store": {"blob": hostile, "consensus": hostile},
            "schema": {"key": hostile, "value": hostile},
            "conditions": conditions,
            "history": [run],
            "holds": {"readers": 1, "blocking": held},
            "maintenance": {hostile: {"lastResult": hostile, "lastReason": hostile}},
            "plan": {"id": hostile, "type": hostile, "reason": hostile, "runner": hostile},
        },
    )
    failure = {"class": hostile, "reason": hostile, "message": hostile, "podName": hostile}
    laptop.objects.set_status(
        "SparkSink",
        "load",
        {
            "conditions": conditions,
            "lastFailure": failure,
            "history": [{"run": hostile, "message": hostile}],
            "driver": {"podName": hostile},
        },
    )
    source = laptop.source()
    client = browser(source)
    typed = hostile.rstrip("\ud800")  # no address can have it
    for path in [*PAGES, f"/?q={typed}&namespace={typed}&shards={typed}", f"/shards/local/{typed}"]:
        text = client.get(path).text
        assert "<script>" not in text, path
        assert "<img" not in text, path
        assert "onerror=alert(1)>" not in text, path
    source.close()
    assert "&lt;script&gt;" in client.get("/shards/local/orders").text


def test_regression_a_file_that_holds_no_resource_is_named_on_the_page(laptop, browser):
    """It was a bare error 500."""
    (laptop.state / "objects" / "PersistShard" / "orders.json").write_text("{")
    source = laptop.source()
    pages = browser(source)
    for path in ("/", "/shards/local/orders", "/holds"):
        answer = pages.get(path)
        assert answer.status_code == 502
        assert "orders.json holds no resource" in answer.text
    source.close()


def test_marks_that_change_the_order_of_letters_are_on_no_page(laptop, browser):
    status = laptop.objects.get("PersistShard", "orders")["status"]
    found = [{"type": "Ready", "status": "False", "reason": "a\u202eb", "message": "\u2066c<b>\u200f"}]
    laptop.objects.set_status("PersistShard", "orders", {**status, "conditions": found})
    source = laptop.source()
    text = browser(source).get("/shards/local/orders").text
    source.close()
    assert "ab" in text
    assert "c&lt;b&gt;" in text
    assert not {"\u202e", "\u2066", "\u200f"} & set(text)


class Refusing:
    """A source whose viewer may read nothing."""

    title = "a cluster"

    def every(self, kind, viewer, namespace=None):
        raise Forbidden(
            [
                Right(verb="list", group="persistshard.io", resource="persistshards", namespace=None, held=False),
                Right(verb="list", group="persistshard.io", resource="sparksinks", namespace="team", held=True),
            ]
        )


def test_a_page_that_is_not_allowed_says_which_right_is_missing(browser):
    answer = browser(Refusing()).get("/")
    assert answer.status_code == 403
    assert "list persistshards.persistshard.io in all namespaces" in answer.text
    rights = re.findall(r"<code>(.*?)</code>.*?>(yes|no)<", answer.text)
    assert dict(rights) == {
        "list persistshards.persistshard.io in all namespaces": "no",
        "list sparksinks.persistshard.io in namespace team": "yes",
    }
