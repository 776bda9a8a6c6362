"""The cluster's source over HTTP: the rights of the kubeconfig's user, and of users that a request names."""

import importlib.util
import sys
from pathlib import Path

import pytest
from persist_engine.base.env import SeededEnv
from persist_operator.api.shard import StoreLocation
from persist_operator.cluster.kube import load_client
from persist_operator.cluster.port import EVENT, PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.cluster.user import load_access
from persist_operator.cluster.viewing import ViewedCluster
from persist_operator.console.cluster_source import ClusterSource
from persist_operator.console.engine import reading_bridge
from persist_operator.console.entrance import ReviewedEntrance, TrustedProxy
from persist_operator.console.port import APPROVE, Viewer
from persist_operator.console.rights import OwnRights, ReviewedRights, reading

SHARDS, SINKS = "persistshards", "sparksinks"
PAGE = "/shards/team/flights"


def _reviewing():
    spec = importlib.util.spec_from_file_location("reviewing", Path(__file__).with_name("reviewing.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server():
    made = _reviewing().ReviewingServer()
    yield made
    made.stop()


@pytest.fixture
def filled(server, shard_resource, sink_resource):
    """Two namespaces: `team` with a shard that has a plan, a sink, a driver and an event, and `other` with a shard."""
    plan = {"id": "compact-9", "type": "Compaction", "reason": "TooManyBatches", "approved": False}
    upkeep = {"compaction": {"jobName": "flights-compact-9"}, "gc": {"jobName": "gc-1", "settledJob": "gc-1"}}
    status = {"shardId": "s1", "plan": plan, "maintenance": upkeep, "frontiers": {"since": "1", "upper": "9"}}
    server.cluster.create(PERSIST_SHARD, shard_resource(status=status, labels={}))
    server.cluster.create(PERSIST_SHARD, shard_resource(name="quiet", uid="uid-other", namespace="other"))
    server.cluster.create(SPARK_SINK, sink_resource(status={"driver": {"podName": "load-1"}}))
    containers = [{"name": "istio-proxy"}, {"name": "driver"}]  # as admission adds one
    server.cluster.create(
        POD, {"metadata": {"namespace": "team", "name": "load-1"}, "spec": {"containers": containers}}
    )
    event = {
        "reason": "CompactionStarted",
        "message": "a Job started",
        "type": "Normal",
        "count": 3,
        "lastTimestamp": "2026-09-20T00:00:00Z",
    }
    about = {"involvedObject": {"uid": "uid-shard"}, "metadata": {"namespace": "team", "name": "e1"}}
    server.cluster.create(EVENT, {**event, **about})
    return server


@pytest.fixture
def mine(filled, kubeconfig, browser):
    """A browser of `persist ui` with this kubeconfig."""

    def make(*namespaces, stores=None, **options):
        access = load_access(None, None)
        cluster = ViewedCluster(access.client)
        source = ClusterSource(
            cluster, OwnRights(cluster), title=f"context {access.context}", namespaces=namespaces, stores=stores
        )
        return browser(source, **options)

    return make


@pytest.fixture
def shared(filled, kubeconfig, browser):
    """A browser of a console in the cluster. The console's own user may do what the chart grants."""
    filled.tokens |= {"alices": "alice", "bobs": "bob"}
    filled.rights |= {
        ("alice", "list", SHARDS, "team"),
        ("alice", "get", SHARDS, "team"),
        ("alice", "list", SINKS, "team"),
    }

    def make(*namespaces, proxy=None, **options):
        cluster, env = ViewedCluster(load_client()), SeededEnv(3)
        source = ClusterSource(cluster, ReviewedRights(cluster, env), title="this cluster", namespaces=namespaces)
        return browser(source, entrance=ReviewedEntrance(cluster, env, proxy), **options)

    return make


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_the_pages_show_the_resources_events_logs_and_runs(mine):
    client = mine()
    fleet = client.get("/").text
    assert 'href="/shards/team/flights"' in fleet
    assert 'href="/shards/other/quiet"' in fleet
    assert 'href="/sinks/team/load"' in fleet
    page = client.get(PAGE).text
    assert "a Job started" in page
    assert "flights-compact-9" in page
    assert "gc-1" not in page
    assert "context c" in page
    assert "PERSIST_BLOB" in page, "the page says why there is no spine"
    assert "one\ntwo" in client.get("/sinks/team/load").text
    assert client.get("/holds").status_code == 200


def test_of_many_events_the_newest_are_shown(filled, mine):
    """The API server gives them in the order of their names."""
    for number in range(60):
        event = {
            "reason": "Looked",
            "message": f"look {number}",
            "lastTimestamp": f"2026-09-20T01:{59 - number:02}:00Z",
        }
        head = {"namespace": "team", "name": f"flights.{99 - number}"}
        filled.cluster.create(EVENT, {**event, "involvedObject": {"uid": "uid-shard"}, "metadata": head})
    page = mine().get(PAGE).text
    assert "look 0<" in page
    assert "look 59<" not in page
    assert page.count("Looked") == 50


def test_only_the_namespaces_that_were_asked_for_are_shown(mine):
    client = mine("other")
    assert "flights" not in client.get("/").text
    assert client.get(PAGE).status_code == 404
    assert client.get("/shards/other/quiet").status_code == 200


@pytest.mark.parametrize(
    ("rights", "path", "status", "missing"),
    [
        (set(), "/", 403, "list persistshards.persistshard.io in all namespaces"),
        ({("me", "list", SHARDS, "")}, "/", 403, "list sparksinks.persistshard.io in all namespaces"),
        ({("me", "list", None, None)}, PAGE, 403, "get persistshards.persistshard.io in namespace team"),
        ({("me", "list", None, None)}, "/sinks/team/load", 403, "get sparksinks.persistshard.io in namespace team"),
        ({("me", "get", SHARDS, "team"), ("me", "list", SINKS, "")}, PAGE, 200, "list events in namespace team"),
        (
            {("me", "get", SHARDS, "team"), ("me", "list", "events", "team")},
            PAGE,
            200,
            "patch persistshards.persistshard.io in namespace team",
        ),
        ({("me", "get", SINKS, "team")}, "/sinks/team/load", 200, "get pods/log in namespace team"),
    ],
)
def test_a_page_says_which_right_is_missing(filled, mine, rights, path, status, missing):
    filled.rights = rights
    answer = mine().get(path)
    assert answer.status_code == status
    assert missing in answer.text


@pytest.mark.parametrize("whose", ["mine", "shared"])
def test_the_page_of_a_shard_names_its_sinks_with_the_right_to_those_of_its_namespace(filled, mine, shared, whose):
    if whose == "mine":
        filled.rights = {("me", "get", SHARDS, "team"), ("me", "list", SINKS, "team")}
    client = mine() if whose == "mine" else shared()
    page = client.get(PAGE, headers={} if whose == "mine" else bearer("alices"))
    assert 'href="/sinks/team/load"' in page.text
    assert [path for path in filled.sent("GET") if path.endswith(SINKS)] == [
        "/apis/persistshard.io/v1alpha1/namespaces/team/sparksinks"
    ]


def approve(client, form=None):
    page = client.get(PAGE).text
    token = page.partition('name="token" value="')[2].partition('"')[0]
    return client.post(
        f"{PAGE}/approve",
        data={"plan": "compact-9", "token": token, **(form or {})},
        headers={"Origin": "http://127.0.0.1:8787"},
    )


def annotation(server):
    return server.cluster.get(PERSIST_SHARD, "team", "flights")["metadata"].get("annotations", {}).get(APPROVE)


def test_a_plan_is_approved_with_the_right_to_patch(filled, mine):
    client = mine()
    assert "Approve</button>" in client.get(PAGE).text
    assert approve(client).status_code == 303
    assert annotation(filled) == "compact-9"


def test_a_plan_that_changed_is_not_approved(filled, mine):
    answer = approve(mine(), {"plan": "compact-8"})
    assert answer.status_code == 409
    assert "look at its page again" in answer.text
    assert annotation(filled) is None


def test_without_the_right_to_patch_no_page_offers_an_approval_and_none_is_made(filled, mine):
    filled.rights = {("me", verb, None, None) for verb in ("get", "list")}
    client = mine()
    assert "Approve</button>" not in client.get(PAGE).text
    with_right = mine()
    filled.rights = {("me", None, None, None)}
    with_right.get(PAGE)
    page = with_right.get(PAGE).text
    token = page.partition('name="token" value="')[2].partition('"')[0]
    filled.rights = {("me", verb, None, None) for verb in ("get", "list")}
    answer = with_right.post(
        f"{PAGE}/approve", data={"plan": "compact-9", "token": token}, headers={"Origin": "http://127.0.0.1:8787"}
    )
    assert answer.status_code == 403
    assert "patch persistshards.persistshard.io in namespace team" in answer.text
    assert annotation(filled) is None


@pytest.mark.parametrize(("breaks", "text"), [("tokens", "log in again"), ("server", "did not answer")])
def test_an_api_server_that_does_not_answer_is_said_to(filled, mine, breaks, text):
    client = mine()
    if breaks == "tokens":
        filled.tokens = {}
    else:
        filled.is_broken = True
    answer = client.get("/")
    assert answer.status_code == 502
    assert text in answer.text


def test_stores_of_the_process_are_read_and_stores_of_a_resource_never(filled, mine, filled_laptop, shard_resource):
    env = SeededEnv(1)
    place = StoreLocation(blob=filled_laptop.location.blob, consensus=filled_laptop.location.consensus)
    stored = {
        "shardId": str(filled_laptop.shard_id),
        "store": {"blob": "s3://evil", "consensus": "redis://evil:6379/0"},
    }
    filled.cluster.create(PERSIST_SHARD, shard_resource(name="stored", uid="uid-stored", status=stored))
    with reading_bridge(env, "") as bridge:
        client = mine(stores=(bridge, place))
        page = client.get("/shards/team/stored").text
        assert "spine batch" in page
        assert "weekly report" in page
        assert "has no shard yet" in client.get("/shards/other/quiet").text


def test_a_shared_console_knows_nobody_without_a_token(filled, shared):
    answer = shared().get("/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert shared().get("/", headers=bearer("wrong")).status_code == 401
    assert shared().get("/", headers={"Authorization": "Basic YTpi"}).status_code == 401
    assert shared().get("/healthz", headers={"Host": "10.1.2.3:8080"}).status_code == 200
    assert "flights" not in answer.text


def test_a_shared_console_shows_each_user_what_the_user_may_see(filled, shared):
    client = shared()
    fleet = client.get("/", headers=bearer("alices")).text
    assert "flights" in fleet
    assert "quiet" not in fleet
    assert client.get(PAGE, headers=bearer("alices")).status_code == 200
    hidden = client.get("/shards/other/quiet", headers=bearer("alices"))
    assert hidden.status_code == 403
    assert "get persistshards.persistshard.io in namespace other" in hidden.text
    nothing = client.get("/", headers=bearer("bobs"))
    assert nothing.status_code == 403
    assert "team" not in nothing.text, "a viewer without rights does not learn the names of namespaces"
    assert "You lack the right: list events in namespace team." in client.get(PAGE, headers=bearer("alices")).text
    assert "You lack the right: get pods/log" in sink_page(filled, client)


def sink_page(server, client):
    server.rights |= {("alice", "get", SINKS, "team")}
    return client.get("/sinks/team/load", headers=bearer("alices")).text


def test_a_shared_console_of_some_namespaces_shows_those_that_a_user_may_see(filled, shared):
    client = shared("team", "other")
    assert "quiet" not in client.get("/", headers=bearer("alices")).text
    filled.rights |= {("bob", "list", None, "")}
    both = shared("team", "other").get("/", headers=bearer("bobs")).text
    assert "quiet" in both
    assert "flights" in both


def test_an_api_server_that_reviews_nothing_lets_nobody_in(filled, shared):
    client = shared()
    filled.is_broken = True
    assert client.get("/", headers=bearer("alices")).status_code == 502


def test_a_token_that_is_not_authenticated_has_no_user(filled, shared):
    filled.review = lambda user, body: {"authenticated": False, "user": {"username": "me"}, "allowed": True}
    assert shared().get("/", headers=bearer("expired")).status_code == 401


def test_a_right_that_is_not_reviewed_is_none(filled, shared):
    """The token is remembered; the review of the right gets no answer."""
    client = shared()
    assert client.get("/", headers=bearer("alices")).status_code == 200
    filled.is_broken = True
    answer = client.get("/shards/other/quiet", headers=bearer("alices"))
    assert answer.status_code == 403
    assert "get persistshards.persistshard.io in namespace other" in answer.text


def test_answers_about_tokens_and_rights_are_remembered_for_a_while(filled, shared):
    client = shared()
    assert client.get(PAGE, headers=bearer("alices")).status_code == 200
    asked = len(filled.sent("POST"))
    assert asked > 1
    assert client.get(PAGE, headers=bearer("alices")).status_code == 200
    assert len(filled.sent("POST")) == asked


@pytest.mark.parametrize(
    ("peer", "headers", "status"),
    [
        ("10.0.0.9", {"X-User": "alice"}, 200),
        ("10.0.0.9", {"X-User": "bob"}, 403),
        ("10.0.0.9", {"X-User": "bob", "X-Groups": "admins, readers"}, 200),
        ("10.0.0.9", [("X-User", "bob"), ("X-Groups", "system:masters"), ("X-Groups", "")], 401),
        ("10.0.0.9", {"X-User": "bob", "X-Groups": "system:masters"}, 403),
        ("10.0.0.9", [("X-User", "alice"), ("X-User", "bob")], 401),
        ("10.0.0.9", {"X-User": "system:admin"}, 401),
        ("10.0.0.9", {}, 401),
        ("192.168.0.9", {"X-User": "alice"}, 401),
        ("127.0.0.1", {"X-User": "alice"}, 401),
    ],
    ids=str,
)
def test_headers_of_a_proxy_count_only_from_the_proxy(filled, shared, peer, headers, status):
    proxy = TrustedProxy.of(["10.0.0.0/8"], "X-User", "X-Groups")
    groups = filled.review

    def review(user, body):
        if {"readers", "system:masters"} & set(body["spec"].get("groups", ())):
            return {"allowed": True}
        return groups(user, body)

    filled.review = review
    answer = shared(proxy=proxy, client=(peer, 1234)).get("/", headers=headers)
    assert answer.status_code == status


def test_a_shared_console_passes_on_groups_and_extras(filled, kubeconfig):
    cluster = ViewedCluster(load_client())
    seen = []
    filled.review = lambda user, body: seen.append(body["spec"]) or {"allowed": True}
    viewer = Viewer(name="alice", uid="u1", groups=("g",), extra=(("scopes", ("a",)),))
    assert ReviewedRights(cluster, SeededEnv(1)).has(viewer, reading("PersistShard", "get", "team"))
    assert seen == [
        {
            "user": "alice",
            "uid": "u1",
            "groups": ["g"],
            "extra": {"scopes": ["a"]},
            "resourceAttributes": {
                "verb": "get",
                "group": "persistshard.io",
                "resource": "persistshards",
                "namespace": "team",
            },
        }
    ]


@pytest.mark.parametrize(
    "path", ["/shards/team/%2e%2e", "/shards/%2e%2e/flights", "/sinks/team/%2e", "/shards/../flights"]
)
def test_a_name_of_dots_leads_to_nothing_else(filled, mine, path):
    assert mine().get(path).status_code == 404
    assert not [
        one for one in filled.sent("GET") if ".." in one or one.rstrip("/").endswith(("/team", "/persistshards", "/."))
    ]


def test_a_token_is_on_no_page(filled, shared):
    for path in ("/", PAGE, "/holds"):
        assert "alices" not in shared().get(path, headers=bearer("alices")).text
