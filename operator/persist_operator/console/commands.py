"""`persist ui`: the console over a cluster. Owns the options that it shares with `persist local ui`, and the start of the server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import InvalidUsage

from persist_operator.api.shard import StoreLocation
from persist_operator.bridge import Bridge
from persist_operator.console.port import Source

if TYPE_CHECKING:
    from persist_operator.console.web import Entrance

Port = Annotated[int, typer.Option("--port", min=0, max=65_535, help="The port of the pages; 0 takes a free one.")]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        help="The address to listen at. At one that other machines reach, the pages only read, and each process that reaches it sees them.",
    ),
]
HostNames = Annotated[
    list[str] | None,
    typer.Option("--host-name", help="A further name by which browsers may address the console. Repeatable."),
]
#: The packages of the extra `ui`.
_EXTRA = {"starlette", "uvicorn", "jinja2", "markupsafe", "anyio"}

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def ui(
    namespaces: Annotated[
        list[str] | None, typer.Option("--namespace", "-n", help="Only this namespace. Repeatable; default: all.")
    ] = None,
    *,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")] = None,
    port: Port = 8787,
    address: Address = "127.0.0.1",
    host_names: HostNames = None,
    in_cluster: Annotated[
        bool,
        typer.Option(
            "--in-cluster",
            help="Serve many users from a pod: each request names its user by a token, and the pages show what this user may see.",
        ),
    ] = False,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(help="With --in-cluster: address or network of a proxy that signs users in. Repeatable."),
    ] = None,
    trust_user_header: Annotated[str, typer.Option(help="The header in which that proxy says the user.")] = "",
    trust_groups_header: Annotated[str, typer.Option(help="The header in which it says the groups.")] = "",
) -> None:
    """Show the shards and sinks of a cluster in a browser, with the rights of your kubeconfig.

    PERSIST_BLOB and PERSIST_CONSENSUS name the stores that are read for spines, versions and holds. Without them the pages show what the
    status of each resource says.

    Example: persist ui --namespace analytics
    """
    with _needs_extra():
        from persist_operator.cluster.kube import load_client
        from persist_operator.cluster.user import load_access
        from persist_operator.cluster.viewing import ViewedCluster
        from persist_operator.console.cluster_source import ClusterSource
        from persist_operator.console.entrance import ReviewedEntrance, TrustedProxy
        from persist_operator.console.rights import OwnRights, ReviewedRights, Rights
    env = SystemEnv()
    proxy = TrustedProxy.of(trust_proxy or [], trust_user_header, trust_groups_header)
    if proxy is not None and not in_cluster:
        raise InvalidUsage("--trust-proxy needs --in-cluster: without it every request is yours")
    entrance: Entrance | None = None
    if in_cluster:
        cluster, title = ViewedCluster(load_client()), "this cluster"
        rights: Rights = ReviewedRights(cluster, env)
        entrance = ReviewedEntrance(cluster, env, proxy)
    else:
        access = load_access(None, context)
        cluster, title = ViewedCluster(access.client), f"context {access.context}" if access.context else "this cluster"
        rights = OwnRights(cluster)
    with _stores(env) as stores:
        source = ClusterSource(cluster, rights, title=title, namespaces=namespaces or (), stores=stores)
        started(source, env=env, address=address, port=port, host_names=host_names or (), entrance=entrance)


@contextlib.contextmanager
def _stores(env: Env) -> Iterator[tuple[Bridge, StoreLocation] | None]:
    """The stores that the environment names; None when it names none. Raises InvalidUsage when it names only one of the two."""
    from persist_operator.console.engine import reading_bridge

    blob, consensus = os.environ.get("PERSIST_BLOB"), os.environ.get("PERSIST_CONSENSUS")
    if not blob and not consensus:
        yield None
        return
    if not blob or not consensus:
        raise InvalidUsage("PERSIST_BLOB and PERSIST_CONSENSUS name a pair of stores: set both or none")
    with reading_bridge(env, "") as bridge:
        yield bridge, StoreLocation(blob=blob, consensus=consensus)


def started(
    source: Source,
    *,
    env: Env,
    address: str,
    port: int,
    host_names: Sequence[str],
    entrance: Entrance | None = None,
) -> None:
    """Serve the console until a signal. Raises InvalidUsage when the extra `ui` is not installed, and for an address that cannot
    be taken.
    """
    with _needs_extra():
        from persist_operator.console.serve import serve
    serve(
        source,
        env=env,
        address=address,
        port=port,
        host_names=host_names,
        entrance=entrance,
        announce=lambda url: typer.echo(f"{source.title}: {url}  (Ctrl-C ends it)"),
    )


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA:
            raise
        text = f"the console needs the Python module {module}, which is not installed: install persist-operator[ui]"
        raise InvalidUsage(text) from error
