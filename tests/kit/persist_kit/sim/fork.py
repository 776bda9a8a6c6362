"""Rolls consensus back, or splits it into two branches of one log. Lets recoveries begin the log anew. Decides to which branch a process
talks, and which branch judges it.

    fork     a copy of the log is made; rollback: every process stays on the original; split: some talk to the copy from now on;
             wipe: like a rollback, but to an empty copy
    healing  one branch wins (in a rollback: the copy) and all processes talk to it; versions that only the other has are lost
    recovery the log is replaced by one that begins with an older version; all versions of the replaced log count as lost

A process that has not looked at the winner since then cannot know of the loss. Until it looks, the branch that it knew judges it. A process
that knew a lost version must find out at its first look (ForkedLog), and restarts. A process that did not know a lost version continues.
There is only one blob store. If the losing side deleted a blob before the process could know, this is not an error of the engine, and the
checks that need the blob end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

from persist_engine.base.errors import ForkedLog
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.codec.keys import parse_blob_key, parse_deletions_key
from persist_engine.model.state import ShardState
from persist_engine.shard.applier import Applier
from persist_engine.storage.blob import BlobInfo
from persist_engine.storage.consensus import Consensus
from persist_engine.testing.faults import FaultyConsensus

from persist_kit.sim.calls import Recovering
from persist_kit.sim.network import Network
from persist_kit.sim.recovery import Recoveries
from persist_kit.sim.scheduler import Process, Scheduler, Task
from persist_kit.sim.watched import WatchedBlob, WatchedConsensus
from persist_kit.sim.witness import Witness

#: The versions that a branch must have to win at once when the other branch commits. They are more than are fetched one by one.
_GROWN_MIN = 5
#: How long a branch that will lose waits for its last commit.
_FALLS_MS = 200
T = TypeVar("T")


@dataclass(frozen=True)
class Disaster:
    """The disaster in consensus, which begins when the log reaches version `at`, and ends after `lasts_ms`, when one branch wins."""

    is_split: bool
    at: int
    lasts_ms: float
    is_wipe: bool = False
    at_commit: bool = False
    """Whether one branch of a split wins at the moment when the other has committed and not yet answered. This is the other's first commit
    after the winner has grown, or the next commit after `lasts_ms`.
    """


def disaster_of(seed: int) -> Disaster | None:
    """The disaster of `seed`, if it has one. Drawn separately, so that the rest of the plan stays the same."""
    rng = random.Random(f"disaster {seed}")  # noqa: S311 - repeatable on purpose
    if rng.random() > 0.2:
        return None
    drawn = Disaster(is_split=rng.random() < 0.5, at=rng.randint(2, 12), lasts_ms=rng.choice([20, 60, 200, 600]))
    return replace(
        drawn, is_wipe=not drawn.is_split and rng.random() < 0.25, at_commit=drawn.is_split and rng.random() < 0.6
    )


class Branches:
    """The log, or its two branches. `main` is the current log, and at the end the winner."""

    def __init__(self, scheduler: Scheduler, witness: Witness, disaster: Disaster | None) -> None:
        self._scheduler = scheduler
        self.main = witness
        self._disaster = disaster
        self._logs = [witness]
        """All branches and recovered logs, including former ones, oldest first."""
        self._recoveries = Recoveries(scheduler)
        self._copy: Witness | None = None
        self._lost: Witness | None = None
        """The log that was given up last, because another branch won or by a recovery."""
        self._falls: Witness | None = None
        """The branch that loses with its next commit."""
        self._talks_to: dict[Process, Witness] = {}
        self._judges: dict[Process, Witness] = {}
        """The branch that each process knows, if its cached state does not prove it: the branch of its last look or, before that,
        its side.
        """
        self._met: dict[Task, set[Witness]] = {}
        """The branches that have answered since the task's operation, or its look within it, began."""
        self._listed_late: set[Task] = set()
        """The tasks that last listed the blobs after one branch had won."""
        self._processes: dict[Process, Callable[[], ShardState | None]] = {}
        self._found_out: set[Process] = set()
        self.lost_versions = self.detected = self.recovered = 0
        self.lost_blobs = witness.lost_blobs

    def talks_to(self, process: Process) -> Witness:
        """The branch to which calls of `process` go now."""
        return self._talks_to.get(process, self.main)

    def judge(self, process: Process) -> Witness:
        """The branch that judges the actions of `process`."""
        stands_on = self._holders(self._known(process))
        judge = self._judges.get(process, self.main)
        if stands_on and judge not in stands_on:
            # News can bring it to the winner. A late answer from before it changed sides can bring it back.
            judge = self._judges[process] = stands_on[-1]
        return judge

    def may_find_out(self, task: Task) -> bool:
        """Whether the task's process may find out about the loss: it knows another branch than the one to which it talks now, or an answer
        in its operation came from another branch, or another of its tasks has found out, perhaps by an answer that only that task got.
        """
        talks_to = self.talks_to(task.process)
        return (
            task.process in self._found_out
            or self.judge(task.process) is not talks_to
            or not self._met.get(task, set()) <= {talks_to}
        )

    def finds_out(self) -> None:
        """The engine stops the work of the running process on a log that lost versions. All tasks of the process hear of it."""
        task = self._scheduler.current
        if self.may_find_out(task):
            self._found_out.add(task.process)

    def is_over(self) -> bool:
        """Whether a log was given up, because another branch won or by a recovery."""
        return self._lost is not None

    def was_lost(self) -> bool:
        """Whether there was no log at some moment after there had been one."""
        return self.is_over() and any(log.forked_at == 0 for log in self._logs)

    def may_recover(self) -> bool:
        """Whether a recovery makes sense: there is one log or none, and this will not change."""
        return self._disaster is None or self.is_over()

    def lacks_blobs(self) -> bool:
        """Whether the log's live versions name blobs that are lost, without an error of the engine."""
        return any(self.main.needs(key) for key in self.lost_blobs & self.main.gone())

    def wiped(self) -> Witness | None:
        """The log that was lost as a whole. None as long as there is a log."""
        return self._lost if self.main.head is None else None

    def lost_truncation_past(self, seqno: SeqNo) -> bool:
        """Whether a truncation past this version was acknowledged and then lost by consensus. Its process may have known no lost version,
        and then it unlinks rollups with which the log still begins.
        """
        talks_to = self.talks_to(self._scheduler.current.process)
        return any(log.earliest() > seqno for log in self._logs if log is not talks_to)

    def listed(self, task: Task) -> None:
        """`task` has listed the blobs."""
        (self._listed_late.add if self.is_over() else self._listed_late.discard)(task)

    def creating(self, task: Task, witness: Witness) -> None:
        """`task` is about to create a log. Only a task that listed the blobs before the loss may believe that it is the first."""
        lost = self.wiped()
        if lost and witness is self.main and (task in self._listed_late or lost not in self._met.get(task, set())):
            self._scheduler.fail(f"{task.name} creates the shard again, although blobs prove that it existed")

    def started(self, process: Process, knows: Callable[[], ShardState | None]) -> None:
        """A new process, with the cached state that `knows` returns. It talks to the current log or, while there are two branches, to
        either.
        """
        self._processes[process] = knows
        if self._copy is not None and not self.is_over():
            self._take_side(process)

    def committed(self, witness: Witness, seqno: SeqNo) -> None:
        """The branch of `witness` has reached `seqno`. Starts the disaster when it is due, or ends it."""
        disaster = self._disaster
        if disaster is not None and disaster.at_commit and not self.is_over() and self._copy is not None:
            other = self._copy if witness is self.main else self.main
            if witness.grown == 1 and other.grown >= _GROWN_MIN:
                self._falls = witness
        if witness is self._falls:
            self.heal()
        if disaster is None or self._copy is not None or seqno < disaster.at:
            return
        self._copy = self.main.wiped() if disaster.is_wipe else self.main.fork()
        self._logs.append(self._copy)
        self._scheduler.note(f"-- consensus {'splits' if disaster.is_split else 'is copied'} at {seqno}")
        for process in self._processes:
            self._take_side(process)
        self._scheduler.later(disaster.lasts_ms, self._fall if disaster.at_commit else self.heal)

    def _fall(self) -> None:
        """Chooses the branch that loses, with its next commit or after a while."""
        self._falls = self.main if self._scheduler.rng.random() < 0.5 else self._copy
        self._scheduler.later(_FALLS_MS, self.heal)

    def _take_side(self, process: Process) -> None:
        assert self._disaster is not None
        assert self._copy is not None
        is_split_off = self._disaster.is_split and self._scheduler.rng.random() < 0.5
        self._talks_to[process] = self._judges[process] = self._copy if is_split_off else self.main

    def end(self) -> None:
        """Ends the disaster, and prevents one that has not begun."""
        self.heal()
        self._disaster = None

    def heal(self) -> None:
        """One branch wins, and the other's versions since the fork are lost. Does nothing without two branches."""
        disaster = self._disaster
        if disaster is None or self._copy is None or self._lost is not None:
            return
        winner = self._copy
        if self._falls is self._copy or (not self._falls and disaster.is_split and self._scheduler.rng.random() < 0.5):
            winner = self.main
        self._lost = self.main if winner is self._copy else self._copy
        self._judges = {process: judge for process, judge in self._judges.items() if judge is self._lost}
        self._talks_to = {}
        self.main = winner
        winner.wire.take_over(self._lost.wire)
        winner.beside(self._lost)
        self.lost_versions = self._lost.grown
        self.lost_blobs.intersection_update([key for key in self.lost_blobs if winner.needs(key)])
        self._scheduler.note(f"-- consensus is at {winner.seqno}, {self.lost_versions} versions are lost")

    def replaced(self, new: VersionedData, expected: Tip | None) -> None:
        """A recovery has replaced the log, which it believed to end with `expected`, by `new`. No disaster comes after it."""
        if (head := self.main.head) is not None and head.tip != expected:
            self._scheduler.fail(f"a recovery that knew {expected} has replaced a log that ended at {head.tip}")
        lost, self._disaster = self.main, None
        for process in self._processes:
            self._judges[process] = self.judge(process)
        self.main = self._recoveries.begin_anew(new, lost, self._logs)
        self._logs.append(self.main)
        self._lost, self._talks_to = lost, {}
        self.main.beside(lost)
        self.recovered += 1
        self.lost_blobs |= {key for key in self.main.gone() if self.main.needs(key)}

    def begins(self, task: Task) -> None:
        """An operation of `task` begins."""
        self._met[task] = set()

    def served(self, task: Task, witness: Witness) -> None:
        """`task` got an answer from the branch of `witness`."""
        self._met.setdefault(task, set()).add(witness)

    def look(self, known: ShardState, fetch: Callable[[], T], fetched: Callable[[T], ShardState]) -> T:
        """Called when the running task refreshes the cached state `known` from consensus. After a success, that branch judges its
        process.
        """
        task = self._scheduler.current
        before, self._met[task] = self._met.get(task, set()), set()
        try:
            answer = fetch()
            self._looked(task, known, fetched(answer))
        finally:
            self._met[task] |= before
        return answer

    def _looked(self, task: Task, known: ShardState, found: ShardState) -> None:
        process, talks_to = task.process, self.talks_to(task.process)
        if len(self._logs) == 1:
            return
        knew, finds = self._holders(known), self._holders(found)
        if knew and finds and not set(finds) <= set(knew):
            self._scheduler.fail(f"{process.name} goes on with {found.tip} from {known.tip}, which is of another log")
        if self._met[task] != {talks_to}:
            return  # the look began when the process talked to another branch
        if knew and talks_to not in knew:
            self._scheduler.fail(f"{process.name} looks, and does not notice that {known.tip}, which it knows, is lost")
        knows = self._holders(self._known(process))
        if not knows or talks_to in knows:  # otherwise another task got a late answer meanwhile
            self._judges[process] = talks_to

    def deleting(self, process: Process, key: str) -> None:
        """Called before a blob is deleted. Remembers the blob if it is needed by a branch of which the process could not know."""
        if parse_deletions_key(key) is not None:
            return
        judge = self.judge(process)
        partial = parse_blob_key(key).partial
        if any(log is not judge and log.needs(partial) for log in self._logs):
            self.lost_blobs.add(partial)

    def _known(self, process: Process) -> ShardState | None:
        return self._processes[process]() if process in self._processes else None

    def _holders(self, state: ShardState | None) -> list[Witness]:
        """The logs that have, or had, that state."""
        return [] if state is None or len(self._logs) == 1 else [log for log in self._logs if log.has(state.tip)]


