"""The pages over HTTP: routes, templates, errors. Decides nothing: the views are pure, the source reads.

A handler is a plain function, which Starlette runs in a thread of its pool, because sources block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import parse_qs

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from persist_engine.base.env import Env
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from persist_operator.api.redact import printable
from persist_operator.console.fleet import ROWS_MAX, Query, fleet
from persist_operator.console.guard import COOKIE, FIELD, Forms, Guard, Hosts
from persist_operator.console.holds import SHARDS_READ_MAX, holds_page
from persist_operator.console.port import (
    Forbidden,
    KindName,
    PlanChanged,
    Resource,
    Source,
    Unavailable,
    Unseen,
    Viewer,
)
from persist_operator.console.shard import VERSIONS_SHOWN, shard_page
from persist_operator.console.sink import sink_page
from persist_operator.console.texts import grouped, instant, size

_HERE = Path(__file__).parent
#: Random bytes of a cookie.
_COOKIE_BYTES = 16
PLAN_ID_MAX = 253


class NotSignedIn(Exception):
    """The request does not prove its user. The text names what is missing."""


class Entrance(Protocol):
    """Finds out the user of a request."""

    def viewer(self, request: HTTPConnection) -> Viewer:
        """The user. NotSignedIn."""


class Open:
    """The entrance of a console that one user started without access for others. Each request is this user's."""

    def viewer(self, request: HTTPConnection) -> Viewer:
        """See Entrance."""
        return Viewer()


def _shown(value: object) -> object:
    """A value as a page shows it, without marks that change the order of letters, so that no name looks like another."""
    return printable(value) if type(value) is str else value


