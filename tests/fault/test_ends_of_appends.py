"""How an append of unknown outcome ends: by any error, and with its request still on the way. No blob that it may have
linked, or may link yet, is deleted.
"""

from __future__ import annotations

from typing import Any

import pytest
from persist_engine import Antichain, Appended, UpperMismatch, WriteHandle
from persist_engine.base.errors import (
    AmbiguousAppend,
    CorruptData,
    Indeterminate,
    InvalidUsage,
    PersistError,
    Unavailable,
)
from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.base.versioned import CasResult
from persist_engine.client.write.batch import Batch
from persist_engine.model.frontier import EMPTY
from persist_kit.staged import named_keys
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of


def opened(*, give_up_ms: float | None = None) -> tuple[World, WriteHandle]:
    """A shard whose parts are all blobs, and a writer to it."""
    world = World(
        settings=Settings(batch=BatchSettings(inline_part_bytes_max=0), retry=RetrySettings(give_up_ms=give_up_ms))
    )
    return world, world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")


def staged(writer: WriteHandle, *, lower: int = 0, upper: int = 5) -> Batch:
    return writer.batch([row(1, "a", lower)], lower=A(lower), upper=A(upper))


class Swaps:
    """The compare-and-set of a world: each call ends as `ends` says, then as ever. "lost" happens and is not answered,
    "late" happens when `arrive` is called, an exception is raised instead.
    """

    def __init__(self, world: World, *ends: str | BaseException) -> None:
        self._world, self._ends = world, list(ends)
        self._real = world.consensus.compare_and_set
        self._late: list[Any] = []
        world.consensus.compare_and_set = self._swap  # type: ignore[method-assign]  # a network between

    def _swap(self, *request: Any) -> Any:
        end = self._ends.pop(0) if self._ends else ""
        if isinstance(end, BaseException):
            raise end
        if end == "late":
            self._late.append(request)
        elif end == "lost":
            self._real(*request)
        else:
            return self._real(*request)
        self._world.env.sleep(1)
        raise Indeterminate("no answer")

    def arrive(self) -> list[Any]:
        """What was late happens now, as far as it still can."""
        return [self._real(*request) for request in self._late]


@pytest.mark.parametrize(
    "error",
    [CorruptData("the store lost versions", key="k"), KeyboardInterrupt(), InvalidUsage("the store was closed")],
)
def test_regression_whatever_ends_an_append_of_unknown_outcome_its_blobs_may_be_in_use(error: BaseException):
    """It took place; its retry met another error than a store that is away, and the clean-up deleted linked blobs."""
    world, writer = opened()
    batch = staged(writer)
    Swaps(world, "lost", error)
    with pytest.raises((PersistError, KeyboardInterrupt)) as raised:
        writer.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(5))
    assert not isinstance(raised.value, InvalidUsage), "that would say that nothing was committed"
    batch.delete()
    assert contents(world.process(), writer.shard_id, 4) == [(1, "a", 1)]


