"""Drivers of one stream in a simulated history. Each writes, or stands by and compares, and any of them may take over at any time, because
the operator that orders it may be late or wrong. Some drivers are paused or die.

Defines the rules: the batches of the source are committed one after another, each exactly once, with the position after it in the same
commit (spec 17.12); a driver that another one fenced commits nothing; the updates of the shard between two positions are those of the
batches between them; and a batch that several drivers hold is linked once, and never after its blobs were deleted (spec 10.12).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from persist_engine.base.errors import AmbiguousAppend, BatchExpired, Fenced, MissingBlob
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.write.batch import Batch
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.model.frontier import MINIMUM, Antichain
from persist_engine.model.state import SourceProgress
from persist_engine.testing.oracle import Oracle

from persist_kit.sim.actors.actor import WAIT_S, Actor
from persist_kit.sim.actors.schemas import data_of
from persist_kit.sim.actors.tables import Fates
from persist_kit.sim.decided import Decided
from persist_kit.world import SCHEMA, row

_SINK = "stream"
#: The first id of the rows of the stream. The ids of other writers are below.
_FIRST_ID = 2_000_000
#: The number of lost appends, and of lost takeovers, after which a driver tries later.
_TRIES_MAX = 6
Rows = Counter[Hashable]


def source_rows(seed: int, batch: int) -> Rows:
    """The updates of one batch of the source of `seed`, as diffs: some own rows, and perhaps the end of a row of the batch before."""
    rng = random.Random(f"source {seed} {batch}")  # noqa: S311 - repeatable on purpose
    first = _FIRST_ID + 10 * batch
    rows: Rows = Counter({(first + index, "streamed"): 1 for index in range(rng.choice([0, 1, 1, 2, 3]))})
    before = random.Random(f"source {seed} {batch - 1}") if batch else None  # noqa: S311
    if before is not None and before.choice([0, 1, 1, 2, 3]) and rng.random() < 0.4:
        rows[first - 10, "streamed"] = -1
    return rows


def _number(progress: SourceProgress | None) -> int:
    """The last batch before a position; -1 before the first."""
    return -1 if progress is None else int(progress.token.split()[0])


class _Closed(Exception):
    """The shard is closed, so the stream ends."""


@dataclass(frozen=True)
class Note:
    """A staged batch that other drivers may find."""

    number: int
    lower: Antichain
    data: bytes


class Streaming(Decided):
    """One commit of a driver: the rows of a batch with the position after it, or a position alone."""

    moves_alone = True

    def __init__(self, rows: Rows, *, progress: tuple[str, bytes], expected: bytes | None) -> None:
        self.rows = rows
        self.progress, self.expected_progress = progress, expected
        self.fates = Fates()

    def forked(self, oracle: Oracle, copy: Oracle) -> None:
        """See Decided."""
        self.fates.forked(oracle, copy)

    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """See Decided."""
        last = upper - 1
        before, after = oracle.contents(lower - 1), oracle.contents(last)
        if last > lower and oracle.contents(last - 1) != before:
            return f"rows change before {last}, the time of the batch"
        found = Counter(after)
        found.subtract(before)
        if {data: diff for data, diff in found.items() if diff} != self.rows:
            return f"it adds {found}, and not {self.rows}"
        fate = self.fates.of(oracle)
        fate.commits += 1
        return "it is done once more" if fate.commits > 1 else None

    def __repr__(self) -> str:
        return f"stream to {self.progress} from {self.expected_progress!r}"


@dataclass(frozen=True)
class _Look:
    """The last commit of the stream, and an upper of the shard from before it was read."""

    upper: Antichain
    commit: SourceProgress | None


class Driver(Actor):
    """One driver of the stream: on standby it compares, and afterwards it writes until another driver has taken over."""

    handle: WriteHandle

    def open(self) -> None:
        self.client.initialise(self.history.shard_id, SCHEMA)
        self.handle = self.client.open_writer(self.history.shard_id, SCHEMA, purpose=self.name)
        self._driver = f"{self.name}.{self.left}"
        self._reader: ReadHandle | None = None
        self._known: _Look | None = None
        self._stored: SourceProgress | None = None
        """The position after which it writes, if it is certain."""
        self._is_certain = False
        self._writes = self.rng.random() < 0.5

    def close(self) -> None:
        if self.rng.random() < 0.5:
            self.handle.expire()

    def operate(self) -> None:
        ways = [self.write, self.pause, self.restart] if self._writes else [self.stand_by, self.take_over, self.restart]
        try:
            self.rng.choices(ways, weights=[8, 1, 1] if self._writes else [4, 2, 1])[0]()
        except BatchExpired:
            self.history.staged_too_early += 1
        except _Closed:
            self.left = 0
        except AmbiguousAppend:
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
            self._open()
        except (Fenced, MissingBlob) as error:
            reader, self._reader, self._known = self._reader, None, None
            is_leased = reader is not None and self.history.witness.is_leased(reader.reader_id)
            if is_leased and not self.history.branches.lost_blobs:
                self.history.scheduler.fail(f"{self.name} has its lease, but: {error}")

    def restart(self) -> None:
        """Ends like a driver that is stopped, and starts again as another driver."""
        self.close()
        self._open()

    def pause(self) -> None:
        """Its machine sleeps, perhaps past its lease, while other drivers continue."""
        scheduler = self.history.scheduler
        asleep_ms = self.rng.choice([50, 300, 1000])
        self.host.process.frozen_until_ms = scheduler.now_ms + asleep_ms
        scheduler.pause(0)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Commits the batch after the last one. A driver that another one has fenced stands by again."""
        for _ in range(self.rng.randint(1, 3)):
            if not self._is_certain:
                self._stored, self._is_certain = self._position(), True
            stored, self._is_certain = self._stored, False
            batch = _number(stored) + 1
            rows = source_rows(self.history.plan.seed, batch)
            progress = (_SINK, f"{batch} {self._driver}".encode())
            call = Streaming(rows, progress=progress, expected=None if stored is None else stored.token)
            answer = self._appended(call, stored, batch, rows) if rows else self._passed(call)
            if not self._is_done(call, answer):
                return

    def take_over(self) -> None:
        """Commits the position of the writing driver as its own, which fences that driver, and writes from then on."""
        for _ in range(_TRIES_MAX):
            stored = self._position()
            if stored is None:
                self._stored, self._is_certain, self._writes = None, True, True
                return
            self._driver = f"{self.name}.{self.left}'"
            progress = (_SINK, f"{_number(stored)} {self._driver}".encode())
            call = Streaming(Counter(), progress=progress, expected=stored.token)
            if self._is_done(call, self._passed(call)):
                self._writes = True
                self.history.takeovers += 1
                return

    def _position(self) -> SourceProgress | None:
        begun = self.history.witness.seqno
        stored = self.client.progress(self.history.shard_id, _SINK)
        self.history.witness.saw_progress(_SINK, None if stored is None else stored.token, since_seqno=begun)
        return stored

    def _upper(self) -> Antichain:
        upper = self.handle.fetch_recent_upper()
        if upper.is_empty():
            raise _Closed
        return upper

    def _passed(self, call: Streaming) -> AppendOutcome:
        """Commits a position without rows."""
        with self.history.scheduler.doing(call):
            upper = self._upper()
            for _ in range(_TRIES_MAX):
                answer = self.handle.compare_and_append_batch(
                    [],
                    expected_upper=upper,
                    new_upper=upper,
                    progress=call.progress,
                    expected_progress=call.expected_progress,
                )
                if not isinstance(answer, UpperMismatch):
                    break
                upper = self._upper()
        return answer

    def _appended(self, call: Streaming, stored: SourceProgress | None, number: int, rows: Rows) -> AppendOutcome:
        """Appends a batch, which this driver or another one has staged, and moves it to a later time after a lost race."""
        upper = self._upper()
        batch, is_shared = self._staged(stored, number, rows, upper)
        expected: SourceProgress | bytes | None = stored if is_shared else call.expected_progress
        try:
            for _ in range(_TRIES_MAX):
                assert upper.time is not None
                assert batch.upper.time is not None
                if batch.is_rewritten or batch.lower < upper:
                    time = max(batch.upper.time - 1, upper.time)
                    batch.rewrite_times(Antichain.of(time), Antichain.of(time + 1))
                with self.history.scheduler.doing(call):
                    answer = self.handle.compare_and_append_batch(
                        [batch],
                        expected_upper=upper,
                        new_upper=batch.upper,
                        progress=call.progress,
                        expected_progress=expected,
                    )
                if not isinstance(answer, UpperMismatch):
                    break
                upper = self._upper()
        except (BatchExpired, _Closed):
            batch.mark_spent("not appended")
            if call.fates.of(self.history.witness.oracle).commits:
                self.history.scheduler.fail(f"{call} is refused, and has happened")
            raise
        if not isinstance(answer, Appended):
            self._delete(batch, answer, is_shared=is_shared)
        return answer

    def _staged(self, stored: SourceProgress | None, number: int, rows: Rows, upper: Antichain) -> tuple[Batch, bool]:
        """The batch, and whether other drivers may hold it too. Takes one that another driver staged if it may still be appended."""
        committed = MINIMUM if stored is None else stored.upper
        for note in self.history.notes if self.rng.random() < 0.7 else ():
            if note.number == number and committed <= note.lower <= upper:
                batch = self.handle.batch_from_transmittable(note.data, is_only_copy=True)
                if batch.hollow.staged_before(self.handle.machine.staging_floor_ms) is None:
                    return batch, True
                batch.mark_spent("too old")
        assert upper.time is not None
        time = upper.time + self.rng.randint(0, 1)
        updates = [row(*data, time, diff) for data, diff in rows.items()]  # type: ignore[misc,call-arg]  # (id, name)
        batch = self.handle.batch(updates, lower=upper, upper=Antichain.of(time + 1))
        if self.rng.random() < 0.5:
            return batch, False
        note = Note(number, upper, batch.to_transmittable())
        self.history.notes.append(note)
        return self.handle.batch_from_transmittable(note.data, is_only_copy=True), True

    def _delete(self, batch: Batch, answer: AppendOutcome, *, is_shared: bool) -> None:
        """Deletes a batch that this driver did not append. One that other drivers hold is deleted as a copy, and only when none of them can
        append it any more.
        """
        if not is_shared:
            self.handle.discard(batch)
            return
        ended = answer.current if isinstance(answer, ProgressMismatch) else None
        if ended is None or ended.upper <= batch.lower:
            batch.mark_spent("left to other drivers")
        else:
            self.handle.discard(self.handle.batch_from_transmittable(batch.to_transmittable()))

    def _is_done(self, call: Streaming, answer: AppendOutcome) -> bool:
        """Whether the call was committed. Judges its answer."""
        witness, scheduler = self.history.witness, self.history.scheduler
        fate = call.fates.of(witness.oracle)
        sink, token = call.progress or ("", b"")
        match answer:
            case Appended(upper=upper):
                scheduler.note(f"{call} is done")
                witness.saw_progress(sink, token, since_seqno=0)
                if fate.commits != bool(call.rows):
                    scheduler.fail(f"{call} is acknowledged, and was committed {fate.commits} times")
                self._stored, self._is_certain = SourceProgress(token=token, upper=upper), True
                self.history.streamed += 1
                return True
            case ProgressMismatch(current=stored):
                scheduler.note(f"{call} is fenced by {stored}")
                found = None if stored is None else stored.token
                if fate.commits or found == token:
                    scheduler.fail(f"{call} is refused, and has happened")
                witness.saw_progress(sink, found, since_seqno=0)
                self._writes = False
            case UpperMismatch() if fate.commits:
                scheduler.fail(f"{call} is refused, and has happened")
            case UpperMismatch():
                self._is_certain = False
            case _:
                scheduler.fail(f"{call} answered {answer}")
        return False

    # -- on standby ---------------------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Compares the updates between two commits of the writing driver with the batches between them."""
        if self._reader is None or self._reader.since.is_empty():
            self._reader, self._known = self._open_reader(), None
        for _ in range(self.rng.randint(1, 4)):
            self.history.scheduler.pause(self.rng.choice([0, 10, 40]))
            before, look = self._known, self._look()
            self._known = look
            if before is None or before.commit is None or look.commit is None:
                continue
            first, last = _number(before.commit) + 1, _number(look.commit)
            if first <= last:
                self._compare(self._reader, before, look.commit, range(first, last + 1))
            end = look.commit.upper
            self._reader.maybe_downgrade_since(Antichain.of(end.newest_complete) if end.time else MINIMUM)

    def _open_reader(self) -> ReadHandle:
        shard_id, lease_ms = self.history.shard_id, self.history.plan.lease_ms
        return self.client.open_leased_reader(shard_id, SCHEMA, purpose=f"{self.name}, standby", lease_ms=lease_ms)

    def _look(self) -> _Look:
        upper = self.history.client_upper(self.client)
        return _Look(upper, self._position())

    def _compare(self, reader: ReadHandle, before: _Look, end: SourceProgress, batches: range) -> None:
        known = before.commit
        assert known is not None
        if not known.upper.time or not end.upper.time:
            return
        after, upto = known.upper.time - 1, end.upper.time - 1
        if len(batches) == 1 and before.upper < end.upper:
            after = max(after, upto - 1)  # a batch has one time, the last before its upper
        if after >= upto or not reader.since.less_equal(after):
            return
        answer = reader.changes(after, upto, timeout_s=WAIT_S)
        if isinstance(answer, SinceAhead):
            if self.history.witness.is_leased(reader.reader_id):
                self.history.scheduler.fail(f"{self.name} holds its since, but reading at {after} is {answer}")
            raise Fenced("the lease is lost")
        found: Rows = Counter()
        timed: Counter[tuple[Hashable, int]] = Counter()
        with answer:
            for update in answer.to_table().to_pylist():
                data = data_of(update)
                timed[data, update["time"]] += update["diff"]
                if data[0] >= _FIRST_ID:
                    found[data] += update["diff"]
        witness = self.history.witness
        timed = Counter({key: diff for key, diff in timed.items() if diff})
        witness.listened(timed, as_of=after, frontier=end.upper, what=f"standby of {self.name}")
        wanted: Rows = Counter()
        for batch in batches:
            wanted.update(source_rows(self.history.plan.seed, batch))
        self.history.compared += 1
        if {data: diff for data, diff in found.items() if diff} != {
            data: diff for data, diff in wanted.items() if diff
        }:
            self.history.scheduler.fail(f"{self.name} finds {found} for {batches}, not {wanted}")
