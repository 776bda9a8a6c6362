"""Appends whose rows nobody named beforehand: what a sink corrects, what an upsert retracts. Owns how they are judged.

Who calls only says what the shard must come to. The rows are read from the log as they are committed, by nothing but the
decoders, so that a sink's word counts for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from persist_engine.client.read.leased import part_source
from persist_engine.model.frontier import Antichain
from persist_engine.model.state import ShardState
from persist_engine.parts.listings import expand
from persist_engine.storage.blob import Blob
from persist_engine.testing.oracle import Oracle, Update

from persist_kit.world import SCHEMA


class Decided(ABC):
    """On whose behalf rows are appended that the engine decided on."""

    @abstractmethod
    def judge(self, oracle: Oracle, lower: int, upper: int) -> str | None:
        """What is wrong with [lower, upper), just committed and already in `oracle`; None when it is right."""

    def forked(self, oracle: Oracle, copy: Oracle) -> None:
        """There is a copy of the log, which what was committed so far is in, too, and nothing that comes."""
        return


def appended_rows(blob: Blob, state: ShardState, lower: Antichain) -> list[Update]:
    """What the newest version, `state`, appended at `lower`."""
    source = part_source(state.shard_id, SCHEMA, None, blob, None)
    batches = [batch for batch in state.trace.batches() if lower <= batch.desc.lower]
    tables = [
        table
        for batch in expand(source, batches)
        for part in batch.part_list()
        for table in source.decode(source.get(part, batch.desc), part, batch.desc)
    ]
    return [
        ((row["key"]["id"], row["val"]["name"]), row["time"], row["diff"])
        for table in tables
        for row in table.to_pylist()
    ]
