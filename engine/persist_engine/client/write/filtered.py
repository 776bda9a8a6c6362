"""The columns for which a shard's parts get Bloom filters: which columns may have one, and how a shard gets the list.

The list is stored as an entry of progress, by an append of no rows to an empty interval (spec 17.14). codec.bloom owns the filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from persist_engine.base.errors import InvalidUsage
from persist_engine.client.write.outcomes import Appended
from persist_engine.codec.bloom import decode_filtered, encode_filtered, filtered_paths
from persist_engine.model.ids import ShardId
from persist_engine.model.state import FILTERED
from persist_engine.rows.schema import Schema

if TYPE_CHECKING:
    from persist_engine.client.client import PersistClient


def checked_filtered(columns: Sequence[str], schema: Schema) -> tuple[str, ...]:
    """The columns, each once. Raises InvalidUsage, which names the columns that can have no filter."""
    if (
        isinstance(columns, str)
        or not isinstance(columns, Sequence)
        or not all(isinstance(each, str) for each in columns)
    ):
        raise InvalidUsage("columns must be a list of the names of columns that get Bloom filters")
    wanted = tuple(dict.fromkeys(columns))
    possible = filtered_paths(schema.updates_schema, wanted)
    refused = [each for each in wanted if each not in possible]
    if refused:
        raise InvalidUsage(
            f"no Bloom filter is possible for {', '.join(refused)}: it takes a column that is no BOOLEAN, STRUCT, ARRAY or MAP, "
            "and has no dot in its name"
        )
    return wanted


def set_filtered(client: PersistClient, shard_id: ShardId, columns: Sequence[str]) -> None:
    """See PersistClient.set_filtered."""
    machine = client.machine(shard_id)
    wanted = checked_filtered(columns, machine.schema)
    with client.open_writer(shard_id, machine.schema, purpose="Bloom filters") as writer:
        while True:
            state = machine.refresh()
            stored, upper = state.progress.get(FILTERED), state.trace.upper
            if (() if stored is None else decode_filtered(stored.token)) == wanted:
                return
            if upper.time is None:
                raise InvalidUsage(f"shard {shard_id} is closed and takes no more parts")
            outcome = writer.compare_and_append(
                [],
                expected_upper=upper,
                new_upper=upper,
                progress=(FILTERED, encode_filtered(wanted)),
                expected_progress=None if stored is None else stored.token,
            )
            if isinstance(outcome, Appended):
                return
