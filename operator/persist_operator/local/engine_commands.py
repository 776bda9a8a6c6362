"""`persist local read|inspect|admin NAME`: the engine's commands on a shard of this machine, by the name of its resource.

Owns the choice of the shard and of its stores. Options, output and exit codes are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from typer.core import TyperGroup

from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR, Shard
from persist_operator.local.completion import complete_shard
from persist_operator.local.objects import NAMESPACE, STATE, Document, Objects
from persist_operator.settings import (
    AllowedNamespaces,
    LoopSettings,
    OperatorSettings,
    StorageProfile,
    WorkloadAllow,
    WorkloadSettings,
)

#: The engine parses what follows the name.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
State = Annotated[
    Path, typer.Option("--state", envvar="PERSIST_LOCAL_STATE", help="Folder of resources, logs, stores.")
]
Config = Annotated[Path | None, typer.Option(help="As for `up`: where the stores are, if not below --state.")]
Credentials = Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="As for `up`.")]
#: A Secret of this machine is a folder that the user names with --credentials.
_ANY_SECRET = ("*",)


def _complete_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shards, and before a command of the engine in `inspect` or `admin` also these commands."""
    given, group = ctx.params.get("words") or (), str(ctx.command.name)
    whats = [] if group == "read" else _commands_of(group)
    found = [] if set(whats) & set(given) else [what for what in whats if what.startswith(incomplete)]
    return [*found, *complete_shard(ctx, incomplete)]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME", help="The shard, and what the engine's command takes.", autocompletion=_complete_word
    ),
]
#: The greatest age of the numbers in a status.
_NUMBERS_S = 1.0
#: Commands of the engine that need no shard: they are for all shards of the stores.
_OF_ALL_SHARDS = {"shards", "names", "usage", "verify", "orphans", "recover-store"}


def read(words: Words = None, state: State = STATE, *, config: Config = None, credentials: Credentials = None) -> None:
    """Read a shard: `persist local read NAME [OPTIONS]`, with the options of `persist read`.

    Example: persist local read airlines --from -1h
    """
    _passed_on(_with_shard(["read"], words or (), state), state, config, credentials)


def inspect(
    words: Words = None, state: State = STATE, *, config: Config = None, credentials: Credentials = None
) -> None:
    """Look into a shard: `persist local inspect [WHAT] NAME [OPTIONS]`; WHAT as for `persist inspect`, default `shard`.

    Example: persist local inspect airlines; persist local inspect batches airlines
    """
    what, *rest = _with_what(words or (), "inspect", "shard")
    _passed_on(_with_shard(["inspect", what], rest, state), state, config, credentials)


def admin(words: Words = None, state: State = STATE, *, config: Config = None, credentials: Credentials = None) -> None:
    """Administer a shard: `persist local admin [WHAT] NAME [OPTIONS]`; WHAT as for `persist admin`, default `holds`.

    Example: persist local admin airlines; persist local admin verify airlines
    """
    what, *rest = _with_what(words or (), "admin", "holds")
    _passed_on(_with_shard(["admin", what], rest, state), state, config, credentials)


COMMANDS = {"read": read, "inspect": inspect, "admin": admin}


def runner_settings(state: Path, config: Path | None) -> OperatorSettings:
    """The settings of the operator's configuration file `config`; without one, a single profile on files below `state`. On one machine
    executors are not faster than one process, so Auto never chooses them.
    """
    if config is not None:
        loaded = OperatorSettings.load(config)
        allow = replace(loaded.workload.allow, secrets=_ANY_SECRET)
        return replace(loaded, workload=replace(loaded.workload, spark_compaction=False, allow=allow))
    store = (state.resolve() / "store").as_uri()  # `#`, `?` and `%` in the name of a folder have a meaning in a URL
    profile = StorageProfile(
        blob=f"{store}/blobs",
        consensus=f"sqlite{store.removeprefix('file')}/consensus.db",
        take_over="Any",
        allowed_namespaces=AllowedNamespaces(names=(NAMESPACE,)),
    )
    # A status is written to a file, not to an API server. So it can be fresh, and a command shows the results of the previous command.
    return OperatorSettings(
        operator_id="local",
        storage_profiles={"default": profile},
        loop=LoopSettings(numbers_seconds=_NUMBERS_S),
        workload=WorkloadSettings(spark_compaction=False, allow=WorkloadAllow(secrets=_ANY_SECRET)),
    )


def _commands_of(group: str) -> list[str]:
    """The engine's commands in `inspect` or `admin`."""
    from persist_engine.cli.main import parser

    found = parser().commands[group]
    assert isinstance(found, TyperGroup), "so has each of these"
    return list(found.commands)


def _with_what(arguments: Sequence[str], group: str, usual: str) -> list[str]:
    """The arguments with the engine's command first; `usual` when the first argument is a name."""
    found = _commands_of(group)
    if not arguments:
        raise InvalidUsage(f"name a shard: `persist local {group} NAME`; `persist local get pshard` lists them")
    if arguments[0] in found:
        return list(arguments)
    if len(arguments) > 1 and arguments[1] in found:  # NAME WHAT is accepted too
        return [arguments[1], arguments[0], *arguments[2:]]
    return [usual, *arguments]


def _with_shard(command: Sequence[str], arguments: Sequence[str], state: Path) -> list[str]:
    """`command` and `arguments`. The first argument that is the name of a shard becomes its id."""
    shards = {one["metadata"]["name"]: one for one in Objects(state, SystemEnv()).every("PersistShard")}
    if not shards:
        raise InvalidUsage(f"no shards in {state}; start with `persist local up -f FILE`, or name another --state")
    at = next((index for index, one in enumerate(arguments) if one in shards), None)
    if at is not None:
        return [*command, *arguments[:at], _id_of(shards[arguments[at]]), *arguments[at + 1 :]]
    if command[-1] in _OF_ALL_SHARDS:
        return [*command, *arguments]
    given = next((repr(one) for one in arguments if not one.startswith("-")), "nothing")
    raise InvalidUsage(f"no PersistShard is called {given}; there are: {', '.join(sorted(shards))}")


def _id_of(shard: Document) -> str:
    shard_id = (shard.get("status") or {}).get("shardId")
    if shard_id is None:
        raise InvalidUsage(f"{shard['metadata']['name']} has no shard yet: `persist local up -f FILE` creates it")
    return str(shard_id)


def _passed_on(arguments: list[str], state: Path, config: Path | None, credentials: Path | None) -> None:
    """Run the engine's command on the stores of the shard that its arguments name."""
    from persist_engine.cli.main import parser

    settings = runner_settings(state, config)
    secrets = OPERATOR_CREDENTIALS_DIR if credentials is None else str(credentials.resolve())
    documents = list(Objects(state, SystemEnv()).every("PersistShard"))
    document = next((one for one in documents if (one.get("status") or {}).get("shardId") in arguments), documents[0])
    location = Shard.of(document).location(settings)
    blob, consensus = location.urls(f"{secrets}/{location.profile}")
    stores = ["--blob", blob] if arguments[1:2] == ["rollup"] else ["--blob", blob, "--consensus", consensus]
    code = parser().main([*arguments, *stores], prog_name="persist", standalone_mode=False)
    if code:
        raise typer.Exit(code)
