"""Changing the log of a shard's states: init, compare-and-set, rollups, truncation (spec 7).

Owns every call that changes the log or writes a rollup, except for rebirth (`shard.rebirth`). `shard.log_reader` reads the same log.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from persist_engine.base.env import Env
from persist_engine.base.errors import CodecMismatch, CorruptData, InvariantViolated, ShardLost, check
from persist_engine.base.metrics import Metrics
from persist_engine.base.settings import Settings
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import CasResult, SeqNo, VersionedData
from persist_engine.codec.keys import blob_key, rollup_key
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.model.batch import HollowRollup
from persist_engine.model.diff.state_diff import StateDiff, check_same_entry, forked_log
from persist_engine.model.ids import RollupId, ShardId
from persist_engine.model.queries import latest_rollup, sealed
from persist_engine.model.state import Clock, CodecNames, FirstHold, SchemaPair, ShardState
from persist_engine.model.step import initial_state
from persist_engine.shard.log_reader import LogReader
from persist_engine.shard.roundtrip import validate_roundtrip
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.notify import NoPush, Push

_FIRST = SeqNo(1)


class StateVersions(LogReader):
    """Initialises, changes, rolls up and truncates the log of any shard of one location. Thread-safe. Retries and errors are
    those of `LogReader`, unless a method says otherwise.
    """

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        *,
        env: Env,
        settings: Settings,
        metrics: Metrics,
        push: Push | None = None,
    ) -> None:
        super().__init__(blob, consensus, env=env, settings=settings, metrics=metrics)
        self.push = push or NoPush()

    # -- init and compare-and-set -------------------------------------------------------------------------------------

    def maybe_init_shard(
        self,
        shard_id: ShardId,
        codecs: CodecNames,
        schema: SchemaPair,
        *,
        retain_ms: int | None = None,
        critical: FirstHold | None = None,
        clock: Clock = "ms",
    ) -> ShardState:
        """Returns the shard's current state, and creates the shard first when it does not exist. Idempotent. Any number of
        processes may race.

        `schema`, `retain_ms`, `critical` and `clock` matter only when this call creates the shard, so the caller must compare its schema
        with that of the state. Raises CodecMismatch when the shard has other codecs. Raises ShardLost, and creates nothing, when there
        is no log but blobs prove that the shard had one.
        """
        recent = self.fetch_recent_live_diffs(shard_id)
        if not recent:
            ruin = self.creation.first_ruin(shard_id)
            if ruin is None:
                created = self._try_init_shard(
                    shard_id, codecs, schema, retain_ms=retain_ms, critical=critical, clock=clock
                )
                if created is not None:
                    return created
            # Another process may have created the shard during the listing. Its log is then visible by now.
            recent = self.fetch_recent_live_diffs(shard_id)
            if ruin is not None and not recent:
                raise ShardLost(self.creation.lost(shard_id, ruin), shard_id=shard_id, key=ruin)
        state = self.fetch_current_state(shard_id, recent)
        check_codecs(state, codecs)
        self.ensure_mark(state)
        return state

    def ensure_mark(self, state: ShardState) -> None:
        """Writes the mark of the shard with this `state`, unless the mark exists or a later rollup is proof enough. Must be called before
        anything is appended, because the creator of the shard may have died before it wrote the mark. Idempotent.
        """
        if set(state.rollups) == {_FIRST} and not self.creation.is_marked(state.shard_id):
            self.creation.mark(state.shard_id)

    def _try_init_shard(
        self,
        shard_id: ShardId,
        codecs: CodecNames,
        schema: SchemaPair,
        *,
        retain_ms: int | None,
        critical: FirstHold | None,
        clock: Clock,
    ) -> ShardState | None:
        key = rollup_key(_FIRST, RollupId.from_bytes(self.env.random_bytes(16)))
        state, diff = initial_state(
            shard_id=shard_id,
            codecs=codecs,
            schema=schema,
            now_ms=self.env.now_ms(),
            hostname=self.env.hostname(),
            applier_version=APPLIER_VERSION,
            rollup=HollowRollup(key, None),
            birth=self.env.random_bytes(16),
            retain_ms=retain_ms,
            critical=critical,
            clock=clock,
        )
        new = VersionedData(state.seqno, encode_state_diff(diff))
        state = replace(state, tag=new.tip.tag)
        self._set_blob(shard_id, key, encode_rollup(Rollup(state, ())))
        # This is retried on every error. If an earlier attempt did commit, the next one is a mismatch. The key below distinguishes
        # that from the commit of another process.
        result = self.retry.external(
            "init", lambda: self.consensus.compare_and_set(shard_id, None, new), shard=shard_id
        )
        if result is CasResult.COMMITTED:
            self.creation.mark(shard_id)
            return sealed(state)
        winner = self.fetch_current_state(shard_id)
        if winner.birth != state.birth and all(rollup.key != key for rollup in winner.rollups.values()):
            # Another process won, so no state names the rollup. If this one won, live versions may name it, even if the newest does
            # not any more: a collection deletes it after them (spec 1.10).
            self.delete_rollup(shard_id, key)
        return None

    def try_compare_and_set_current(
        self, *, before: ShardState, state: ShardState, diff: StateDiff
    ) -> ShardState | None:
        """Appends `diff`, which leads to `state`, iff the log still ends with the very entry of `before`. Returns `state`
        with the tag of its entry when it was committed, None when it was not. Makes one round trip.

        Retries nothing. Determinate means that the shard is certainly unchanged; the caller must decide the command again,
        because time has passed. Indeterminate means that the outcome is unknown; `shard.machine` decides what may follow.
        """
        expected = before.seqno
        if not diff.seqno_to == state.seqno == expected + 1:
            raise InvariantViolated(f"diff to {diff.seqno_to} for state {state.seqno} after {expected}")
        data = self._timed("encode", "diff", lambda: encode_state_diff(diff))
        if self.settings.maintenance.validate_roundtrip:
            validate_roundtrip(before, data, state)
        new = VersionedData(state.seqno, data)
        shard_id = state.shard_id
        result = self.consensus.compare_and_set(shard_id, before.tip, new)
        if result is not CasResult.COMMITTED:
            return None
        self.metrics.count("state_diff_bytes", len(data), shard=shard_id)
        self.push.publish(shard_id, new)
        return replace(state, tag=new.tip.tag)

    # -- rollups and truncation ---------------------------------------------------------------------------------------

    def write_rollup_for_state(self, state: ShardState) -> tuple[str, int] | None:
        """Writes `state`, with the diffs since its latest rollup, as a blob. Returns its partial key and its size in bytes. Links
        nothing: see Machine.add_rollup. Returns None when there is nothing to write: the latest rollup is of this very version,
        or another process truncated past it.
        """
        shard_id = state.shard_id
        after, previous = latest_rollup(state)
        missing = state.seqno - after
        diffs = (
            [e for e in self.fetch_diffs_after(shard_id, after, limit=missing) if e.seqno <= state.seqno]
            if missing
            else []
        )
        if not missing:
            self.metrics.count("rollup_write", outcome="noop_latest")
            return None
        if not diffs or diffs[0].seqno != after + 1:
            self.metrics.count("rollup_write", outcome="noop_truncated")
            return None
        if diffs[-1].seqno < state.seqno:
            raise forked_log(state, f"{self.consensus.address()} ends before it")
        check(
            len(diffs) == missing,
            f"diffs of {shard_id} between {after} and {state.seqno} are not dense",
        )
        check_same_entry(state, diffs[-1].tip.tag)
        key = rollup_key(state.seqno, RollupId.from_bytes(self.env.random_bytes(16)))
        rollup = Rollup(state, tuple(diffs), self._lineage(shard_id, previous.key))
        data = self._timed("encode", "rollup", lambda: encode_rollup(rollup))
        self._set_blob(shard_id, key, data)
        self.metrics.count("rollup_write", outcome="written")
        return key, len(data)

    def delete_rollup(self, shard_id: ShardId, key: str) -> None:
        """Deletes the blob of a rollup that no live state names. `key` is partial. Idempotent."""
        self.retry.external("delete rollup", lambda: self.blob.delete(blob_key(shard_id, key)), shard=shard_id)

    def truncate_diffs(self, before: SeqNo, known: ShardState) -> int:
        """Deletes the diffs before the version `before`. Returns their number. The caller guarantees that `known`, a state at or after that
        version, names an existing rollup of it. Idempotent. Raises ForkedLog, and deletes nothing, when the log ends before the entry of
        `known` or holds another entry in its place: it may then lack the entry that links the rollup.
        """
        key = known.shard_id
        dropped = self.retry.external("truncate", lambda: self.consensus.truncate(key, before, known.tip), shard=key)
        if dropped is None:
            raise forked_log(known, f"{self.consensus.address()} ends before it, or holds another entry in its place")
        return dropped

    # -- private ------------------------------------------------------------------------------------------------------

    def _lineage(self, shard_id: ShardId, previous: str) -> bytes:
        """The lineage of the rollup that follows the one at the partial key `previous`. Empty when that rollup cannot be read."""
        with contextlib.suppress(CorruptData):
            data = self._get_blob(shard_id, previous)
            if data is not None:
                return self._decode_rollup(shard_id, previous, data).lineage_of_next()
        return b""

    def _set_blob(self, shard_id: ShardId, key: str, data: bytes) -> None:
        self.metrics.count("shard_blob_sets", shard=shard_id)
        self.retry.external("set rollup", lambda: self.blob.set(blob_key(shard_id, key), data), shard=shard_id)


def check_codecs(state: ShardState, requested: CodecNames) -> None:
    """Raises CodecMismatch unless the shard was created with the codecs `requested`."""
    if state.codecs != requested:
        raise CodecMismatch(
            f"shard {state.shard_id} records the codecs {state.codecs}, not {requested}; nothing was read or changed: use a release of "
            "persist that has the recorded codecs, or another shard",
            requested=requested,
            actual=state.codecs,
        )