def test_regression_an_append_whose_store_is_closed_before_its_outcome_is_known_deletes_nothing():
    world, writer = opened()
    Swaps(world, "lost", InvalidUsage("the store was closed"))
    with pytest.raises(Unavailable, match=r"may or may not have happened.*the store was closed"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    assert contents(world.process(), writer.shard_id, 4) == [(1, "a", 1)]


def test_misuse_before_anything_was_sent_is_raised_as_misuse_and_leaves_nothing():
    world, writer = opened()
    Swaps(world, InvalidUsage("the store was closed"))
    with pytest.raises(InvalidUsage, match="the store was closed"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    assert not world.blob_keys(writer.shard_id, kind="part")


@pytest.mark.parametrize("together", [False, True])
def test_regression_deleting_a_batch_stops_its_append_that_is_still_on_the_way(together: bool):
    """The caller gave up and cleaned up; then the request arrived, and the shard named blobs that were gone."""
    world, writer = opened(give_up_ms=1)
    batch = staged(writer)
    swaps = Swaps(world, "late", "late")
    with pytest.raises(Unavailable):
        writer.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(5))
    writer.delete_batches([batch]) if together else batch.delete()
    swaps.arrive()
    assert named_keys(writer) <= world.blob_keys(writer.shard_id, kind="part")
    assert writer.fetch_recent_upper() == A(0)
    assert not world.blob_keys(writer.shard_id, kind="part")
    assert writer.append([row(2, "b", 0)], lower=A(0), upper=A(5)) == Appended(A(5))
    assert contents(world.process(), writer.shard_id, 4) == [(2, "b", 1)]


def test_regression_deleting_a_copy_spares_its_rewritten_twin_that_is_still_on_the_way():
    """The copy as staged ends before the upper, so appends on the way were not looked for; its twin reaches further."""
    world, writer = opened(give_up_ms=1)
    data = staged(writer).to_transmittable()
    writer.append([row(9, "z", 0)], lower=A(0), upper=A(7))
    twin, copy = (writer.batch_from_transmittable(data) for _ in range(2))
    twin.rewrite_times(A(8), A(10))
    swaps = Swaps(world, "late", "late")
    with pytest.raises(Unavailable):
        writer.compare_and_append_batch([twin], expected_upper=A(7), new_upper=A(10), progress=("sink", b"1"))
    copy.delete()
    assert swaps.arrive()[0] is CasResult.COMMITTED
    assert contents(world.process(), writer.shard_id, 9) == [(1, "a", 1), (9, "z", 1)]
    twin.mark_spent("given up")


def test_a_batch_that_can_no_longer_be_appended_is_deleted_without_a_commit():
    world, writer = opened(give_up_ms=1)
    batch = staged(writer)
    swaps = Swaps(world, "late", "late")
    with pytest.raises(Unavailable):
        writer.compare_and_append_batch([batch], expected_upper=A(0), new_upper=A(5))
    writer.append([row(2, "b", 0)], lower=A(0), upper=A(5))
    commits = world.consensus.calls["compare_and_set"]
    batch.delete()
    assert world.consensus.calls["compare_and_set"] == commits
    swaps.arrive()
    assert world.blob_keys(writer.shard_id, kind="part") == named_keys(writer)
    assert contents(world.process(), writer.shard_id, 4) == [(2, "b", 1)]


@pytest.mark.parametrize("happened", ["lost", "late"])
def test_regression_an_append_of_unknown_outcome_to_a_shard_finalized_meanwhile_is_not_refused(happened: str):
    """Finalizing removes the writers' registrations, the only trace of the append: the answer was that nothing was appended."""
    world, writer = opened()
    other = world.process()
    reader = other.open_leased_reader(writer.shard_id, purpose="test")
    reader.downgrade_since(EMPTY)
    reader.expire()
    swaps = Swaps(world, happened)
    sleep = world.env.sleep

    def close_and_sleep(seconds: float) -> None:
        world.env.sleep = sleep  # type: ignore[method-assign]
        closer = other.open_writer(writer.shard_id, SCHEMA, purpose="closer")
        closer.append([], lower=closer.fetch_recent_upper(), upper=EMPTY)
        other.finalize(writer.shard_id)
        sleep(seconds)

    world.env.sleep = close_and_sleep  # type: ignore[method-assign]  # once, before the retry
    with pytest.raises(AmbiguousAppend, match="may or may not have happened"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    swaps.arrive()
    assert other.is_finalized(writer.shard_id)


def test_a_finalized_shard_refuses_an_append_that_was_not_sent():
    world, writer = opened()
    machine = world.process().machine(writer.shard_id)
    with world.process().open_leased_reader(writer.shard_id, purpose="test") as reader:
        reader.downgrade_since(EMPTY)
    writer.append([], lower=A(0), upper=EMPTY)
    machine.become_tombstone()
    late = world.process().open_writer(writer.shard_id, SCHEMA, purpose="late")
    outcome = late.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    assert outcome == UpperMismatch(current=EMPTY, expected=A(0))
