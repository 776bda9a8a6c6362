"""Begins a lost log anew from a state in blob: first the rollup, then one compare-and-set, as at a shard's creation."""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.version import APPLIER_VERSION, parse_version
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.codec.keys import blob_key, rollup_key
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.model.ids import RollupId
from persist_engine.model.rebirth import RANDOM_BYTES, SEQNOS_LEFT_OUT, reborn, recovered_birth
from persist_engine.model.state import ShardState
from persist_engine.shard.versions import StateVersions


def begin_anew(
    versions: StateVersions,
    base: ShardState,
    *,
    base_key: str,
    after: SeqNo,
    replaces: Tip | None,
    existing: frozenset[str],
) -> ShardState | None:
    """Makes `base` the first version of a new log, past `after`. Returns its state, or None when the log no longer ends with `replaces`
    (with `replaces` None: when a log exists by now). `base_key` is the partial key of the rollup of `base`. `existing` holds the
    partial keys of the existing blobs.

    Deletes nothing but its own rollup, and only after a race that it certainly lost. Retries. A crash may leave that rollup behind.
    """
    env, shard_id = versions.env, base.shard_id
    seqno = SeqNo(max(after, base.seqno) + SEQNOS_LEFT_OUT)
    key = rollup_key(seqno, RollupId.from_bytes(env.random_bytes(16)))
    state, diff = reborn(
        base,
        seqno=seqno,
        birth=recovered_birth(base.birth, env.random_bytes(RANDOM_BYTES)),
        base_key=base_key,
        rollup_key=key,
        existing=existing,
        now_ms=env.now_ms(),
        hostname=env.hostname(),
        applier_version=max(base.applier_version, APPLIER_VERSION, key=parse_version),
    )
    new = VersionedData(state.seqno, encode_state_diff(diff))
    state = replace(state, tag=new.tip.tag)
    data = encode_rollup(Rollup(state, ()))
    versions.retry.external("set rollup", lambda: versions.blob.set(blob_key(shard_id, key), data), shard=shard_id)

    def swap() -> CasResult:
        if replaces is None:
            return versions.consensus.compare_and_set(shard_id, None, new)
        return versions.consensus.replace(shard_id, replaces, new)

    if versions.retry.external("recover", swap, shard=shard_id) is CasResult.COMMITTED:
        return state
    head = versions.retry.external("head", lambda: versions.consensus.head(shard_id), shard=shard_id)
    if head is not None and head.tip == new.tip:
        return state  # an attempt whose outcome was unknown had succeeded
    rollups = () if head is None else versions.fetch_current_state(shard_id).rollups.values()
    if all(rollup.key != key for rollup in rollups):
        # Another recovery won, or this one won and its log was replaced or collected since. If the rollup stayed, it would be a ruin.
        versions.delete_rollup(shard_id, key)
    return None
