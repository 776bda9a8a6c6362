"""The witness observes every commit and every deletion in the stores, and judges it.

It derives the expected shard from the log alone: the state of every version (each diff applied to the state before), the blobs in use, and
an Oracle with the updates that were actually committed, in commit order. The answers of handles are compared with it. It changes nothing:
the engine does not notice the witness.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable
from itertools import count

from persist_engine.base.errors import PersistError
from persist_engine.base.versioned import SCAN_ALL, SeqNo, Tip, VersionedData
from persist_engine.codec.batch import decode_run_listing
from persist_engine.codec.keys import RollupKey, belongs_to_no_version, blob_key, parse_blob_key
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.batch import HollowRun, InlinePart
from persist_engine.model.diff.state_diff import apply as apply_state_diff
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, ShardId
from persist_engine.model.invariants import check_invariants
from persist_engine.model.queries import is_tombstone, seqno_since
from persist_engine.model.state import ShardState
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.testing.oracle import Oracle, Update

from persist_kit.sim.actors.schemas import cut, difference, narrowed
from persist_kit.sim.calls import Append, Recovering, frontier_of, missed_progress, time_of, wrong_since, wrong_tokens
from persist_kit.sim.decided import Decided, appended_rows
from persist_kit.sim.named import NamesWitness
from persist_kit.sim.push import Wire
from persist_kit.sim.scheduler import Scheduler


class Witness:
    """The true history of one shard."""

    def __init__(self, scheduler: Scheduler, shard_id: ShardId) -> None:
        self._scheduler = scheduler
        self.shard_id = shard_id
        self.blob = MemBlob()
        self.consensus, self._kept = MemConsensus(), MemConsensus()
        self.wire = Wire(scheduler)
        self.names = NamesWitness(scheduler)
        self.oracle = Oracle()
        self.appends: list[Append] = []
        self._numbers = count()
        self._commits: dict[int, list[tuple[int, int]]] = {}
        self._decided: dict[Decided, None] = {}
        self._answered: set[int] = set()
        """The appends for which callers have an answer from this log. They must not commit again."""
        self.forked_at: int | None = None
        self._beside: Witness | None = None
        self._beside_until = 0
        self.states: dict[int, ShardState] = {}
        self.head: ShardState | None = None
        self._uppers: list[tuple[int, Antichain]] = [(0, MINIMUM)]
        self._named: frozenset[str] = frozenset()
        self._dropped_at: dict[str, SeqNo] = {}
        self._deleted: dict[str, Witness] = {}
        """The witness that judged the deletion of each blob."""
        self.lost_blobs: set[str] = set()
        """The blobs that processes deleted because they could not know that another log needs the blobs, or would link them."""
        self._listed: dict[str, tuple[str, ...]] = {}
        self.resurrected: set[str] = set()
        self.kept: dict[str, bytes] | None = None
        """The deleted blobs by whole key, if the store keeps them."""
        self._rollups: dict[str, Tip] = {}
        """The version of every rollup that was ever written, including those of another branch."""
        self.reborn: set[str] = set()
        """The partial keys of the rollups that recoveries wrote, whether or not their logs began."""

    def fork(self) -> Witness:
        """The witness of a copy of the log, made now. Later commits to one of the two logs are not in the other. Both share the blob store,
        and callers do not know of the fork.
        """
        other = copy.copy(self)
        other.consensus = self._copied()
        other.wire = Wire(self._scheduler)
        other.oracle = copy.deepcopy(self.oracle)
        other._decided = dict.fromkeys(self._decided)
        for call in self._decided:
            call.forked(self.oracle, other.oracle)
        other.appends, other.states = list(self.appends), dict(self.states)
        other._answered = set(self._answered)
        other._commits = {number: list(pieces) for number, pieces in self._commits.items()}
        other._uppers, other._dropped_at = list(self._uppers), dict(self._dropped_at)
        self.forked_at = other.forked_at = self.seqno
        return other

    def wiped(self) -> Witness:
        """Like `fork`, with an empty log beside the same blobs."""
        other = Witness(self._scheduler, self.shard_id)
        other.blob, other._deleted, other._listed = self.blob, self._deleted, self._listed
        other.resurrected, other._rollups, other._numbers = self.resurrected, self._rollups, self._numbers
        other.lost_blobs = self.lost_blobs
        other.reborn, other.kept, other.appends = self.reborn, self.kept, list(self.appends)
        self.forked_at = other.forked_at = 0
        return other

    def anew(self, first: ShardState, base: Witness | None) -> Witness:
        """The witness of the log with which a recovery has replaced this one, in the same store. It begins with `first`, and has the
        contents that `base` had at the same upper (None: nothing). This witness keeps the copy of its log from `keep_log`.
        """
        other = self.wiped()
        other.consensus, other.wire, other._answered = self.consensus, self.wire, set(self._answered)
        upper = first.trace.upper
        if base is not None:
            other.oracle.updates = [update for update in base.oracle.updates if not upper.less_equal(update[1])]
            for number, pieces in base._commits.items():
                other._commits[number] = [piece for piece in pieces if piece[1] <= time_of(upper)]
        other.oracle.upper, other.head, other.states[first.seqno] = upper, first, first
        other._uppers = [(self._scheduler.steps, upper)]
        other._named = frozenset(
            key for blob in live_blobs(first) for key in self._with_listed(blob.kind, blob.partial_key)
        )
        self.consensus = self._kept
        self._scheduler.note(f"-- begun anew: {first.seqno} since {first.trace.since} upper {upper}")
        return other

    def is_recovering(self) -> bool:
        """Whether the present store call belongs to a recovery."""
        return isinstance(self._scheduler.acting, Recovering)

    def gone(self) -> set[str]:
        """The missing blobs that a version of any log named."""
        there = {info.key for info in self.blob.list_prefix(f"{self.shard_id}/")}
        return {key for key in (*self._named, *self._deleted) if blob_key(self.shard_id, key) not in there}

    def keep_log(self) -> None:
        """Keeps a copy of the log, because a recovery may replace the log now."""
        self._kept = self._copied()

    def has(self, tip: Tip) -> bool:
        """Whether its log has, or had, exactly this entry."""
        state = self.states.get(tip.seqno)
        return state is not None and state.tip == tip

    def rollup_tip(self, key: str) -> Tip | None:
        """The version of the rollup. None for a rollup of a first version."""
        return self._rollups.get(key)

    def rollups_there(self) -> frozenset[str]:
        """The whole keys of all rollups that exist."""
        return frozenset(info.key for info in self.blob.list_prefix(f"{self.shard_id}/v"))

    def rollups_among(self, keys: frozenset[str]) -> list[Tip]:
        """The versions of its log that have an existing rollup among `keys`."""
        tips = (self._rollups.get(key) for key in sorted(keys & self.rollups_there()))
        return [tip for tip in tips if tip is not None and self.has(tip)]

    def beside(self, lost: Witness) -> None:
        """Some processes worked with the log of `lost` until now. Calls that began before may still answer from it."""
        self._beside, self._beside_until = lost, self._scheduler.steps

    def needs(self, partial: str) -> bool:
        """Whether a live version names the blob."""
        return partial in self._named or self._dropped_at.get(partial, SeqNo(0)) > self.earliest()

    # -- what happens in the stores -----------------------------------------------------------------------------------

    def committed(self, new: VersionedData) -> None:
        """A compare-and-set has committed `new`."""
        try:
            after = self._successor(new)
            check_invariants(self.head, after, deep=True)
            self._check_blobs(after)
            wrong = wrong_since(self.head, after, command=self._scheduler.command)
            wrong = wrong or wrong_tokens(self.head, after, acting=self._scheduler.acting)
            if wrong is not None:
                self._scheduler.fail(wrong)
            self._check_append(self.head, after)
        except PersistError as error:  # which the committing call must not take for its own
            self._scheduler.fail(f"version {new.seqno} breaks a rule: {error}")
        self.head = after
        self.states[after.seqno] = after
        self._scheduler.note(f"-> {after.seqno} since {after.trace.since} upper {after.trace.upper}")

    def deleting(self, key: str) -> None:
        """A blob is about to be deleted."""
        if belongs_to_no_version(key, self.shard_id):
            return
        partial = parse_blob_key(key).partial
        if partial in self._named:
            self._scheduler.fail(f"live blob {partial} is deleted")
        self._deleted[partial] = self
        dropped = self._dropped_at.get(partial)
        if self.head is not None and dropped is not None and dropped > seqno_since(self.head):
            held = seqno_since(self.head)
            self._scheduler.fail(f"blob {partial} is deleted: unlinked at {dropped}, but readers hold {held}")

    def writing(self, key: str, value: bytes) -> None:
        """A blob is about to be written. A rollup must equal the state that the diffs lead to."""
        if belongs_to_no_version(key, self.shard_id):
            return
        parsed = parse_blob_key(key)
        if parsed.partial in self._deleted:
            # An attempt that was given up long ago takes effect after the blob was deleted. This leak is unavoidable. The scan
            # for orphans finds it.
            self.resurrected.add(parsed.partial)
        if (
            not isinstance(parsed, RollupKey) or parsed.seqno == 1
        ):  # racing processes each write their own rollup of the first version
            return
        state = decode_rollup(value, key=key).state
        if self.is_recovering():
            self.reborn.add(parsed.partial)
        elif state != self.states.get(parsed.seqno):
            self._scheduler.fail(f"rollup {parsed.partial} is not the state of that version")
        self._rollups[key] = state.tip

    def truncated(self, seqno: SeqNo, known: Tip, *, earliest: SeqNo) -> None:
        """The versions from `earliest` to before `seqno` are truncated. The process that decided it must have known this history."""
        head = self.head
        assert head is not None
        if self.states[known.seqno].tip != known:
            self._scheduler.fail(f"truncated to {seqno} by a process that knows another entry at {known.seqno}")
        if seqno > seqno_since(head):
            self._scheduler.fail(f"truncated to {seqno}, but readers hold {seqno_since(head)}")
        rollup = head.rollups.get(seqno)
        present = rollup is not None and (
            rollup.key in self.lost_blobs or self.blob.get(blob_key(self.shard_id, rollup.key)) is not None
        )
        if not present and seqno > earliest:
            self._scheduler.fail(f"truncated to {seqno}, where there is no rollup")
        left = self.garbage(below=seqno)
        if left:
            self._scheduler.fail(f"truncated to {seqno}: after a crash no version would name {sorted(left)[:3]}")

    # -- what handles answer ------------------------------------------------------------------------------------------

    def begin(self, updates: list[Update], *, lower: int, upper: int, is_exact: bool) -> Append:
        """An append is about to be called; its store calls must be made `doing` it."""
        append = Append(next(self._numbers), updates, lower, upper, is_exact, self._scheduler.steps)
        append.invoked_seqno = self.seqno
        self.appends.append(append)
        return append

    def acknowledged(self, append: Append) -> None:
        """`append` succeeded, so all of it must be in the log, each piece once."""
        self._answer(append, "appended")
        self._scheduler.note(f"{append} acknowledged")
        commits = self._committed(append)
        if append.is_exact and len(commits) != 1:
            self._scheduler.fail(f"{append} is acknowledged, but committed {len(commits)} times")
        assert self.head is not None
        if self.head.trace.upper < frontier_of(append.upper):
            self._scheduler.fail(f"{append} is acknowledged, but upper is {self.head.trace.upper}")

    def refused(self, append: Append, *, current: Antichain) -> None:
        """`append` returned an upper mismatch, so no part of it may be in the log, and `current` must have been the upper at some moment
        during the call.
        """
        self._answer(append, "refused")
        self._scheduler.note(f"{append} refused, upper {current}")
        if commits := self._committed(append):
            self._scheduler.fail(f"{append} is refused, but {commits} of it is committed")
        if append.is_exact and current == Antichain.of(append.lower):
            self._scheduler.fail(f"{append} is refused although the upper is {current}")
        self.saw_upper(current, since_step=append.invoked_at, what=f"refusal of {append}")

    def expired(self, append: Append) -> None:
        """`append` was refused because its blobs are too old, so no part of it may be in the log."""
        self._answer(append, "refused")
        self._scheduler.note(f"{append} staged too early")
        if commits := self._committed(append):
            self._scheduler.fail(f"{append} is refused, but {commits} of it is committed")

    def outdated(self, append: Append, stored: bytes | None) -> None:
        """`append` returned a progress mismatch, so no part of it may be in the log, and `stored` must have been the stored progress."""
        self._answer(append, "refused")
        self._scheduler.note(f"{append} outdated by {stored!r}")
        if commits := self._committed(append):
            self._scheduler.fail(f"{append} is refused, but {commits} of it is committed")
        if append.progress is None or stored == append.expected_progress:
            self._scheduler.fail(f"{append} is refused for progress {stored!r}, which it expects")
        self.saw_progress(append.progress[0], stored, since_seqno=append.invoked_seqno)

    def saw_progress(self, sink: str, token: bytes | None, *, since_seqno: int) -> None:
        """A call that began at `since_seqno` returned `token` as the progress of `sink`."""
        states = self._states_since(since_seqno)
        known = [None if (stored := state.progress.get(sink)) is None else stored.token for state in states]
        if token not in known:
            self._scheduler.fail(f"progress {token!r} of {sink} was returned; during the call it was {known}")

    def saw_upper(self, upper: Antichain, *, since_step: int, what: str) -> None:
        """A call that began at `since_step` returned `upper`, which must have been the upper at some moment during the call."""
        true_then = [known for step, known in self._uppers if step >= since_step]
        before = [known for step, known in self._uppers if step < since_step][-1:]
        if self._beside is not None and since_step <= self._beside_until:
            before += [known for _, known in self._beside._uppers]
        if upper not in [*before, *true_then]:
            self._scheduler.fail(f"{what} returns upper {upper}; during the call it was {[*before, *true_then]}")

    def contents_since(self, step: int) -> list[Counter[Hashable]]:
        """The contents that the log had at the moments of a call that began at `step`."""
        known = [upper for at, upper in self._uppers if at < step][-1:]
        return [
            self.oracle.contents(upper.newest_complete)
            for upper in known + [upper for at, upper in self._uppers if at >= step]
        ]

    def read(self, found: Counter[Hashable], *, as_of: int, what: str, width: int | None = None) -> None:
        """A reader of `width` columns (None: all) returned `found` as the contents at `as_of`."""
        truth = narrowed(self.oracle.contents(as_of), width)
        if found != truth:
            self._scheduler.fail(f"{what} at {as_of}: {difference(found, truth)}")

    def listened(
        self,
        found: Counter[tuple[Hashable, int]],
        *,
        as_of: int,
        frontier: Antichain,
        what: str,
        width: int | None = None,
    ) -> None:
        """A listener of `width` columns from `as_of` has reached `frontier` and has received `found`, by (data, time)."""
        truth: Counter[tuple[Hashable, int]] = Counter()
        for data, time, diff in self.oracle.updates:
            if as_of < time and not frontier.less_equal(time):
                truth[cut(data, width), time] += diff  # type: ignore[arg-type]  # a row
        truth = Counter({key: diff for key, diff in truth.items() if diff})
        if found != truth:
            self._scheduler.fail(f"{what} from {as_of} to {frontier}: {difference(found, truth)}")

    def installed(self, state: ShardState) -> None:
        """A process holds `state`, which must equal that version of the log."""
        if state != self.states.get(state.seqno):
            self._scheduler.fail(f"a process holds a state of {state.seqno} that is not in the log")

    def is_leased(self, reader_id: LeasedReaderId) -> bool:
        """Whether the reader is registered now."""
        return self.head is not None and reader_id in self.head.leased_readers

    @property
    def listings(self) -> int:
        """The number of listings of runs that were linked."""
        return len(self._listed)

    def is_past(self) -> bool:
        """Whether no time is readable any more."""
        return self.head is not None and self.head.trace.since.is_empty()

    @property
    def seqno(self) -> int:
        """The newest version; 0 before the first."""
        return 0 if self.head is None else self.head.seqno

    @property
    def grown(self) -> int:
        """The number of versions since the last fork."""
        return self.seqno - (self.forked_at or 0)

    def saw_opaque(self, critical_id: CriticalReaderId, opaque: bytes, *, since_seqno: int) -> None:
        """A call that began at `since_seqno` returned the token, so some version since then must have held it."""
        states = self._states_since(since_seqno)
        if any(is_tombstone(state) for state in states):
            return  # the shard has no readers, so any token is right
        known = [reader.opaque for state in states if (reader := state.critical_readers.get(critical_id)) is not None]
        if opaque not in known:
            self._scheduler.fail(f"token {opaque!r} was returned; during the call it was {known}")

    def is_ruin(self, key: str) -> bool:
        """Whether the blob is, or was, a rollup of a version that this log does not have."""
        tip = self._rollups.get(key)
        stands = None if tip is None else self.states.get(tip.seqno)
        return tip is not None and (stands is None or stands.tip != tip)

    def ruins(self) -> dict[str, bool]:
        """The existing rollups of versions that this log does not have, and for each whether the log alone proves that."""
        there = [info.key for info in self.blob.list_prefix(f"{self.shard_id}/v")]
        return {key: self._rollups[key].seqno >= self.earliest() for key in there if self.is_ruin(key)}

    def garbage(self, below: SeqNo | None = None) -> set[str]:
        """The partial keys of existing blobs that were linked once and that no version from `below` (None: the earliest live version)
        on names.
        """
        if below is None:
            below = self.earliest()
        listed = (info.key for info in self.blob.list_prefix(f"{self.shard_id}/"))
        there = {parse_blob_key(key).partial for key in listed if not belongs_to_no_version(key, self.shard_id)}
        there -= self.resurrected
        return {key for key, dropped in self._dropped_at.items() if key in there and dropped <= below}

    def _answer(self, append: Append, answer: str) -> None:
        append.answer = answer
        self._answered.add(append.number)

    def _states_since(self, seqno: int) -> list[ShardState]:
        """The states that a call may see if it began when `seqno` was the newest version, including those on the other branch."""
        first = seqno if self.forked_at is None else min(seqno, self.forked_at)
        states = [state for each, state in self.states.items() if each >= first]
        return states if self._beside is None else [*states, *self._beside._states_since(seqno)]

    def _committed(self, append: Append) -> list[tuple[int, int]]:
        """The pieces of `append` that the log holds, as [lower, upper)."""
        return self._commits.setdefault(append.number, [])

    def _copied(self) -> MemConsensus:
        copied, key, tip = MemConsensus(), str(self.shard_id), None
        for entry in self.consensus.scan(key, SeqNo(0), SCAN_ALL):
            copied.compare_and_set(key, tip, entry)
            tip = entry.tip
        return copied

    def earliest(self) -> SeqNo:
        """The earliest live version; 0 without any."""
        live = self.consensus.scan(str(self.shard_id), SeqNo(0), 1)
        return live[0].seqno if live else SeqNo(0)

    # -- private ------------------------------------------------------------------------------------------------------

    def _successor(self, new: VersionedData) -> ShardState:
        diff = decode_state_diff(new.data, key=f"log {new.seqno}")
        if self.head is not None:
            return apply_state_diff(self.head, diff)
        key = blob_key(self.shard_id, diff.latest_rollup_key)
        data = self.blob.get(key)
        if data is None:
            self._scheduler.fail(f"the first version names rollup {key}, which is not there")
        return decode_rollup(data, key=key).state

    def _check_blobs(self, after: ShardState) -> None:
        named = frozenset(key for blob in live_blobs(after) for key in self._with_listed(blob.kind, blob.partial_key))
        for key in sorted(named - self._named):
            if self.blob.get(blob_key(self.shard_id, key)) is None:
                if self._deleted.get(key, self) is self:
                    self._scheduler.fail(f"{after.seqno} links blob {key}, which is not there")
                self.lost_blobs.add(key)  # an orphan scan deleted it, and consensus lost the scan's staging floor
            self._dropped_at.pop(key, None)
        for key in self._named - named:
            self._dropped_at[key] = after.seqno
        self._named = named

    def _with_listed(self, kind: str, partial: str) -> tuple[str, ...]:
        """The key and, for a listing, the keys of all blobs that it lists, which live as long as the listing."""
        if kind != "run":
            return (partial,)
        if partial not in self._listed:
            key = blob_key(self.shard_id, partial)
            data = self.blob.get(key)
            if data is None:
                self._scheduler.fail(f"listing {partial} is named, but not there")
            parts = [
                part
                for part in decode_run_listing(data, key=key, shard_id=self.shard_id)
                if not isinstance(part, InlinePart)
            ]
            self._listed[partial] = (
                partial,
                *(
                    key
                    for part in parts
                    for key in self._with_listed("run" if isinstance(part, HollowRun) else "part", part.key)
                ),
            )
        return self._listed[partial]

    def _check_append(self, before: ShardState | None, after: ShardState) -> None:
        lower, upper = MINIMUM if before is None else before.trace.upper, after.trace.upper
        if lower == upper:
            return
        self._uppers.append((self._scheduler.steps, upper))
        append = self._scheduler.acting
        if isinstance(append, Decided):
            self._decided[append] = None
            rows = appended_rows(self.blob, after, lower)
            self.oracle.compare_and_append(rows, expected_upper=lower, new_upper=upper)
            wrong = append.judge(self.oracle, time_of(lower), time_of(upper))
            wrong = wrong or (missed_progress(before, after, append) if rows else None)
            if wrong is not None:
                self._scheduler.fail(f"{append} commits [{lower}, {upper}): {wrong}")
            return
        if not isinstance(append, Append):
            self._scheduler.fail(f"upper went to {upper} at {after.seqno} although no append was under way")
        piece = (time_of(lower), time_of(upper))
        fits = append.lower <= piece[0] and piece[1] <= append.upper
        wrong = missed_progress(before, after, append)
        if wrong is not None or not fits or (append.is_exact and piece != (append.lower, append.upper)):
            self._scheduler.fail(f"{append} commits [{lower}, {upper}): {wrong}")
        commits = self._committed(append)
        if append.number in self._answered or (append.is_exact and commits):
            self._scheduler.fail(f"{append} commits once more: {append.answer or commits}")
        commits.append(piece)
        self.oracle.compare_and_append(
            [update for update in append.updates if lower.less_equal(update[1])], expected_upper=lower, new_upper=upper
        )
