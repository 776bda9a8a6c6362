"""Planted bugs for the list-append histories. Each removes one safety rule from the engine of one process, for one task. They prove that
the set-up and its checker detect such bugs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import persist_engine.storage.redis.consensus
from persist_engine.model import commands
from persist_engine.model.frontier import Antichain
from persist_engine.shard.applier import NO_MAINTENANCE, Applier, UnknownOutcome
from persist_engine.shard.machine import Machine

from persist_kit.sim import mutants as sim_mutants

Put = Any
_CHECK = "if (tip or '') ~= ARGV[3] then"


def _unknown_is_failure(put: Put) -> None:
    """An append with an unknown outcome is reported as failed."""
    original = Applier.apply

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        try:
            return original(self, command, is_write=is_write)
        except UnknownOutcome:
            if not isinstance(command, commands.CompareAndAppend):
                raise
            self.fetch_and_update()
            upper = self.state.trace.upper
            answer = commands.UpperMismatch(current=upper, expected=command.batch.desc.lower, writer_upper=Antichain(0))
            return answer, NO_MAINTENANCE

    put(Applier, "apply", apply)
    put(Machine, "_mismatch", sim_mutants.refuse_anyway)


def _stale_upper(put: Put) -> None:
    """The recent upper is the cached one of this process."""
    put(Machine, "fetch_recent_upper", lambda self: self.state.trace.upper)


def _lost_commit_ignored(put: Put) -> None:
    """This process does not read batches of its unanswered commits."""
    ignored: set[Antichain] = set()
    original, original_batches = Applier.apply, Machine.snapshot_batches
    original_next = Machine.next_listen_batch

    def apply(self: Applier, command: Any, *, is_write: bool) -> Any:
        try:
            return original(self, command, is_write=is_write)
        except UnknownOutcome:
            if isinstance(command, commands.CompareAndAppend):
                ignored.add(command.batch.desc.lower)
            raise

    def without(batch: Any) -> Any:
        return type(batch).empty(batch.desc) if batch is not None and batch.desc.lower in ignored else batch

    def snapshot_batches(self: Machine, as_of: Antichain, timeout_s: float | None = None) -> Any:
        answer = original_batches(self, as_of, timeout_s)
        return tuple(without(batch) for batch in answer) if isinstance(answer, tuple) else answer

    put(Applier, "apply", apply)
    put(Machine, "snapshot_batches", snapshot_batches)
    put(Machine, "next_listen_batch", lambda self, *args, **kwargs: without(original_next(self, *args, **kwargs)))


def _redis_without_check(put: Put) -> None:
    """The script appends without comparing the head, and overwrites an existing entry at that seqno. Entries have no tags either: otherwise
    a process that has read the overwritten entry would raise CorruptData before the checker runs.
    """
    script = persist_engine.storage.redis.consensus._Script("compare_and_set")
    overwrite = (
        "if head and minus(ARGV[4], head) <= 0 and minus(ARGV[4], low) >= 0 then "
        "redis.call('LSET', list, minus(ARGV[4], low), ARGV[5]) return {'OK', 0} end "
        "if exists and minus(ARGV[4], head) ~= 1 then"
    )
    assert _CHECK in script.source, "the script compares in other words"
    script.source = script.source.replace(_CHECK, overwrite)
    script.sha1 = "0" * 40  # never loaded: always sent whole
    put(persist_engine.storage.redis.consensus, "_COMPARE_AND_SET", script)
    stores = persist_engine.storage.redis.consensus.RedisConsensus
    original = stores._remember
    put(stores, "_remember", lambda self, key, head, tip=None: original(self, key, head))
    put(persist_engine.storage.redis.consensus, "_tip_text", lambda tip: f"{int(tip.seqno)}:")


BUGS = {
    "token ignored": sim_mutants.MUTANTS["no token"],
    "unknown taken for failure": _unknown_is_failure,
    "stale upper": _stale_upper,
    "lost commit ignored": _lost_commit_ignored,
    "redis does not compare": _redis_without_check,
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """In the block, this process has the bug."""
    with sim_mutants.planting(BUGS[bug]):
        yield
