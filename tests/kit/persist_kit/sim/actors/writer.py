"""The actor that appends its own rows, in all supported ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persist_engine.base.errors import (
    AmbiguousAppend,
    BatchExpired,
    InvalidUsage,
    InvariantViolated,
    SchemaMismatch,
    Unavailable,
)
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended, AppendOutcome, ProgressMismatch, UpperMismatch
from persist_engine.model.commands import SchemaEvolved
from persist_engine.model.frontier import Antichain
from persist_engine.model.maintenance import Maintenance
from persist_engine.rows.schema import Schema
from persist_engine.testing.oracle import Update
from persist_engine.work.perform import perform

from persist_kit.sim.actors.actor import WAIT_S, Actor
from persist_kit.sim.actors.schemas import LARGE, SCHEMAS, SMALL, Data, cut, padded, position_of
from persist_kit.sim.calls import CLOSED, Append, frontier_of
from persist_kit.world import SCHEMA

#: The first id of rows that several writers share. The ids of one append's own rows are below.
_AGREED = 1_000_000


@dataclass(frozen=True)
class Letter:
    """A staged batch that one process sends to another."""

    lower: int
    upper: int
    updates: list[Update]
    data: bytes


class Writer(Actor):
    """Appends in all supported ways."""

    handle: WriteHandle

    def open(self) -> None:
        self.schema = SCHEMA
        if self.history.plan.evolves and self.rng.random() < 0.6:
            self.client.initialise(self.history.shard_id, SCHEMA)
            self.schema = self._evolved() if self.rng.random() < 0.7 else self.client.schema(self.history.shard_id)
        self.handle = self.client.open_writer(self.history.shard_id, self.schema, purpose=self.name)

    def _evolved(self) -> Schema:
        """Evolves the schema by one step, unless another process is ahead or that is no longer possible. Returns the newest schema."""
        known = self.client.schema(self.history.shard_id)
        wider = SCHEMAS[min(position_of(known) + 1, len(SCHEMAS) - 1)]
        try:
            answer = self.client.evolve_schema(self.history.shard_id, wider)
        except InvalidUsage:
            if not self.history.witness.is_past():
                raise
            return known
        if isinstance(answer, SchemaEvolved):
            return wider
        if position_of(answer.current) <= position_of(wider):
            self.history.scheduler.fail(f"a wider schema is refused: {answer}")
        return answer.current

    def close(self) -> None:
        if self.rng.random() < 0.5:
            self.handle.expire()

    def operate(self) -> None:
        if self._upper() == CLOSED:
            return
        ways = [self.compare_and_append, self.append, self.stage, self.take, self.advance, self.ask_upper, self.expire]
        try:
            self.rng.choices(ways, weights=[6, 4, 2, 4, 3, 1, 3 if self.history.plan.evolves else 1])[0]()
        except InvariantViolated:
            # The one case in which the outcome of an append stays unknown. As documented, the process restarts.
            if not self.history.may_be_ambiguous:
                raise
            self.history.ambiguous += 1
            self._open()
        self.history.witness.installed(self.handle.machine.state)

    def compare_and_append(self) -> None:
        known = self._upper()
        if known == CLOSED:
            return
        lower = max(0, known + self.rng.choice([0, 0, 0, 0, -1, 1]))
        self.append_exactly(lower, lower + self.rng.randint(1, 4))

    def append_exactly(
        self, lower: int, upper: int, *, progress: tuple[str, bytes] | None = None, expected: bytes | None = None
    ) -> None:
        """Appends own rows in [lower, upper); CLOSED is a valid upper."""
        if lower >= CLOSED:
            return
        updates = self._own_rows(lower, min(upper, lower + 4))
        append = self.history.witness.begin(updates, lower=lower, upper=upper, is_exact=True)
        append.progress, append.expected_progress = progress, expected
        self._conclude(
            append,
            lambda: self.handle.compare_and_append(
                self._rows(append.updates),
                expected_upper=frontier_of(lower),
                new_upper=frontier_of(upper),
                progress=progress,
                expected_progress=expected,
            ),
        )

    def advance(self) -> None:
        """Appends as a sink does, with its source progress in the same compare-and-set."""
        begun = self.history.witness.seqno
        sink = self.rng.choice(["sink1", "sink2"])
        stored = self.client.progress(self.history.shard_id, sink)
        token = None if stored is None else stored.token
        self.history.witness.saw_progress(sink, token, since_seqno=begun)
        lower = self._upper()
        progress = (sink, f"{self.name} {self.history.rows_written}".encode())
        expected = token if self.rng.random() < 0.8 else b"a value never stored"
        self.append_exactly(lower, lower + self.rng.randint(1, 3), progress=progress, expected=expected)

    def append(self) -> None:
        known = self._upper()
        if known == CLOSED:
            return
        lower = max(0, known - self.rng.randint(0, 4))
        upper = lower + self.rng.randint(1, 6)
        agreed: list[Update] = [((_AGREED + time, "agreed"), time, 1) for time in range(lower, upper)]
        append = self.history.witness.begin(agreed, lower=lower, upper=upper, is_exact=False)
        rows = self._rows(agreed)
        bounds = Antichain.of(lower), Antichain.of(upper)
        self._conclude(append, lambda: self.handle.append(rows, lower=bounds[0], upper=bounds[1]))

    def stage(self) -> None:
        """Stages a batch for another process to append."""
        lower = self._upper()
        if lower == CLOSED:
            return
        upper = lower + self.rng.randint(1, 6)
        updates = self._own_rows(lower, upper)
        try:
            batch = self.handle.batch(self._rows(updates), lower=Antichain.of(lower), upper=Antichain.of(upper))
        except BatchExpired:
            self.history.staged_too_early += 1
            return
        self.history.mail.append(Letter(lower, upper, updates, batch.to_transmittable()))

    def take(self) -> None:
        """Appends all staged batches that fit, in one step, perhaps truncated."""
        letters, self.history.mail[:] = list(self.history.mail), []
        if not letters:
            return self.compare_and_append()
        lower = self._upper()
        fitting = [letter for letter in letters if letter.lower <= lower < letter.upper]
        try:
            batches = [self.handle.batch_from_transmittable(letter.data) for letter in fitting]
        except SchemaMismatch:  # consensus may lose the version that brought the schema
            if self.history.plan.disaster is None:
                raise
            return None
        if not fitting:
            return None
        upper = min(letter.upper for letter in fitting)
        upper = self.rng.randint(lower + 1, upper)
        updates = [update for letter in fitting for update in letter.updates if lower <= update[1] < upper]
        append = self.history.witness.begin(updates, lower=lower, upper=upper, is_exact=True)

        def attempt() -> AppendOutcome:
            try:
                return self.handle.compare_and_append_batch(
                    batches, expected_upper=Antichain.of(lower), new_upper=Antichain.of(upper)
                )
            except (Unavailable, AmbiguousAppend):
                self.handle.delete_batches(batches)  # clean up, even while the append may still be under way
                raise

        if not self._conclude(append, attempt):
            self.handle.delete_batches(batches)
        return None

    def ask_upper(self) -> None:
        begun = self.history.scheduler.steps
        if self.rng.random() < 0.5:
            known = self.handle.upper
            if not known.is_empty():
                self.handle.wait_for_upper_past(known, timeout=WAIT_S)
            return
        upper = self.history.client_upper(self.client)
        self.history.witness.saw_upper(upper, since_step=begun, what="fetch_recent_upper")

    def expire(self) -> None:
        try:
            self.handle.expire()
        finally:
            self._open()

    def maintain(self, maintenance: Maintenance) -> None:
        """Performs the maintenance that an own append returned."""
        perform(self.handle.machine, maintenance)

    def _upper(self) -> int:
        upper = self.handle.fetch_recent_upper() if self.rng.random() < 0.5 else self.handle.shared_upper()
        return CLOSED if upper.time is None else upper.time

    def _own_rows(self, lower: int, upper: int) -> list[Update]:
        """Rows of this append alone and, sometimes, one that many appends share, to be consolidated."""
        rows_max = self.history.plan.rows_max
        self.history.rows_written += rows_max + 10
        first = self.history.rows_written
        updates: list[Update] = [
            ((first + index, "own", *self._added_columns()), self.rng.randrange(lower, upper), 1)
            for index in range(self.rng.randint(0, rows_max))
        ]
        if self.rng.random() < 0.4:
            updates.append(((0, "shared"), self.rng.randrange(lower, upper), self.rng.choice([-1, 1, 2])))
        return updates

    def _added_columns(self) -> Data:
        """The values of the columns that the handle's schema adds to SCHEMA."""
        position = position_of(self.schema)
        if not position:
            return ()
        sizes = [None, SMALL, *([LARGE] if position == len(SCHEMAS) - 1 else [])]
        return cut((self.rng.choice([None, "x"]), self.rng.choice(sizes) if position > 1 else None))

    def _rows(self, updates: list[Update]) -> list[Any]:
        """The updates as rows of the handle's schema."""
        columns = [(tuple(padded(data, self.schema)), time, diff) for data, time, diff in updates]  # type: ignore[arg-type]  # a row
        return [(((each[0],), each[1:]), time, diff) for each, time, diff in columns]

    def _conclude(self, append: Append, call: Callable[[], AppendOutcome]) -> bool:
        """Carries `append` out and reports it to the witness. Returns whether it was appended."""
        try:
            with self.history.scheduler.doing(append):
                outcome = call()
        except BatchExpired:
            self.history.staged_too_early += 1
            self.history.witness.expired(append)
            return False
        witness = self.history.witness
        match outcome:
            case Appended(maintenance=maintenance):
                witness.acknowledged(append)
                if self.rng.random() < self.history.plan.writers_maintain:
                    self.maintain(maintenance)
            case UpperMismatch(current=current):
                witness.refused(append, current=current)
            case ProgressMismatch(current=stored):
                witness.outdated(append, None if stored is None else stored.token)
            case _:
                self.history.scheduler.fail(f"{append} answered {outcome}")
        return isinstance(outcome, Appended)
