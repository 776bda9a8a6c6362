"""An HTTP API server over the in-memory cluster, with what the real client and kopf request. Each test has its own, on a free port."""

import contextlib
import functools
import http.server
import json
import threading
from urllib.parse import parse_qs, urlsplit

import yaml
from fake_cluster import FakeCluster
from persist_engine.base.env import SystemEnv
from persist_operator.api import names
from persist_operator.api.schema_check import crd_dir
from persist_operator.cluster.port import BY_KIND, ApiError, Kind

BY_PLURAL = {one.plural: one for one in BY_KIND.values()}


class ApiServer:
    """REST over a FakeCluster: discovery, get, paged lists, watches, create, delete, apply of a status, logs."""

    def __init__(self):
        self.cluster = FakeCluster(now_ms=SystemEnv().now_ms)
        self.requests = []
        self.stopping = threading.Event()
        self.headers = {}
        """Headers of every answer but those of watches."""
        self.refuse_next = []
        """Answers of the next merge patches, one by one, before they do anything."""
        self.is_cutting = False
        """Whether the connection breaks before the end of a log."""
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                url = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                server.requests.append((self.command, url.path, query, dict(self.headers)))
                if query.get("watch") == "true" and not server.is_unserved(url.path):
                    self.stream(url.path, query)
                    return
                code, document = server.answer(self.command, url.path, query, body)
                raw = document if isinstance(document, bytes) else json.dumps(document).encode()
                if server.is_cutting and url.path.endswith("/log"):
                    self.cut(raw)
                    return
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                for name, value in server.headers.items():
                    self.send_header(name, value)
                with contextlib.suppress(OSError):  # the client may have ended
                    self.end_headers()
                    self.wfile.write(raw)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def cut(self, raw):
                """Sends `raw` as the first of several chunks, and no other."""
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
                self.close_connection = True

            def stream(self, path, query):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.end_headers()
                known, kind, namespace, _ = {}, *server.parse(path)
                while not server.stopping.wait(0.02) and kind.plural not in server.cluster.unserved:
                    for one in server.cluster.find(kind, namespace, labels_of(query)):
                        if not has_fields(one, query):
                            continue
                        version, uid = one["metadata"]["resourceVersion"], one["metadata"]["uid"]
                        if known.get(uid) != version:
                            known[uid] = version
                            line = json.dumps({"type": "MODIFIED", "object": one}).encode() + b"\n"
                            try:
                                self.wfile.write(line)
                                self.wfile.flush()
                            except OSError:
                                return
                self.close_connection = True

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()

    def stop(self):
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def parse(self, path):
        parts = path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = None
        if parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        return BY_PLURAL[parts[0]], namespace, parts[1:]

    def is_unserved(self, path):
        """Whether `path` belongs to a kind whose definition is not installed."""
        return any(f"/{plural}" in path for plural in self.cluster.unserved)

    def answer(self, method, path, query, body):
        discovered = discovery(path, self.cluster.unserved)
        if discovered is not None:
            return 200, discovered
        if self.is_unserved(path):
            return 404, {"message": "the server could not find the requested resource"}
        kind, namespace, rest = self.parse(path)
        if method == "POST":
            try:
                if query.get("dryRun") == "All":
                    self.cluster.try_create(kind, body)
                elif not self.cluster.create(kind, body):
                    return 409, {"message": "exists already", "reason": "AlreadyExists"}
            except ApiError as error:
                return error.status, {"message": str(error)}
            return 201, body
        if not rest:
            try:
                return 200, self.page(kind, namespace, query)
            except ApiError as error:
                return error.status, {"message": str(error)}
        try:
            found = self.cluster.get(kind, namespace, rest[0])
        except ApiError as error:
            return error.status, {"message": str(error)}
        if found is None:
            return 404, {"message": "not found"}
        if rest[1:] == ["log"]:
            containers = [one["name"] for one in found.get("spec", {}).get("containers", ())]
            if len(containers) > 1 and query.get("container") not in containers:
                return 400, {"message": f"a container name must be specified, choose one of: {containers}"}
            text = self.cluster.log_texts.get(f"{namespace}/{rest[0]}", "one\ntwo\n")
            lines = text.splitlines(keepends=True)[-int(query.get("tailLines", 1_000_000)) :]
            return 200, "".join(lines).encode()[: int(query.get("limitBytes", 1 << 30))]
        if method == "PATCH" and "finalizers" in body.get("metadata", {}):
            head = body["metadata"]
            try:
                changed = self.cluster.set_finalizers(
                    kind, namespace, rest[0], head["finalizers"], version=head["resourceVersion"]
                )
            except ApiError as error:
                return error.status, {"message": str(error)}
            return 200, changed or {}
        if method == "PATCH" and rest[1:] != ["status"]:
            return self.merge(kind, namespace, rest[0], body)
        if method == "PATCH":
            try:
                self.cluster.apply_status(
                    kind, namespace, rest[0], body["status"], version=body["metadata"]["resourceVersion"]
                )
            except ApiError as error:
                return error.status, {"message": str(error)}
        if method == "PUT" and not self.cluster.replace(kind, body):
            return 409, {"message": "conflict"}
        if method == "DELETE":
            self.cluster.delete(kind, namespace, rest[0])
        return 200, self.cluster.get(kind, namespace, rest[0]) or {}

    def merge(self, kind, namespace, name, change):
        """A JSON merge patch (RFC 7386), which tests may deny as the verb patch."""
        refusal = self.cluster.deny.get(("patch", kind.kind))
        if self.refuse_next:
            refusal = self.refuse_next.pop(0)
        if refusal is not None:
            return refusal.status, {"message": str(refusal)}
        self.cluster.edit(kind, namespace, name, lambda one: merged(one, change))
        return 200, self.cluster.get(kind, namespace, name)

    def page(self, kind, namespace, query):
        check_fields(kind, query)
        found = [one for one in self.cluster.find(kind, namespace, labels_of(query)) if has_fields(one, query)]
        start, limit = int(query.get("continue", 0)), int(query.get("limit", 1000))
        metadata = {"resourceVersion": "1"}
        if start + limit < len(found):
            metadata["continue"] = str(start + limit)
        return {"kind": f"{kind.kind}List", "metadata": metadata, "items": found[start : start + limit]}


