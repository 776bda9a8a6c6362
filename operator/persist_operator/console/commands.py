"""`persist ui`: the console over a cluster. Owns the options that it shares with `persist local ui`, and how the server is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage

from persist_operator.console.port import Source

Port = Annotated[int, typer.Option("--port", min=0, max=65_535, help="The port of the pages; 0 takes a free one.")]
Address = Annotated[
    str, typer.Option("--address", help="The address to listen at. Every process that reaches it sees the pages.")
]
HostNames = Annotated[
    list[str] | None,
    typer.Option("--host-name", help="A further name by which browsers may address the console. Repeatable."),
]
#: The packages of the extra `ui`.
_EXTRA = {"starlette", "uvicorn", "jinja2", "markupsafe", "anyio"}


def started(source: Source, *, env: Env, address: str, port: int, host_names: Sequence[str]) -> None:
    """Serve the console until a signal. InvalidUsage when the extra `ui` is not installed."""
    try:
        from persist_operator.console.serve import serve
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA:
            raise
        raise InvalidUsage(
            f"the console needs the Python module {module}, which is not installed: install persist-operator[ui]"
        ) from error
    serve(
        source,
        env=env,
        address=address,
        port=port,
        host_names=host_names,
        announce=lambda url: typer.echo(f"{source.title}: {url}  (Ctrl-C ends it)"),
    )
