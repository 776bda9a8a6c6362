"""`persist local ui`: the console over the state folder of the local runner. Reads its resources, runs, logs and stores.

Owns this source of the console. Writes one thing: the annotation that approves a plan.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import CorruptData, InvalidUsage

from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR, Shard
from persist_operator.bridge import Bridge
from persist_operator.console.commands import Address, HostNames, Port, started
from persist_operator.console.engine import engine_view, reading_bridge
from persist_operator.console.port import (
    APPROVE,
    EngineView,
    Event,
    KindName,
    Log,
    PlanChanged,
    Resource,
    Unavailable,
    Unseen,
    Viewer,
)
from persist_operator.console.texts import block, text
from persist_operator.local.engine_commands import Config, Credentials, State, runner_settings
from persist_operator.local.objects import NAMESPACE, STATE, Objects
from persist_operator.local.processes import Processes
from persist_operator.settings import OperatorSettings

#: Lines of a log on a page.
LOG_LINES = 200
#: Names of resources, so that a name from a URL is never a path.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class LaptopSource:
    """See console.port.Source. The user at the browser is the user of this machine."""

    def __init__(self, state: Path, settings: OperatorSettings, *, env: Env, credentials_dir: str) -> None:
        self._state, self._settings, self._env, self._credentials = state, settings, env, credentials_dir
        self._objects, self._processes = Objects(state, env), Processes(state, env)
        self._lock = threading.Lock()
        self._bridge: tuple[object, Bridge] | None = None

    @property
    def title(self) -> str:
        return f"{self._state} on this machine"

    def every(self, kind: KindName, viewer: Viewer, namespace: str | None = None) -> list[Resource]:
        try:
            return list(self._objects.every(kind))
        except CorruptData as error:
            raise Unavailable(str(error)) from error

    def get(self, kind: KindName, namespace: str, name: str, viewer: Viewer) -> Resource | None:
        try:
            return self._objects.get(kind, name) if namespace == NAMESPACE and _NAME.fullmatch(name) else None
        except CorruptData as error:
            raise Unavailable(str(error)) from error

    def engine(self, shard: Resource) -> EngineView | Unseen:
        try:
            location = Shard.of(shard).location(self._settings)
        except InvalidUsage as error:
            return Unseen(f"The stores are not known: {error}.")
        return engine_view(self._reader(), location, shard)

    def events(self, resource: Resource, viewer: Viewer) -> list[Event] | Unseen:
        return Unseen("The local runner keeps no events: `persist local up` prints them as they happen.")

    def log(self, sink: Resource, viewer: Viewer) -> Log:
        name = text(block(sink, "status", "driver").get("podName"))
        child = self._processes.get(name) if _NAME.fullmatch(name) else None
        if child is None:
            return Log(name, "", "The sink has not run yet." if not name else "The log of this run is gone.")
        return Log(name, child.log_tail(LOG_LINES))

    def running(self, shard: Resource) -> list[str]:
        owner = f"PersistShard/{text(block(shard, 'metadata').get('name'))}"
        return [child.name for child in self._processes.every() if child.running and child.owner == owner]

    def may_approve(self, shard: Resource, viewer: Viewer) -> str:
        return ""

    def approve(self, namespace: str, name: str, plan_id: str, viewer: Viewer) -> None:
        shard = self.get("PersistShard", namespace, name, viewer)
        if shard is None or block(shard, "status", "plan").get("id") != plan_id:
            raise PlanChanged(f"PersistShard {namespace}/{name} has no plan {plan_id} now: look at its page again")
        self._objects.annotate("PersistShard", name, APPROVE, plan_id)

    def close(self) -> None:
        """Close the connections to stores."""
        with self._lock:
            known, self._bridge = self._bridge, None
        if known is not None:
            known[1].close()

    def _reader(self) -> Bridge:
        """The bridge, a new one when `persist local down --purge` has put other stores into the folder."""
        try:
            stores: object = (self._state / "store" / "consensus.db").stat().st_ino
        except FileNotFoundError:
            stores = None
        with self._lock:
            known = self._bridge
            if known is None or known[0] != stores:
                self._bridge = (stores, reading_bridge(self._env, self._credentials))
                if known is not None:
                    known[1].close()
            assert self._bridge is not None, "it was set"
            return self._bridge[1]


def ui(
    state: State = STATE,
    *,
    config: Config = None,
    credentials: Credentials = None,
    port: Port = 8787,
    address: Address = "127.0.0.1",
    host_names: HostNames = None,
) -> None:
    """Show shards and sinks in a browser, also while `persist local up` runs. Reads only, but for the approval of a plan.

    Example: persist local ui
    """
    if not (state / "objects").is_dir():
        raise InvalidUsage(f"no resources in {state}; start with `persist local up -f FILE`, or name another --state")
    env = SystemEnv()
    secrets = OPERATOR_CREDENTIALS_DIR if credentials is None else str(credentials.resolve())
    source = LaptopSource(state, runner_settings(state, config), env=env, credentials_dir=secrets)
    try:
        started(source, env=env, address=address, port=port, host_names=host_names or ())
    finally:
        source.close()
