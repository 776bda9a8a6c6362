"""The only place that commits a command: a pure step on the cached state, then one compare-and-set (spec 9.1, 9.2).

This module owns this process's copy of a shard's state, which all handles of the shard share. All refreshes take the same path. Invariants:
consensus acknowledged the cached state, its seqno never goes back, and each cached state is in the past of the next. When this is broken
(ForkedLog: consensus lost versions), the applier stops working: it returns no state, commits nothing, and every call raises ForkedLog.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NoReturn

from persist_engine.base.errors import (
    CorruptData,
    Determinate,
    ForkedLog,
    Incompatible,
    Indeterminate,
    InvariantViolated,
    PersistError,
)
from persist_engine.base.retry import Backoff
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.model.commands import Answer, Command
from persist_engine.model.diff.state_diff import apply as apply_state_diff
from persist_engine.model.diff.state_diff import check_same_entry, forked_log
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.queries import sealed
from persist_engine.model.state import ShardState
from persist_engine.model.step import Refused, step
from persist_engine.shard.gauges import count_commit, shard_gauges
from persist_engine.shard.news import News
from persist_engine.shard.versions import StateVersions
from persist_engine.shard.watch import StateWatch

NO_MAINTENANCE = Maintenance()
#: How long one command waits for another command of this process to finish its compare-and-set. Taking turns avoids lost races within the
#: process. When the other command is stuck in a store call, this one proceeds, because consensus decides anyway.
_TURN_S = 1.0
#: The number of versions whose entries are remembered. Fewer versions than this pass while one commit waits for its answer.
_TAGS_MAX = 256
_NONE_PASSED: Mapping[SeqNo, bytes] = MappingProxyType({})


class UnknownOutcome(Indeterminate):
    """The compare-and-set of a command may have happened. `answer` is the command's answer in that case. `before` is the state on which it
    was decided, and `decided_ms` is the time of that decision.
    """

    def __init__(self, message: str, *, answer: Answer, before: ShardState, decided_ms: int) -> None:
        super().__init__(message)
        self.answer, self.before, self.decided_ms = answer, before, decided_ms


class Applier:
    """The shared state of one shard in this process. Thread-safe."""

    def __init__(self, state: ShardState, versions: StateVersions) -> None:
        self.versions = versions
        self.watch = StateWatch()
        self.is_marked = False
        """Whether the mark of the shard is known to exist, or not to be needed (spec 7.1)."""
        self._news = News(self.watch)
        self._state = sealed(state)
        self._tags = {state.seqno: state.tag}
        self._forked: ForkedLog | None = None
        self._install_lock = threading.Lock()
        self._turn = threading.Lock()
        versions.metrics.watch_shard(state.shard_id, self, lambda applier: shard_gauges(applier._state))
        self._catching_up = threading.Lock()

    @property
    def shard_id(self) -> ShardId:
        """The id of the shard."""
        return self._state.shard_id

    @property
    def state(self) -> ShardState:
        """The newest state that this process knows. It was current once and may be stale. It is immutable, and reading it makes no round
        trip. Raises ForkedLog once the log is known to be forked, as every method does.
        """
        if self._forked is not None:
            self._refuse(self._forked)
        return self._state

    def apply(self, command: Command, *, is_write: bool) -> tuple[Answer, Maintenance]:
        """Applies `command` to the newest state until it commits or is refused. Returns its answer and the maintenance it leaves.

        A commit is linearized. A refusal is decided on the cached state without a round trip, so it may be stale: a caller that needs a
        fresh one must refetch. Retries lost races and refusals by the store. UnknownOutcome means that the command may be committed.
        Unavailable means that this attempt was certainly not committed. Every attempt is decided anew at the current time, so that a lease
        that expired during an outage is not committed. `is_write` marks commands of writers, which receive garbage collection as
        maintenance.
        """
        versions = self.versions
        env, metrics = versions.env, versions.metrics
        name = type(command).__name__
        started_s = env.monotonic_s()
        metrics.count("command_started", name=name)
        refused: Backoff | None = None  # set while the store refuses the compare-and-set
        while True:
            result: ShardState | Determinate | None
            with self._taking_turns():
                self._take_news()
                before, decided_ms = self.state, env.now_ms()
                stepped = step(
                    before,
                    command,
                    now_ms=decided_ms,
                    hostname=env.hostname(),
                    applier_version=APPLIER_VERSION,
                    settings=versions.settings,
                    is_write=is_write,
                )
                if isinstance(stepped, Refused):
                    metrics.count("command", name=name, outcome="refused")
                    _end(refused)
                    return stepped.answer, NO_MAINTENANCE
                try:
                    result = versions.try_compare_and_set_current(before=before, state=stepped.state, diff=stepped.diff)
                except ForkedLog as error:
                    self._give_up(error)
                except Determinate as error:
                    result = error
                except Indeterminate as error:
                    metrics.count("command", name=name, outcome="indeterminate")
                    raise UnknownOutcome(
                        str(error), answer=stepped.answer, before=before, decided_ms=decided_ms
                    ) from error
                is_seen = not isinstance(result, ShardState) or self._install(result, after=before)
            if isinstance(result, Determinate):
                # Outside the turn, so that other commands do not wait for this pause.
                refused = refused or versions.retry.backoff("compare_and_set", shard=self.shard_id, kind="determinate")
                refused.wait(result)
                continue
            _end(refused)
            refused = None
            if result is not None:
                if not is_seen:
                    try:
                        self._prove(result)
                    except ForkedLog as error:
                        self._give_up(error)
                    except PersistError as error:
                        text = f"{result.seqno} is committed, but not proven to be in the log now: {error}"
                        raise UnknownOutcome(
                            text, answer=stepped.answer, before=before, decided_ms=decided_ms
                        ) from error
                metrics.count("command", name=name, outcome="committed")
                metrics.observe_s("command", env.monotonic_s() - started_s, name=name)
                count_commit(metrics, name, stepped.diff)
                return stepped.answer, stepped.maintenance
            metrics.count("command", name=name, outcome="cas_mismatch")
            self._fetch_after_lost_race(before)

    def fetch_and_update(self, hint: SeqNo | None = None) -> None:
        """Advances the cached state to the newest version in consensus. Linearized: sees everything acknowledged before the call.

        With `hint` (the version that the caller has examined), returns at once when the cached state is already newer.
        """
        while True:
            current = self.state
            if hint is not None and hint < current.seqno:
                return
            try:
                path, state, passed = self._fetched(current)
                is_done = self._install(state, after=current, passed=passed)
            except ForkedLog as error:
                self._give_up(error)
            self.versions.metrics.count("update_state", path=path)
            if is_done:
                return

    def _fetched(self, current: ShardState) -> tuple[str, ShardState, dict[SeqNo, bytes]]:
        """Returns the path taken, the newest state, which has `current` in its past, and the tags of the entries read between the two."""
        versions = self.versions
        limit = versions.settings.maintenance.recent_diffs_max
        live = versions.fetch_diffs_from(current, limit=limit)
        if live is None or len(live) == limit:
            # Too far behind to catch up diff by diff. The state fetched now may belong to another log than the diffs just read.
            return "slow", versions.fetch_later_state(current), {}
        passed: dict[SeqNo, bytes] = {}
        if not live:
            return "empty", current, passed
        state = current
        for diff in versions.decode_diffs_after(current.shard_id, current.seqno, live):
            state = apply_state_diff(state, diff, count=versions.count_apply)
            passed[state.seqno] = state.tag
        return "fast", sealed(state), passed

    def subscribe(self) -> None:
        """See watch.Pushed."""
        self.versions.push.subscribe(self.shard_id, self._news)

    def is_live(self) -> bool:
        """See watch.Pushed."""
        return self.versions.push.is_live(self.shard_id)

    def catch_up(self) -> None:
        """See watch.Pushed."""
        self._take_news()
        if self._news.is_beyond(self.state.seqno):
            self.versions.metrics.count("push", outcome="fetched")
            self.fetch_and_update()

    def _take_news(self) -> None:
        """Applies pushed entries that follow the cached state. Accepts only entries of this very log; a fetch from consensus decides
        everything else.
        """
        if self._news.is_empty():
            return
        with self._catching_up:
            known = state = self.state
            passed: dict[SeqNo, bytes] = {}
            for entry in self._news.take_after(state.seqno):
                successor = self._pushed_successor(state, entry)
                if successor is None:
                    self._news.doubt()
                    break
                state = successor
                passed[state.seqno] = state.tag
            if not self._install(state, after=known, passed=passed):
                self._news.doubt()

    def _pushed_successor(self, state: ShardState, entry: VersionedData) -> ShardState | None:
        metrics = self.versions.metrics
        try:
            (diff,) = self.versions.decode_diffs_after(state.shard_id, state.seqno, [entry])
            after = sealed(apply_state_diff(state, diff, count=self.versions.count_apply))
        except (CorruptData, Incompatible, InvariantViolated):
            metrics.count("push", outcome="foreign")
            return None
        metrics.count("push", outcome="applied")
        return after

    def _fetch_after_lost_race(self, before: ShardState) -> None:
        self.fetch_and_update(before.seqno)
        if self.state.seqno <= before.seqno:
            # Another entry won the race and has since vanished.
            self._give_up(forked_log(before, f"what came after it vanished from {self.versions.consensus.address()}"))

    def _prove(self, committed: ShardState) -> None:
        """Proves that one log contains both `committed` and the state that this process has now. Raises ForkedLog otherwise. It is needed
        when another thread advanced the cache past `committed` from a rollup, and so did not see its entry.
        """
        current = self.state
        live = self.versions.fetch_recent_live_diffs(self.shard_id)
        for known in (current, committed):
            self.versions.fetch_later_state(known, live)

    def _install(self, state: ShardState, *, after: ShardState, passed: Mapping[SeqNo, bytes] = _NONE_PASSED) -> bool:
        """Caches `state`, which has `after` in its past. `passed` holds the tags of the entries between the two. Returns False when another
        thread advanced the cache meanwhile, and it is unknown whether the cached state and `state` belong to one log: the cache is behind
        `state`, or it passed the version of `state` without seeing its entry. Gives up when another thread saw a different entry at that
        version: a server that failed may answer after this process has read from the server that took over.
        """
        with self._install_lock:
            known = self._state
            is_newer = state.seqno > known.seqno
            if is_newer and known is not after:
                return False
            if is_newer:
                self._state = state
                self._tags.update(passed)
                if len(self._tags) > 2 * _TAGS_MAX:
                    self._tags = dict(sorted(self._tags.items())[-_TAGS_MAX:])
                self._tags[state.seqno] = state.tag
            seen = self._tags.get(state.seqno)
        if seen is None:
            return False
        try:
            check_same_entry(state, seen)
        except ForkedLog as error:
            self._give_up(error)
        if is_newer:
            self.watch.notify()
        return True

    def _give_up(self, error: ForkedLog) -> NoReturn:
        """Marks the log as forked and raises `error`: the log is not that of the cached state. From now on, every call raises ForkedLog."""
        if self._forked is None:
            self._forked = error
            self.versions.metrics.count("forked_log", shard=self.shard_id)
        self.watch.notify()
        raise error

    def _refuse(self, cause: ForkedLog) -> NoReturn:
        raise ForkedLog(str(cause), **cause.detail) from cause

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        taken = self._turn.acquire(blocking=False)
        try:
            if not taken:
                env, metrics = self.versions.env, self.versions.metrics
                began_s = env.monotonic_s()
                taken = self._turn.acquire(timeout=_TURN_S)
                metrics.observe_s("command_turn", env.monotonic_s() - began_s)
                if not taken:
                    metrics.count("command_turn_timeout")
            yield
        finally:
            if taken:
                self._turn.release()


def _end(backoff: Backoff | None) -> None:
    if backoff is not None:
        backoff.answered()
