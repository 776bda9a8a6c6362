"""The one place that changes durable state: a pure step on the cached state, then one compare-and-set (spec 9.1, 9.2).

Owns this process's copy of a shard's state; all handles of one shard share it. A refresh has one path, whoever asks
for it. Invariant: the cached state is one that consensus acknowledged, and its seqno never goes back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.errors import Indeterminate, InvariantViolated
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import CasResult, SeqNo
from persist_engine.model.commands import Answer, Command
from persist_engine.model.ids import ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.state import ShardState
from persist_engine.model.state_diff import apply as apply_state_diff
from persist_engine.model.step import Refused, step
from persist_engine.model.views import sealed
from persist_engine.shard.gauges import count_commit, shard_gauges
from persist_engine.shard.versions import StateVersions
from persist_engine.shard.watch import StateWatch

NO_MAINTENANCE = Maintenance()
#: How long one command waits for another of this process to finish its compare-and-set. Taking turns saves lost
#: races against ourselves; when the other is stuck in a store call we go ahead: consensus decides anyway.
_TURN_S = 1.0


class UnknownOutcome(Indeterminate):
    """A command's compare-and-set may have happened. `answer` is what it would then have answered."""

    def __init__(self, message: str, *, answer: Answer) -> None:
        super().__init__(message)
        self.answer = answer


class Applier:
    """The shared state of one shard in this process. Thread-safe."""

    def __init__(self, state: ShardState, versions: StateVersions) -> None:
        self.versions = versions
        self.watch = StateWatch()
        self._state = sealed(state)
        self._install_lock = threading.Lock()
        self._turn = threading.Lock()
        versions.metrics.watch_shard(state.shard_id, self, lambda applier: shard_gauges(applier.state))

    @property
    def shard_id(self) -> ShardId:
        """The shard."""
        return self._state.shard_id

    @property
    def state(self) -> ShardState:
        """The newest state this process knows of: one that was current, maybe stale by now. Immutable, costs
        nothing.
        """
        return self._state

    def apply(self, command: Command, *, is_write: bool) -> tuple[Answer, Maintenance]:
        """Take `command` on the newest state until it commits or is refused; its answer and the work it leaves for
        later.

        A commit is linearized. A refusal is decided on the cached state without a round trip, which may be stale:
        refetch where that matters. Lost races are retried here; UnknownOutcome is raised when it may be committed.
        The clock is read on every attempt. `is_write` marks commands of writers, which are handed garbage
        collection.
        """
        versions = self.versions
        env, metrics = versions.env, versions.metrics
        name = type(command).__name__
        started_s = env.monotonic_s()
        metrics.count("command_started", name=name)
        while True:
            with self._taking_turns():
                before = self._state
                stepped = step(
                    before,
                    command,
                    now_ms=env.now_ms(),
                    hostname=env.hostname(),
                    applier_version=APPLIER_VERSION,
                    settings=versions.settings,
                    is_write=is_write,
                )
                if isinstance(stepped, Refused):
                    metrics.count("command", name=name, outcome="refused")
                    return stepped.answer, NO_MAINTENANCE
                try:
                    result = versions.try_compare_and_set_current(
                        expected=before.seqno, state=stepped.state, diff=stepped.diff
                    )
                except Indeterminate as error:
                    metrics.count("command", name=name, outcome="indeterminate")
                    raise UnknownOutcome(str(error), answer=stepped.answer) from error
                if result is CasResult.COMMITTED:
                    self._install(stepped.state)
            if result is CasResult.COMMITTED:
                metrics.count("command", name=name, outcome="committed")
                metrics.observe_s("command", env.monotonic_s() - started_s, name=name)
                count_commit(metrics, name, stepped.diff)
                return stepped.answer, stepped.maintenance
            metrics.count("command", name=name, outcome="cas_mismatch")
            self._fetch_after_lost_race(before)

    def fetch_and_update(self, hint: SeqNo | None = None) -> None:
        """Bring the cached state up to consensus. Linearized: sees all that was acknowledged before the call.

        With `hint` (the version the caller has looked at) returns at once when the cached state is already newer.
        """
        current = self._state
        if hint is not None and hint < current.seqno:
            return
        versions = self.versions
        limit = versions.settings.maintenance.recent_diffs_max
        live = versions.fetch_diffs_after(current.shard_id, current.seqno, limit=limit)
        if not live:
            versions.metrics.count("update_state", path="empty")
            return
        if len(live) < limit and live[0].seqno == current.seqno + 1:
            state = current
            for diff in versions.decode_diffs_after(current.shard_id, current.seqno, live):
                state = apply_state_diff(state, diff, count=versions.count_apply)
            self._install(sealed(state))
            versions.metrics.count("update_state", path="fast")
            return
        # Too far behind to catch up diff by diff, or the diffs that follow ours are truncated: start from a rollup.
        hinted = live if len(live) < limit else None
        self._install(versions.fetch_current_state(current.shard_id, hinted))
        versions.metrics.count("update_state", path="slow")

    def _fetch_after_lost_race(self, before: ShardState) -> None:
        self.fetch_and_update(before.seqno)
        if self._state.seqno <= before.seqno:
            # The head is not what we saw acknowledged, and nothing came after it: the log lost versions.
            raise InvariantViolated(
                f"consensus {self.versions.consensus.address()} lost acknowledged versions of shard {before.shard_id}: "
                f"it no longer ends at or after {before.seqno}",
                shard_id=before.shard_id,
                seqno=before.seqno,
            )

    def _install(self, state: ShardState) -> None:
        with self._install_lock:
            if state.seqno <= self._state.seqno:
                return
            self._state = state
        self.watch.notify()

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        taken = self._turn.acquire(timeout=_TURN_S)
        if not taken:
            self.versions.metrics.count("command_turn_timeout")
        try:
            yield
        finally:
            if taken:
                self._turn.release()
