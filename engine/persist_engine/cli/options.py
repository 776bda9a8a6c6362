"""Options that commands share, and the functions that open stores for them. Imports nothing heavy, because help must be fast."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from persist_engine.base.errors import (
    CorruptData,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    ShardNotFound,
    StoreRefused,
    Unavailable,
)
from persist_engine.cli.exit_codes import exit_code
from persist_engine.cli.startup import loaded
from persist_engine.cli.waiting import Waiting, opening

if TYPE_CHECKING:
    from persist_engine.base.metrics import Metrics
    from persist_engine.base.retry import Retry
    from persist_engine.base.tally import StoreTally
    from persist_engine.client.client import PersistClient
    from persist_engine.model.ids import ShardId
    from persist_engine.storage.blob import Blob
    from persist_engine.storage.consensus import Consensus

STORE = "Store"
BlobUrl = Annotated[
    str | None,
    typer.Option("--blob", envvar="PERSIST_BLOB", rich_help_panel=STORE, help="file:///dir or s3://bucket/prefix?..."),
]
ConsensusUrl = Annotated[
    str | None,
    typer.Option(
        "--consensus",
        envvar="PERSIST_CONSENSUS",
        rich_help_panel=STORE,
        help="sqlite:///file or redis://host:port/db?...",
    ),
]
GiveUp = Annotated[
    float,
    typer.Option(
        "--give-up", min=0, rich_help_panel=STORE, help="Give up after stores fail for this many seconds (exit 70)."
    ),
]
GIVE_UP_S, _COMPLETION_GIVE_UP_S = 60.0, 1.0
#: How long a shell waits for names. It includes the time to load modules on a busy machine.
COMPLETION_S = 5.0
#: SUBTLE: bash inserts a completed name without quotes, and zsh evaluates it. A table that another user named `\$(...)` would run a
#: command.
_WORD = re.compile(r"[\w.:@/][\w.:@/%+,=-]*")


@dataclass(frozen=True, slots=True)
class Stores:
    """Where a command finds its stores, and how long it retries when they fail. All commands on stores share these (`on_stores`)."""

    blob: BlobUrl = None
    consensus: ConsensusUrl = None
    give_up: GiveUp = GIVE_UP_S


def on_stores(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with the fields of `Stores` as options in place of its keyword `stores`. Typer has no groups of options."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.name != "stores"]
    hints = get_type_hints(Stores, include_extras=True)
    shared = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(Stores)
    ]

    @functools.wraps(command)
    def called(*given: Any, **options: Any) -> None:
        stores = Stores(**{each.name: options.pop(each.name) for each in shared})
        command(*given, stores=stores, **options)

    expanded = signature.replace(parameters=[*own, *shared])
    called.__signature__ = expanded  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in expanded.parameters.values()}
    return called


AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables, for results and for errors.")]


def completing(ctx: typer.Context) -> Stores:
    """The stores that the command line names which the shell is completing. Calls that fail are retried for one second."""
    return Stores(ctx.params.get("blob"), ctx.params.get("consensus"), _COMPLETION_GIVE_UP_S)


def complete_shard(ctx: typer.Context, incomplete: str) -> list[str]:
    """The shards of the location that begin with `incomplete`, for the shell. None when the stores do not answer soon."""

    def look() -> list[str]:
        with connected(completing(ctx)) as client:
            return sorted(shard_id for shard_id in client.shards() if shard_id.startswith(incomplete))

    return soon(look)


def soon(look: Callable[[], list[str]]) -> list[str]:
    """The answers of `look` that are safe as words in every shell. Empty when `look` fails or takes longer than COMPLETION_S. A single call
    of a store that hangs may take longer than all retries. Such a call is left in a daemon thread, which ends with the process. Nothing is
    logged, since it would appear in the line that is being completed.
    """
    answers: list[list[str]] = []
    logging.disable()

    def run() -> None:
        with suppress(PersistError):
            answers.append(look())

    thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(COMPLETION_S)
    if not thread.is_alive():
        logging.disable(logging.NOTSET)
    return words(answers[0]) if answers else []


def words(names: Iterable[str]) -> list[str]:
    """The names that every shell treats as plain words."""
    return [name for name in names if _WORD.fullmatch(name)]


ShardArgument = Annotated[
    str | None, typer.Argument(metavar="[SHARD]", help="Shard id: s and a UUID.", autocompletion=complete_shard)
]


def complete_named(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of tables and ids of shards that begin with `incomplete`, for the shell."""

    def look() -> list[str]:
        with connected(completing(ctx)) as client:
            from persist_engine.table.names import listed

            names = [each.name for each in listed(client) if each.name.startswith(incomplete)]
            return names + sorted(shard_id for shard_id in client.shards() if shard_id.startswith(incomplete))

    return soon(look)


NamedShardArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SHARD]", help="Shard id, or the name of a table (`persist ls`).", autocompletion=complete_named
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", envvar="PERSIST_SHARD", help="The same, as an option.", autocompletion=complete_shard),
]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Also write the report, as JSON, to this file.")]

Commit = Annotated[
    bool, typer.Option("--commit", help="Do it. Without this the command changes nothing and prints its plan.")
]

#: The file into which `persist --metrics` writes what the command counts. None without that option.
METRICS_FILE: ContextVar[Path | None] = ContextVar("METRICS_FILE", default=None)
#: The environment with which `persist` was started. Its variables for the engine go into the settings of every client.
ENVIRON: ContextVar[Mapping[str, str]] = ContextVar("ENVIRON", default=MappingProxyType({}))
#: The profile whose stores the command opens when no URLs are given.
PROFILE: ContextVar[str | None] = ContextVar("PROFILE", default=None)
#: The memory that `persist` may use unless --memory-mib says otherwise.
MEMORY_MIB = 1024
#: How long records of deletions are kept unless --record-days says otherwise, and the longest that it may say.
RECORD_DAYS, RECORD_DAYS_MAX = 90, 3650
#: Errors that make one shard unreadable and say nothing about other shards.
UNREADABLE = (CorruptData, InvariantViolated, Incompatible)


MemoryMib = Annotated[
    int,
    typer.Option(
        "--memory-mib",
        envvar="PERSIST_MEMORY_MIB",
        min=1,
        max=1 << 30,
        help="MiB that this process may use for compaction, 512 or more.",
    ),
]
RecordDays = Annotated[
    int,
    typer.Option(
        "--record-days",
        envvar="PERSIST_RECORD_DAYS",
        min=0,
        max=RECORD_DAYS_MAX,
        help="Keep the records of deleted blobs (`persist admin deletions`) for this many days; 0: write none.",
    ),
]
ClaimAge = Annotated[
    float,
    typer.Option(min=0, max=1e9, help="Skip compactions that others claimed less than this many seconds ago."),
]


