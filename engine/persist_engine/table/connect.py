"""`connect` opens the tables of a pair of stores from one URL, two, or none. Only this module of the room reads the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from persist_engine.base.env import Env, SystemEnv
from persist_engine.base.errors import NoStore, StorageError
from persist_engine.base.metrics import Metrics, NoMetrics
from persist_engine.base.retry import OnWait, Retry
from persist_engine.base.settings import Settings, with_environ
from persist_engine.client.client import PersistClient
from persist_engine.client.location import location_of
from persist_engine.table.database import Database, OpenClient

_log = logging.getLogger(__name__)
#: If a store does not answer for this long, its address is probably wrong. Once connected, calls wait for a store without end.
CONNECT_S = 30.0
#: How often a call that waits for a store logs this.
_SAY_S = 5.0


def connect(
    url: str | Path | None = None,
    consensus: str | None = None,
    *,
    maintain: bool = True,
    create: bool = True,
    settings: Settings | None = None,
    env: Env | None = None,
    metrics: Metrics | None = None,
) -> Database:
    """Opens the tables of a pair of stores. Close the result, or use it in a `with` block.

    `url` has one of these forms:

    - `file:///dir` or a Path: blobs and log are in that folder, which the first `Database.create` makes. Until then, other calls raise
      NoStore, which is an InvalidUsage.
    - `s3://bucket/prefix` or `file:///dir`, with the log in `consensus`: `redis://host:port/db` or `sqlite:///file`.
    - `mem:`, for tests: nothing outlives the connection.
    - `profile:NAME`, a pair of stores that the user's file of profiles names (client/profiles.py).

    Without arguments, the environment names the stores, in PERSIST_BLOB and PERSIST_CONSENSUS, or in PERSIST_PROFILE, as for the command
    line. `storage.open` describes the parameters of URLs.

    With `maintain`, threads compact and collect after writes to tables that SQL and Python created. Without it, `Table.optimize` and
    `Table.vacuum` do that. Without `create`, a missing folder raises NoStore at once. Raises Unavailable, which names the store, when one
    did not answer within CONNECT_S. Later calls wait for stores, and log warnings meanwhile. Other errors are those of
    `PersistClient.open`.

    >>> db = connect("mem:")
    >>> orders = db.create("orders", key="id BIGINT", value="name STRING")
    >>> orders.append([{"id": 1, "name": "ada"}]).inserted
    1
    >>> orders.to_pylist()
    [{'id': 1, 'name': 'ada'}]
    >>> db.close()
    """
    location = location_of(url, consensus, os.environ)
    given = with_environ(settings or Settings(), os.environ)
    env, metrics = env or SystemEnv(), metrics or NoMetrics()
    on_wait = _saying(env)

    def opened(make: bool) -> PersistClient:  # noqa: FBT001 - Database names it
        with Retry(env, given.retry, metrics).until(CONNECT_S):
            return PersistClient.open(
                location, settings=given, env=env, metrics=metrics, create=make and create, on_wait=on_wait
            )

    try:
        client: PersistClient | OpenClient = opened(False)  # noqa: FBT003 - as above
    except NoStore:
        if not create:
            raise
        client = opened
    return Database(client, location, maintain=maintain, owns_client=True)


def _saying(env: Env) -> OnWait:
    """Warns of stores that do not answer, at most every _SAY_S, and not before a store has failed for that long."""
    failing: dict[str, tuple[float, float]] = {}

    def say(what: str, error: StorageError) -> None:
        now_s = env.monotonic_s()
        since_s, last_s = failing.get(what, (now_s, now_s))
        if now_s - last_s > 4 * _SAY_S:  # the store had answered since the last failure
            since_s = last_s = now_s
        if now_s - last_s >= _SAY_S:
            _log.warning("%s: no answer for %.0f s, waiting: %s", what, now_s - since_s, error)
            last_s = now_s
        failing[what] = (since_s, last_s)

    return say
