"""A stub of an API server for thousands of resources: `python -m bench.scale_api PORT`. Holds them in memory as JSON and counts requests.

It lists in pages, watches from a version, applies a status by version, creates, replaces and deletes. It has no kubelet and no admission.
`/stub/...` is for the bench: `POST /stub/seed` makes resources, `GET /stub/counts` gives requests by verb and plural, `GET /stub/ready` the
number of ready shards, `GET /stub/shards` their ids.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, OrderedDict, deque
from typing import Any

from aiohttp import web

#: Names of the served kinds, as (root of the path, plural, kind).
KINDS = (
    ("/apis/persistshard.io/v1alpha1", "persistshards", "PersistShard"),
    ("/apis/persistshard.io/v1alpha1", "sparksinks", "SparkSink"),
    ("/api/v1", "pods", "Pod"),
    ("/api/v1", "events", "Event"),
    ("/api/v1", "configmaps", "ConfigMap"),
    ("/api/v1", "namespaces", "Namespace"),
    ("/apis/batch/v1", "jobs", "Job"),
    ("/apis/coordination.k8s.io/v1", "leases", "Lease"),
)
#: The number of events from which a watch can still start. For an older version it gets 410 Gone.
_HISTORY = 50_000


class Store:
    """The resources of all kinds, and the watches on them."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[str, OrderedDict[tuple[str, str], dict[str, Any]]] = {
            plural: OrderedDict() for _, plural, _ in KINDS
        }
        self.history: deque[tuple[int, str, bytes, dict[str, str]]] = deque(maxlen=_HISTORY)
        #: By plural, so that changes of one kind need no work for watches of another.
        self.watchers: dict[str, set[asyncio.Queue[tuple[bytes, dict[str, str]]]]] = {
            plural: set() for _, plural, _ in KINDS
        }
        self.counts: Counter[str] = Counter()
        #: The ready shards by namespace and name, kept up to date, because the bench asks twice a second.
        self.ready: dict[tuple[str, str], str] = {}

    def put(self, plural: str, one: dict[str, Any], event: str) -> None:
        self.version += 1
        head = one["metadata"]
        head["resourceVersion"] = str(self.version)
        key = (head.get("namespace", ""), head["name"])
        if event == "DELETED":
            self.objects[plural].pop(key, None)
        else:
            self.objects[plural][key] = one
        if plural == "persistshards":
            self._note_ready(key, {} if event == "DELETED" else one)
        line = json.dumps({"type": event, "object": one}).encode() + b"\n"
        labels = head.get("labels") or {}
        self.history.append((self.version, plural, line, labels))
        for queue in self.watchers[plural]:
            queue.put_nowait((line, labels))

    def _note_ready(self, key: tuple[str, str], one: dict[str, Any]) -> None:
        status = one.get("status") or {}
        if any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ())):
            self.ready[key] = status["shardId"]
        else:
            self.ready.pop(key, None)


def application(store: Store) -> web.Application:
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/stub/seed", lambda request: _seed(store, request))
    app.router.add_get("/stub/counts", lambda request: _counts(store, request))
    app.router.add_get("/stub/ready", lambda request: _ready(store, request))
    app.router.add_get("/stub/shards", lambda request: _shards(store, request))
    app.router.add_route("*", "/{path:.*}", lambda request: _answer(store, request))
    return app


async def _seed(store: Store, request: web.Request) -> web.Response:
    for one in await request.json():
        one.setdefault("status", {"observedGeneration": 0})  # as the definition says
        store.put("persistshards", one, "ADDED")
    return web.json_response({})


async def _counts(store: Store, _: web.Request) -> web.Response:
    """Requests by verb and plural."""
    return web.json_response(dict(store.counts))


async def _ready(store: Store, _: web.Request) -> web.Response:
    """How many shards are ready."""
    return web.json_response(len(store.ready))


async def _shards(store: Store, _: web.Request) -> web.Response:
    """Ids of ready shards, by namespace/name."""
    return web.json_response({f"{namespace}/{name}": one for (namespace, name), one in store.ready.items()})


