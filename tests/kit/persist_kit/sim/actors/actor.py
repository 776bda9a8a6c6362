"""The shared code of all actors of a simulated history: their life on a host that may crash.

Each actor uses public handles only, reports their answers to the witness, and draws all its actions from the seed. It lives on a `Host`.
When the host crashes, the actor continues on the next incarnation with new handles. It ends after its last operation.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from persist_engine.base.errors import ForkedLog, MissingBlob, ShardLost, ShardNotFound, Unavailable
from persist_engine.client.client import PersistClient

from persist_kit.sim.scheduler import Process

if TYPE_CHECKING:
    from persist_engine.table.database import Database

    from persist_kit.sim.simulation import History

WAIT_S = 0.05
#: How long an actor without a log waits for a recovery before it looks again.
RECOVERY_MS = 40


@dataclass
class Host:
    """One incarnation of a process. Its actors share its client, and lose it together."""

    process: Process
    client: PersistClient
    databases: list[Database] = field(default_factory=list)
    """The databases that its threads share."""


class Actor(ABC):
    """Does `operations` operations, one after another, even if its hosts crash."""

    def __init__(self, history: History, name: str, operations: int) -> None:
        self.history = history
        self.name = name
        self.left = operations
        self.rng = random.Random(f"{history.plan.seed} {name}")  # noqa: S311 - repeatable on purpose
        self.is_finished = False

    def live(self, host: Host) -> None:
        """The body of the actor's task on `host`. Killed when the host dies; the next host does the remaining operations."""
        self.host = host
        while not self._lived():
            self.history.scheduler.pause(RECOVERY_MS)
        self.is_finished = True
        self.history.finished()

    def _lived(self) -> bool:
        """Whether the actor has done everything that it can. False when the log is lost but may be recovered."""
        branches = self.history.branches
        try:
            self._live()
        except MissingBlob as error:
            if not branches.lost_blobs:
                raise
            self.history.scheduler.note(f"lost with what is lost: {error}")
        except (ShardLost, ShardNotFound) as error:
            if not branches.was_lost():
                raise
            self.history.scheduler.note(f"nothing to work on: {error}")
            return branches.wiped() is not None and not self.history.may_be_recovered()
        return True

    def _live(self) -> None:
        self._open()
        while self.left:
            self.left -= 1
            self.history.scheduler.pause(self.rng.choice([0, 0, 5, 30, 100]))
            self._surviving(self.operate)
        self._surviving(self.close)  # if the store is unavailable, the lease lapses in the end

    def _open(self) -> None:
        while not self._surviving(self.open):
            pass

    def _surviving(self, act: Callable[[], None]) -> bool:
        """Runs `act` and returns whether it succeeded. Notes a store that fails for long. A log that lost versions ends the process."""
        self.history.branches.begins(self.history.scheduler.current)
        try:
            act()
        except Unavailable as error:
            self.history.scheduler.note(f"unavailable: {error}")
            return False
        except ForkedLog as error:
            self.history.astray(error)
        return True

    @abstractmethod
    def open(self) -> None:
        """Opens handles on a new host."""

    @abstractmethod
    def operate(self) -> None:
        """Does one operation."""

    def close(self) -> None:
        """Called after the last operation. Most actors let their handles lapse."""
        return

    @property
    def client(self) -> PersistClient:
        """The client of the host."""
        return self.host.client
