"""Judges appends of rows that the engine computes: the corrections of a sink, the retractions of an upsert.

The caller only states the contents that the shard must reach. The committed rows are read from the log with the decoders alone, so that the
judgement does not depend on the sink.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from persist_engine.client.read.leased import part_source
from persist_engine.model.frontier import Antichain
from persist_engine.model.state import ShardState
from persist_engine.parts.listings import expand
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob
from persist_engine.testing.oracle import Oracle, Update

from persist_kit.sim.actors.schemas import data_of


class Decided(ABC):
    """A caller of appends with rows that the engine computes."""

    progress: tuple[str, bytes] | None = None
    """The progress that a commit of rows must store; None: none."""
    expected_progress: bytes | None = None
    """The stored progress that such a commit must replace."""
    moves_alone = False
    """Whether it may store progress in a commit that does not move the upper."""

    @abstractmethod
    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """The error in [lower, upper), which was just committed and is already in `oracle`. None when it is right."""

    def moves(self, sink: str, stored: bytes | None, token: bytes) -> bool:
        """Whether its commit may replace the progress of `sink`, which is `stored`, by `token`."""
        return (self.progress, self.expected_progress) == ((sink, token), stored)

    def forked(self, oracle: Oracle, copy: Oracle) -> None:
        """The log was copied. `copy` has everything that is committed so far, and nothing that is committed later."""
        return


def appended_rows(blob: Blob, state: ShardState, lower: Antichain) -> list[Update]:
    """The rows that the newest version, `state`, appended at `lower`."""
    newest = max(state.schemas)
    source = part_source(state.shard_id, Schema.from_pair(state.schemas[newest]), newest, blob, None)
    batches = [batch for batch in state.trace.batches() if lower <= batch.desc.lower]
    tables = [
        table
        for batch in expand(source, batches)
        for part in batch.part_list()
        for table in source.decode(source.get(part, batch.desc), part, batch.desc)
    ]
    return [(data_of(row), row["time"], row["diff"]) for table in tables for row in table.to_pylist()]