@contextmanager
def watched_looks(branches: Branches) -> Iterator[None]:
    """In the block, every look of a process at consensus goes through `branches`."""
    original, original_give_up = Applier._fetched, Applier._give_up

    def fetched(self: Applier, current: ShardState) -> tuple[str, ShardState, dict[SeqNo, bytes]]:
        return branches.look(current, lambda: original(self, current), lambda found: found[1])

    def give_up(self: Applier, error: ForkedLog) -> NoReturn:
        branches.finds_out()
        original_give_up(self, error)

    Applier._fetched = fetched  # type: ignore[method-assign]  # for one history
    Applier._give_up = give_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        Applier._fetched = original  # type: ignore[method-assign]
        Applier._give_up = original_give_up  # type: ignore[method-assign]


class RoutedConsensus:
    """The consensus store of one process. A call goes to the branch that the process talks to when the call begins."""

    def __init__(self, branches: Branches, process: Process, network: Network, scheduler: Scheduler) -> None:
        self._branches, self._process = branches, process
        self._network, self._scheduler = network, scheduler
        self._ways: dict[int, Consensus] = {}

    def _way(self) -> tuple[Witness, Consensus]:
        witness = self._branches.talks_to(self._process)
        way = self._ways.setdefault(id(witness), self._faulty(witness))
        return witness, way

    def _faulty(self, witness: Witness) -> Consensus:
        watched = WatchedConsensus(witness, partial(self._branches.committed, witness), self._branches.replaced)
        return FaultyConsensus(watched, self._network)

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        witness, way = self._way()
        found = way.head(key)
        self._branches.served(self._scheduler.current, witness)
        return found

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        witness, way = self._way()
        is_recovery = isinstance(self._scheduler.current.doing, Recovering)
        if expected is None and key == witness.shard_id and not is_recovery:
            self._branches.creating(self._scheduler.current, witness)
        result = way.compare_and_set(key, expected, new)
        self._branches.served(self._scheduler.current, witness)
        return result

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        witness, way = self._way()
        found = way.scan(key, from_seqno, limit)
        self._branches.served(self._scheduler.current, witness)
        return found

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        return self._way()[1].truncate(key, before, known)

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        return self._way()[1].replace(key, expected, new)

    def list_keys(self) -> Iterator[str]:
        """See Consensus."""
        return self._way()[1].list_keys()

    def address(self) -> str:
        """See Consensus."""
        return self._branches.main.consensus.address()

    def close(self) -> None:
        """See Consensus."""


class JudgedBlob(WatchedBlob):
    """The blob store of one process. The branch that the process knows judges its calls."""

    def __init__(self, branches: Branches, process: Process, scheduler: Scheduler) -> None:
        super().__init__(lambda: branches.judge(process))
        self._branches, self._process, self._scheduler = branches, process, scheduler

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob."""
        self._branches.listed(self._scheduler.current)
        return super().list_prefix(prefix)

    def delete(self, key: str) -> int | None:
        """See Blob."""
        self._branches.deleting(self._process, key)
        return super().delete(key)
