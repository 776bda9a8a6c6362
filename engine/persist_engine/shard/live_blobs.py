"""Which parts the live versions of a shard name: what nobody but garbage collection may delete."""

from __future__ import annotations

from persist_engine.model.diff.state_diff import inserted_blobs, live_blobs
from persist_engine.model.ids import ShardId
from persist_engine.shard.versions import StateVersions


def live_part_keys(versions: StateVersions, shard_id: ShardId) -> frozenset[str]:
    """Partial keys of all parts, and listings of parts, that any live version itself names, of those acknowledged before
    the call at least.

    A part that the newest version no longer names may still be read by who holds an older one. Unbounded: fetches all
    live diffs, and a rollup.
    """
    walk = versions.fetch_all_live_states(shard_id)
    if walk is None:
        return frozenset()
    keys = {blob.partial_key for blob in live_blobs(walk.state) if blob.kind != "rollup"}
    while (diff := walk.advance()) is not None:
        keys.update(blob.partial_key for blob in inserted_blobs(diff) if blob.kind != "rollup")
    return frozenset(keys)