class Pages:
    """The handlers. Thread-safe."""

    def __init__(self, source: Source, *, env: Env, entrance: Entrance, only_reads: str) -> None:
        self._source, self._env, self._entrance, self._only_reads = source, env, entrance, only_reads
        self._forms = Forms(env.random_bytes(32))
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"instant": instant, "grouped": grouped, "size": size}

    def fleet(self, request: Request) -> Response:
        """All shards and sinks."""
        viewer = self._entrance.viewer(request)
        shards, sinks = self._source.every("PersistShard", viewer), self._source.every("SparkSink", viewer)
        page = fleet(shards, sinks, Query.of(request.query_params), now_ms=self._env.now_ms())
        return self._page(request, "fleet.html", page=page, rows_max=ROWS_MAX)

    def shard(self, request: Request) -> Response:
        """One shard."""
        viewer = self._entrance.viewer(request)
        shard = self._one(request, "PersistShard", viewer)
        try:
            sinks = self._source.every("SparkSink", viewer, request.path_params["namespace"])
        except Forbidden:
            sinks = []
        page = shard_page(
            shard,
            self._source.engine(shard),
            self._source.events(shard, viewer),
            sinks=sinks,
            running=self._source.running(shard),
            why_not=self._only_reads or self._source.may_approve(shard, viewer),
            now_ms=self._env.now_ms(),
        )
        return self._page(request, "shard.html", page=page, versions_shown=VERSIONS_SHOWN)

    def sink(self, request: Request) -> Response:
        """One sink."""
        viewer = self._entrance.viewer(request)
        sink = self._one(request, "SparkSink", viewer)
        page = sink_page(
            sink,
            self._source.log(sink, viewer),
            self._source.events(sink, viewer),
            now_ms=self._env.now_ms(),
        )
        return self._page(request, "sink.html", page=page)

    def holds(self, request: Request) -> Response:
        """The holds of all shards."""
        shards = self._source.every("PersistShard", self._entrance.viewer(request))
        beyond = Unseen(f"The page reads the stores of {SHARDS_READ_MAX} shards. The page of a shard reads its own.")
        seen = [
            (shard, self._source.engine(shard) if index < SHARDS_READ_MAX else beyond)
            for index, shard in enumerate(shards)
        ]
        return self._page(request, "holds.html", page=holds_page(seen, now_ms=self._env.now_ms()))

    async def approve(self, request: Request) -> Response:
        """Approve the plan of a shard. The form names the plan, so that a newer plan is not approved."""
        # The guard bounds the body. Forms of the pages are url-encoded, so no parser of other forms is needed.
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode("latin-1")).items()}
        problem = self._forms.problem(request.headers, request.cookies.get(COOKIE), form.get(FIELD, ""))
        if problem or self._only_reads:
            raise HTTPException(403, problem or self._only_reads)
        plan_id = form.get("plan", "")
        if not 0 < len(plan_id) <= PLAN_ID_MAX:
            raise HTTPException(400, "the form names no plan")
        namespace, name = request.path_params["namespace"], request.path_params["name"]
        viewer = await run_in_threadpool(self._entrance.viewer, request)
        await run_in_threadpool(self._source.approve, namespace, name, plan_id, viewer)
        return RedirectResponse(str(request.url_for("shard", namespace=namespace, name=name).path), status_code=303)

    def health(self, request: Request) -> Response:
        """Shows only that the process answers. Needs no user."""
        return PlainTextResponse("ok\n")

    def failed(self, request: Request, error: Exception) -> Response:
        """A page for an expected failure."""
        match error:
            case Forbidden():
                title, status, text, rights = "Not allowed", 403, "You lack a right that this page needs.", error.rights
            case NotSignedIn():
                title, status, text, rights = "Not signed in", 401, str(error), ()
            case PlanChanged():
                title, status, text, rights = "The plan changed", 409, str(error), ()
            case Unavailable():
                title, status, text, rights = "No answer", 502, str(error), ()
            case HTTPException():
                title, status, text, rights = (
                    "Not found" if error.status_code == 404 else "Refused",
                    error.status_code,
                    error.detail,
                    (),
                )
            case _:
                raise error
        page = {"title": title, "status": status, "text": text, "rights": rights}
        return self._page(request, "problem.html", status=status, page=page)

    def _one(self, request: Request, kind: KindName, viewer: Viewer) -> Resource:
        namespace, name = request.path_params["namespace"], request.path_params["name"]
        found = self._source.get(kind, namespace, name, viewer)
        if found is None:
            raise HTTPException(404, f"There is no {kind} {namespace}/{name}.")
        return found

    def _page(self, request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
        cookie = request.cookies.get(COOKIE, "")
        is_new = not (len(cookie) == 2 * _COOKIE_BYTES and cookie.isascii() and cookie.isalnum())
        if is_new:
            cookie = self._env.random_bytes(_COOKIE_BYTES).hex()
        text = self._templates.get_template(template).render(
            source=self._source.title,
            token=self._forms.token(cookie),
            token_field=FIELD,
            path=request.url.path,
            status=status,
            **values,
        )
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        response = HTMLResponse(text, status_code=status, headers=headers)
        if is_new:
            response.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", path="/")
        return response


def console(
    source: Source, *, env: Env, hosts: Hosts, entrance: Entrance | None = None, only_reads: str = ""
) -> Starlette:
    """The ASGI application over a source. `entrance` None: each request is from the user of this process. `only_reads`: the reason why
    pages neither offer nor accept an approval; empty if they do.
    """
    pages = Pages(source, env=env, entrance=entrance or Open(), only_reads=only_reads)
    handler = cast("Callable[[Request, Exception], Response]", pages.failed)
    failures: Mapping[Any, Any] = dict.fromkeys(
        (Forbidden, NotSignedIn, PlanChanged, Unavailable, HTTPException), handler
    )
    return Starlette(
        routes=[
            Route("/", pages.fleet),
            Route("/holds", pages.holds),
            Route("/healthz", pages.health),
            Route("/shards/{namespace}/{name}", pages.shard, name="shard"),
            Route("/shards/{namespace}/{name}/approve", pages.approve, methods=["POST"]),
            Route("/sinks/{namespace}/{name}", pages.sink, name="sink"),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ],
        middleware=[Middleware(Guard, hosts=hosts)],
        exception_handlers=failures,
    )