def check_can_write(path: Path | None, option: str) -> None:
    """Raises InvalidUsage when the file that `option` names cannot be written. Commands check this before the work, not after it."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidUsage(f"cannot write {option} {path}: {error.strerror}") from error


def ended_with(problems: Sequence[PersistError]) -> None:
    """Ends a command on many shards that could not do some of them. Reports each of `problems` on stderr, and exits with the code of the
    first. Does nothing when there are none.
    """
    for error in problems:
        typer.echo(f"error: {error.kind.value}: {' '.join(str(error).split())}", err=True)
    if problems:
        raise typer.Exit(exit_code(problems[0]))


def one_shard(argument: str | None, option: str | None) -> ShardId:
    """The given shard, for commands that cannot look up a name. Raises InvalidUsage like `asked_shard`, and when the text is not an id."""
    from persist_engine.model.ids import ShardId

    text = asked_shard(argument, option)
    try:
        return ShardId(text)
    except InvalidUsage as error:
        raise InvalidUsage(f"{error}; `persist ls` and `persist inspect shards` show the ids") from error


def asked_shard(argument: str | None, option: str | None) -> str:
    """The given shard as text: an id or a name (`shard_called`). Raises InvalidUsage when none was given, or two were."""
    if argument is not None and option is not None and argument != option:
        raise InvalidUsage(f"two shards given: {argument} and --shard {option}")
    text = argument or option
    if text is None:
        raise InvalidUsage("no shard given: name one (`persist ls` and `persist inspect shards` list them)")
    return text


def shard_called(client: PersistClient, text: str) -> ShardId:
    """The shard with this id, or the one that has this name in the registry of the stores. Raises ShardNotFound, with near names, when no
    shard has the name.
    """
    from persist_engine.model.ids import ShardId

    try:
        return ShardId(text)
    except InvalidUsage:
        from persist_engine.table.names import resolved  # loads Arrow

        return resolved(client, text).shard_id


def asked_or_all(argument: str | None, option: str | None) -> str | None:
    """The given shard as text, or None when none was given: the command then does all shards. Raises InvalidUsage when two were given."""
    return None if argument is None and option is None else asked_shard(argument, option)


@contextmanager
def connected(
    at: Stores,
    *,
    claim_ms: int | None = None,
    memory_mib: int | None = None,
    record_days: int = RECORD_DAYS,
    create: bool = False,
    tally: StoreTally | None = None,
) -> Iterator[PersistClient]:
    """Yields a client of the location, and closes it afterwards. Store failures raise Unavailable after `at.give_up` seconds. Commands make
    no shards, so they do not make stores either: a mistyped path raises InvalidUsage, except with `create`.

    `claim_ms`: age after which compactions that others claimed are taken over. `memory_mib`: how much memory the process may use for
    its own compactions, if it is to do any. `record_days`: how long its records of deletions are kept. `tally` counts the calls of
    the client to its stores.
    """
    from dataclasses import replace

    from persist_engine.base.secrets import shown_url
    from persist_engine.base.settings import RetrySettings, Settings, with_environ, within_memory
    from persist_engine.client.client import PersistClient
    from persist_engine.client.location import Location

    loaded()
    blob, consensus = _stores(at.blob, at.consensus)
    # `retain_ms` is None because only one command makes shards, for an operator, and the hold of the operator is their retention.
    settings = with_environ(Settings(retry=RetrySettings(give_up_ms=at.give_up * 1000), retain_ms=None), ENVIRON.get())
    if memory_mib is not None:
        settings = within_memory(settings, memory_mib << 20)
        give_back_what_is_freed()
    kept_ms = record_days * 24 * 3600 * 1000
    settings = replace(settings, maintenance=replace(settings.maintenance, deletions_kept_ms=kept_ms))
    if claim_ms is not None:
        settings = replace(settings, compaction=replace(settings.compaction, claim_ms=claim_ms))
    metrics, write_metrics = _counting(METRICS_FILE.get())
    metrics = metrics if tally is None else tally.over(metrics)
    location = Location(blob=blob, consensus=consensus)
    waiting = Waiting(f"{shown_url(blob)} and {shown_url(consensus)}", at.give_up)
    on_wait = waiting.failed if sys.stderr.isatty() else None
    with opening(waiting) if on_wait else nullcontext():
        try:
            client = PersistClient.open(location, settings=settings, metrics=metrics, create=create, on_wait=on_wait)
        except StoreRefused:
            raise
        except Unavailable as error:
            raise Unavailable(f"{error}; check the address, and check that the store runs", **error.detail) from error
    with client:
        try:
            yield client
        except ShardNotFound as error:
            raise ShardNotFound(
                f"{error}; `persist ls` and `persist inspect shards` list what there is; for a resource on this machine "
                "`persist local inspect NAME`",
                **error.detail,
            ) from error
        finally:
            write_metrics()  # before the client closes, which removes the shards' own series


@contextmanager
def blobs_of(at: Stores) -> Iterator[tuple[Blob, Retry]]:
    """Yields the blob store of a location, without its log, and the retries for it. Closes the store afterwards. Raises the same errors as
    `connected`.
    """
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.base.retry import Retry
    from persist_engine.base.settings import RetrySettings
    from persist_engine.shard.opening import open_store
    from persist_engine.storage.open import open_blob

    loaded()
    url = _stores(at.blob, None)[0] if PROFILE.get() else _given(at.blob, "--blob", "PERSIST_BLOB")
    env, metrics = SystemEnv(), NoMetrics()
    retry = Retry(env, RetrySettings(give_up_ms=at.give_up * 1000), metrics)
    opened = open_store(retry, "open blob store", lambda: open_blob(url, env=env, metrics=metrics, create=False))
    try:
        yield opened, retry
    finally:
        opened.close()


@contextmanager
def log_of(consensus: str | None, retry: Retry) -> Iterator[Consensus]:
    """Yields the consensus store of a location, without its blobs, and closes it afterwards. For stores that are not a pair."""
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.storage.open import open_consensus

    url = _stores(None, consensus)[1] if PROFILE.get() else _given(consensus, "--consensus", "PERSIST_CONSENSUS")
    env, metrics = SystemEnv(), NoMetrics()
    opened = retry.external("open consensus", lambda: open_consensus(url, env=env, metrics=metrics, create=False))
    try:
        yield opened
    finally:
        opened.close()


def _counting(path: Path | None) -> tuple[Metrics, Callable[[], None]]:
    """The metrics, and a function that writes them to `path`. Without a path it counts nothing and does not load the library that
    counts.
    """
    from persist_engine.base.metrics import NoMetrics, PrometheusMetrics

    if path is None:
        return NoMetrics(), lambda: None
    check_can_write(path, "--metrics")

    from prometheus_client import CollectorRegistry, write_to_textfile

    registry = CollectorRegistry()
    return PrometheusMetrics(registry), lambda: write_to_textfile(str(path), registry)


def _stores(blob: str | None, consensus: str | None) -> tuple[str, str]:
    """The URLs of both stores: the given ones, or those of the profile. Raises InvalidUsage when neither or both were given."""
    profile = PROFILE.get()
    if not profile:
        return _given(blob, "--blob", "PERSIST_BLOB"), _given(consensus, "--consensus", "PERSIST_CONSENSUS")
    if blob or consensus:
        given = "--blob (PERSIST_BLOB)" if blob else "--consensus (PERSIST_CONSENSUS)"
        raise InvalidUsage(f"the profile {profile} and {given} both say where the stores are: give one of the two")
    from persist_engine.client.location import location_of

    location = location_of(f"profile:{profile}", None, ENVIRON.get())
    return location.blob, location.consensus


def _given(url: str | None, name: str, variable: str) -> str:
    if not url:
        raise InvalidUsage(
            f"no store given: give {name} URL, or set {variable}, or name a profile: persist --profile NAME"
        )
    return url


#: glibc's numbers for three parameters: the maximum of arenas, the size from which blocks are mapped one by one, and the free bytes that it
#: keeps at the end of the heap.
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
#: Larger blocks leave holes in the heap: with 8 MiB the peak named below was up to 84 MiB higher. Smaller ones cost page faults: 256 KiB
#: doubled the time in the system.
_OWN_BLOCK_BYTES, _HEAP_END_BYTES = 1 << 20, 8 << 20


def give_back_what_is_freed() -> None:
    """Makes the allocators of the whole process return freed memory. Call it before any work. Measured in 24 runs of wide rows within
    512 MiB: the peak was 417 to 427 MiB. With the defaults of the allocators it was 640 MiB; with glibc's default thresholds it was 447 to
    546 MiB.
    """
    import pyarrow as pa

    # Arrow's own pools keep freed memory for a while.
    pa.set_memory_pool(pa.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError):  # another C library has no arenas
        mallopt = ctypes.CDLL(None).mallopt
        # By default each of the first sixteen threads gets an arena, and keeps freed memory in it.
        mallopt(_M_ARENA_MAX, 1)
        # Otherwise each freed block that was mapped raises both thresholds, up to 32 and 64 MiB. Chance then decides what the heap keeps.
        mallopt(_M_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _HEAP_END_BYTES)