async def _answer(store: Store, request: web.Request) -> web.StreamResponse:
    path = request.path
    found = _discovery(path)
    if found is not None:
        return web.json_response(found)
    root, plural, kind = next(one for one in KINDS if path.startswith(one[0] + "/") and f"/{one[1]}" in path)
    parts = path[len(root) + 1 :].split("/")
    namespace = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else None
    rest = parts[parts.index(plural) + 1 :]
    query = request.query
    verb = _verb(request.method, rest, query)
    store.counts[f"{verb} {plural}"] += 1
    if verb == "watch":
        return await _watch(store, request, plural)
    if verb == "list":
        return _page(store, query, (root, plural, kind), namespace)
    body = await request.json() if request.can_read_body else {}
    if verb == "create":
        key = (namespace or "", body["metadata"]["name"])
        if key in store.objects[plural] and "dryRun" not in query:
            return web.json_response({"message": "exists already"}, status=409)
        if "dryRun" not in query:
            body["metadata"].setdefault("uid", f"uid-{store.version}")
            body["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            store.put(plural, body, "ADDED")
        return web.json_response(body, status=201)
    one = store.objects[plural].get((namespace or "", rest[0]))
    if one is None:
        return web.json_response({"message": "not found"}, status=404)
    if verb in {"patch", "update"}:
        if body["metadata"].get("resourceVersion") != one["metadata"]["resourceVersion"]:
            return web.json_response({"message": "the object has been modified"}, status=409)
        changed = {"status": body["status"]} if verb == "patch" else {"spec": body["spec"]}
        one = {**one, **changed, "metadata": dict(one["metadata"])}
        store.put(plural, one, "MODIFIED")
    if verb == "delete":
        store.put(plural, one, "DELETED")
    return web.json_response(one)


def _verb(method: str, rest: list[str], query: Any) -> str:
    if method == "GET":
        return "get" if rest else ("watch" if query.get("watch") in {"true", "1"} else "list")
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]


def _matches(labels: dict[str, str], query: Any) -> bool:
    wanted = [one.split("=", 1) for one in query.get("labelSelector", "").split(",") if one]
    return all(labels.get(name) == value for name, value in wanted)


def _page(store: Store, query: Any, served: tuple[str, str, str], namespace: str | None) -> web.StreamResponse:
    root, plural, kind = served
    found = [
        one
        for (where, _), one in store.objects[plural].items()
        if namespace in {None, where} and _matches(one["metadata"].get("labels") or {}, query)
    ]
    start, limit = int(query.get("continue", 0)), int(query.get("limit", 100_000))
    head = {"resourceVersion": str(store.version)}
    if start + limit < len(found):
        head["continue"] = str(start + limit)
    version = root.rsplit("/", 2)[-2:] if root.startswith("/apis") else ["v1"]
    return web.json_response(
        {
            "kind": f"{kind}List",
            "apiVersion": "/".join(version),
            "metadata": head,
            "items": found[start : start + limit],
        }
    )


async def _watch(store: Store, request: web.Request, plural: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    queue: asyncio.Queue[tuple[bytes, dict[str, str]]] = asyncio.Queue()
    since = int(request.query.get("resourceVersion") or 0)
    if since:
        for version, of, line, labels in store.history:
            if version > since and of == plural:
                queue.put_nowait((line, labels))
    store.watchers[plural].add(queue)
    try:
        while True:
            line, labels = await queue.get()
            if _matches(labels, request.query):
                await response.write(line)
    except (ConnectionError, asyncio.CancelledError):
        return response
    finally:
        store.watchers[plural].discard(queue)


def _discovery(path: str) -> dict[str, Any] | None:
    groups = sorted({root[len("/apis/") :] for root, _, _ in KINDS if root.startswith("/apis/")})
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = [{"version": one.split("/")[1], "groupVersion": one} for one in groups]
        return {
            "groups": [
                {"name": one["groupVersion"].split("/")[0], "preferredVersion": one, "versions": [one]}
                for one in versions
            ]
        }
    if path == "/version":
        return {"major": "1", "minor": "34"}
    served = [one for one in KINDS if one[0] == path]
    if not served:
        return None
    return {
        "resources": [
            {
                "name": plural,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": True,
                "verbs": ["get", "list", "watch", "patch", "create", "delete"],
            }
            for _, plural, kind in served
        ]
    }


if __name__ == "__main__":
    web.run_app(application(Store()), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
