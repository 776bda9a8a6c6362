"""List-append on one shard: the operations of one process in a linearizability history, and its record of their results.

    a transaction   upper = U          read its lists as of U-1, append to them at U with compare-and-append [U, U+1)
                    mismatch: again with the new upper        appended: it took effect between its call and its return

A list is all rows of one key, ordered by the times at which they were written. Each read uses a snapshot at a random time and a listener
from that time on, and must agree with this process's long-lived listener. A read-only transaction sometimes makes an empty append, which
advances the upper, and sometimes relies on a newly fetched upper. Both must be linearizable. All nodes share one critical reader and
compete for its token.

`python -m persist_kit.histories.list_append BLOB CONSENSUS` opens these stores and prints "ready". It then reads one JSON object per line
from stdin (a `Task`), runs its part of that history, and prints one line when it is done. It then waits for the next task, because a
process takes seconds to start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from persist_engine.base.errors import Fenced, InvariantViolated, MissingBlob, PersistError, Unavailable
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, RetrySettings, Settings, WatchSettings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.listen import Listen, Progress
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.write.outcomes import Appended, UpperMismatch
from persist_engine.model.commands import OpaqueMismatch
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.rows.schema import Schema
from persist_engine.work.perform import perform

from persist_kit.histories.bugs import planted

SCHEMA = Schema(key=pa.schema([("list", pa.int64())]), val=pa.schema([("at", pa.int64()), ("value", pa.int64())]))
CRITICAL_ID = CriticalReaderId.from_bytes(b"\xaa" * 16)
#: The critical since trails the upper by this much, so that reads can be split.
SINCE_OFFSET = 6
LISTS = 3
WAIT_S = 5.0
#: The longest pause of a node between transactions. After a pause its cached state is stale.
THINK_S_MAX = 0.1
GIVE_UP_MS = 8_000.0

#: ("append", list, value) or ("r", list, the values read).
Step = tuple[str, int, Any]


@dataclass(frozen=True)
class Task:
    """One process's part of one history."""

    shard_id: str
    history: str
    """The file for the record of this process."""
    seed: int
    first_node: int
    nodes: int
    transactions: int
    read_only: float
    bug: str | None = None


class Disagreement(Exception):
    """Two reads of one time differ, which is an error without a checker."""