def merged(one, change):
    for key, value in change.items():
        if value is None:
            one.pop(key, None)
        elif isinstance(value, dict):
            merged(one.setdefault(key, {}), value)
        else:
            one[key] = value


def labels_of(query):
    selector = query.get("labelSelector", "")
    return dict(one.split("=", 1) for one in selector.split(",") if one)


@functools.cache
def selectable(kind):
    """The fields of a kind by which its definition lets clients select; None for a kind of Kubernetes, where tests select by others."""
    if kind.api_version != names.API_VERSION:
        return None
    definition = yaml.safe_load((crd_dir() / f"{kind.plural}.yaml").read_text())
    fields = definition["spec"]["versions"][0]["selectableFields"]
    return {"metadata.name", "metadata.namespace", *(one["jsonPath"].removeprefix(".") for one in fields)}


def check_fields(kind, query):
    """ApiError, as of a real server, for a selector of a field that the kind does not offer."""
    for field in filter(None, query.get("fieldSelector", "").split(",")):
        path = field.split("=", 1)[0]
        if selectable(kind) is not None and path not in selectable(kind):
            raise ApiError(f"field label not supported: {path}", status=400)


def has_fields(one, query):
    for field in filter(None, query.get("fieldSelector", "").split(",")):
        path, value = field.split("=", 1)
        found = one
        for key in path.split("."):
            found = found.get(key, {})
        if found != value:
            return False
    return True


def discovery(path, unserved):
    """The answers to discovery, which kopf and the operator request before they watch: groups, versions, resources."""
    groups = {"batch": "v1", names.GROUP: names.VERSION}
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        return {
            "groups": [
                {
                    "name": name,
                    "preferredVersion": {"version": version, "groupVersion": f"{name}/{version}"},
                    "versions": [{"version": version, "groupVersion": f"{name}/{version}"}],
                }
                for name, version in groups.items()
            ]
        }
    if path == "/version":
        return {"major": "1", "minor": "34"}
    prefixes = {"/api/v1": "v1", **{f"/apis/{name}/{version}": f"{name}/{version}" for name, version in groups.items()}}
    if path not in prefixes:
        return None
    known = [*BY_PLURAL.values(), Kind("v1", "Namespace", "namespaces")]
    kinds = [one for one in known if one.plural not in unserved]
    return {
        "resources": [
            {
                "name": one.plural,
                "singularName": one.kind.lower(),
                "kind": one.kind,
                "namespaced": True,
                "verbs": ["get", "list", "watch", "patch", "create", "delete"],
            }
            for one in kinds
            if one.api_version == prefixes[path]
        ]
    }