class Record:
    """The history of one process as JSON lines, two per transaction. Thread-safe. Written lines survive the process, so a transaction
    without a second line was under way when the process was killed.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def invoked(self, *, process: int, steps: list[Step]) -> int:
        """A transaction begins. Returns the time of its call, which identifies it."""
        with self._lock:
            call = time.monotonic_ns()
            self._write({"process": process, "call": call, "txn": steps, "outcome": "invoked"})
        return call

    def ended(self, *, process: int, call: int, steps: list[Step], outcome: str) -> None:
        """The transaction has ended, with any outcome."""
        end = time.monotonic_ns()
        with self._lock:
            self._write({"process": process, "call": call, "return": end, "txn": steps, "outcome": outcome})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Node:
    """One client of the shard; nodes of one process share its cached state."""

    def __init__(
        self, client: PersistClient, shard_id: ShardId, *, number: int, seed: int, record: Record, read_only: float
    ) -> None:
        self._client, self._shard_id = client, shard_id
        self._number = number
        self._rng = random.Random(f"{seed} {number}")  # noqa: S311 - repeatable on purpose
        self._record = record
        self._read_only = read_only
        self._values = 0
        self._idle = threading.Event()
        self._opaque = b""
        self._open()

    def _open(self) -> None:
        self._writer = self._client.open_writer(self._shard_id, SCHEMA, purpose=f"node {self._number}")
        self._reader = self._client.open_leased_reader(self._shard_id, SCHEMA, purpose=f"node {self._number}")
        since = self._reader.since.time
        assert since is not None, "no node closes the shard"
        self._listened_from = since
        self._listener: Listen | None = None
        self._heard: list[tuple[int, int, int, int]] = []

    def run(self, transactions: int) -> None:
        """Runs `transactions` transactions, one after another."""
        for _ in range(transactions):
            if self._rng.random() < 0.2:
                with contextlib.suppress(PersistError):
                    self._move_since()
            if self._rng.random() < 0.5:
                self._idle.wait(self._rng.uniform(0, THINK_S_MAX))
            self._transact(self._plan())

    def close(self) -> None:
        """Expires the reader."""
        with contextlib.suppress(PersistError):
            self._reader.expire()

    def read_all(self) -> None:
        """Runs one transaction that reads every list."""
        self._transact([("r", each, None) for each in range(LISTS)])

    # -- one transaction ----------------------------------------------------------------------------------------------

    def _plan(self) -> list[Step]:
        steps: list[Step] = []
        is_read_only = self._rng.random() < self._read_only
        for _ in range(self._rng.randint(1, 3)):
            which = self._rng.randrange(LISTS)
            if is_read_only or self._rng.random() < 0.4:
                steps.append(("r", which, None))
            else:
                self._values += 1
                steps.append(("append", which, self._number * 100_000 + self._values))
        return steps

    def _transact(self, plan: list[Step]) -> None:
        call = self._record.invoked(process=self._number, steps=plan)
        try:
            steps, appended = self._attempt(plan)
        except (Unavailable, InvariantViolated, Fenced, MissingBlob) as error:
            # The append was given up, or its outcome stays unknown in the one possible case. It may have happened, or may still happen.
            self._record.ended(process=self._number, call=call, steps=plan, outcome="unknown")
            logging.getLogger(__name__).info("node %d: %s", self._number, error)
            with contextlib.suppress(PersistError):
                self._open()
            return
        self._record.ended(process=self._number, call=call, steps=steps, outcome="ok")
        if appended is not None:
            with contextlib.suppress(PersistError):
                perform(self._writer.machine, appended.maintenance)

    def _attempt(self, plan: list[Step]) -> tuple[list[Step], Appended | None]:
        is_read_only = all(verb == "r" for verb, _, _ in plan)
        trusts_upper = is_read_only and self._rng.random() < 0.5
        upper = (self._writer.fetch_recent_upper() if trusts_upper else self._writer.shared_upper()).time
        while True:
            assert upper is not None, "no node closes the shard"
            steps = _carried_out(plan, self._read(upper - 1) if upper else {})
            if trusts_upper:
                return steps, None
            rows = [
                (((which,), (upper * 10 + index, value)), upper, 1)
                for index, (verb, which, value) in enumerate(plan)
                if verb == "append"
            ]
            answer = self._writer.compare_and_append(
                rows, expected_upper=Antichain(upper), new_upper=Antichain(upper + 1)
            )
            match answer:
                case Appended():
                    return steps, answer
                case UpperMismatch(current=current):
                    upper = current.time
                case _:
                    raise AssertionError(answer)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, as_of: int) -> dict[int, list[int]]:
        """Every list as of `as_of`, from a snapshot at an earlier time and a listener for the rest."""
        found = self._snapshot_and_listen(as_of)
        if found is None:  # the lease was lost, and its since has moved on
            self._open()
            found = self._snapshot_and_listen(as_of)
            if found is None:
                raise Fenced(f"{as_of} is no longer readable")
        heard = _lists(self._hear(as_of), as_of)
        if heard != found:
            raise Disagreement(f"node {self._number} at {as_of}: read {found}, heard {heard}")
        return found

    def _snapshot_and_listen(self, as_of: int) -> dict[int, list[int]] | None:
        with self._client.open_leased_reader(self._shard_id, SCHEMA, purpose="read") as reader:
            since = reader.since.time
            assert since is not None, "no node closes the shard"
            if as_of < since:
                return None
            middle = self._rng.randint(since, as_of)
            rows = self._snapshot(reader, middle)
            listener = reader.listen(middle)
            assert not isinstance(listener, SinceAhead), "the reader holds it"
            rows += list(_until(listener, as_of))
        return _lists(rows, as_of)

    def _hear(self, as_of: int) -> list[tuple[int, int, int, int]]:
        """The rows that the long-lived listener has received, up to `as_of` at least."""
        if self._listener is None:
            self._heard = self._snapshot(self._reader, self._listened_from)
            listener = self._reader.listen(self._listened_from)
            if isinstance(listener, SinceAhead):
                raise Fenced("the listener's lease is lost")
            self._listener = listener
        self._heard += list(_until(self._listener, as_of))
        return self._heard

    def _snapshot(self, reader: ReadHandle, as_of: int) -> list[tuple[int, int, int, int]]:
        snapshot = reader.snapshot(as_of, timeout_s=WAIT_S)
        if isinstance(snapshot, SinceAhead):
            raise Fenced(f"{as_of} is no longer readable")
        with snapshot:
            return list(_rows(snapshot.to_table()))

    # -- the critical reader ------------------------------------------------------------------------------------------

    def _move_since(self) -> None:
        """Takes the token and advances since behind the upper. If another node was faster, that node owns the token now."""
        token = f"{self._number} {self._rng.random()}".encode()
        handle = self._client.open_critical_since(self._shard_id, CRITICAL_ID, opaque=token)
        upper = self._writer.shared_upper().time
        assert upper is not None, "no node closes the shard"
        answer = handle.compare_and_downgrade_since(
            self._opaque or handle.opaque, (token, Antichain(max(0, upper - SINCE_OFFSET)))
        )
        self._opaque = answer.opaque if isinstance(answer, OpaqueMismatch) else token


def _carried_out(plan: list[Step], before: dict[int, list[int]]) -> list[Step]:
    """The steps with their results. A transaction reads its own appends."""
    lists = {which: list(values) for which, values in before.items()}
    steps: list[Step] = []
    for verb, which, value in plan:
        mine = lists.setdefault(which, [])
        if verb == "append":
            mine.append(value)
        steps.append((verb, which, value if verb == "append" else list(mine)))
    return steps


def _until(listener: Listen, as_of: int) -> Iterator[tuple[int, int, int, int]]:
    while not Antichain(as_of) < listener.frontier:
        events = listener.next_batch(timeout_s=WAIT_S)
        if events is None:
            raise Unavailable(f"nothing heard of {as_of} in {WAIT_S} s")
        for event in events:
            if not isinstance(event, Progress):
                yield from _rows(event.table)


def _rows(table: pa.Table) -> Iterator[tuple[int, int, int, int]]:
    """(list, at, value, diff)."""
    columns = (("key", "list"), ("val", "at"), ("val", "value"))
    fields = [table.column(side).combine_chunks().field(name).to_pylist() for side, name in columns]
    return zip(*fields, table.column("diff").to_pylist(), strict=True)


def _lists(rows: list[tuple[int, int, int, int]], as_of: int) -> dict[int, list[int]]:
    """The lists as of `as_of`. A row with diff 2 is in its list twice."""
    lists: dict[int, list[int]] = {}
    for which, at, value, diff in sorted(rows):
        if at // 10 <= as_of:
            lists.setdefault(which, []).extend([value] * diff)
    return lists


# -- the process ------------------------------------------------------------------------------------------------------


def settings() -> Settings:
    """Settings that make rare paths common: a small inline budget, a rollup every few versions, immediate retries."""
    return Settings(
        batch=BatchSettings(inline_total_bytes_max=6_000),
        maintenance=MaintenanceSettings(rollup_threshold=8, gc_versions_min=8, rollup_claim_ms=200, gc_claim_ms=200),
        retry=RetrySettings(initial_ms=2, clamp_ms=200, give_up_ms=GIVE_UP_MS),
        watch=WatchSettings(initial_ms=5, clamp_ms=100),
        retain_ms=None,
    )


def play(client: PersistClient, task: Task) -> str:
    """Runs `task`. Returns "done", or an error that is proven without the checker."""
    wrong: list[str] = []
    shard_id = ShardId(task.shard_id)
    bug = nullcontext() if task.bug is None else planted(task.bug)
    with bug, Path(task.history).open("a") as file:
        record = Record(file)

        def live(number: int) -> None:
            try:
                node = Node(client, shard_id, number=number, seed=task.seed, record=record, read_only=task.read_only)
                if task.transactions:
                    node.run(task.transactions)
                else:
                    node.read_all()
                node.close()
            except Exception as error:  # noqa: BLE001 - every error of a node is part of the verdict
                wrong.append(f"{type(error).__name__}: {error}")

        numbers = range(task.first_node, task.first_node + task.nodes)
        threads = [threading.Thread(target=live, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return "; ".join(wrong) or "done"


def main() -> int:
    """See the module."""
    logging.basicConfig(level=logging.CRITICAL)
    blob, consensus = sys.argv[1:]
    with PersistClient.open(Location(blob=blob, consensus=consensus), settings=settings()) as client:
        _say("ready")
        for line in sys.stdin:
            _say(play(client, Task(**json.loads(line))))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
