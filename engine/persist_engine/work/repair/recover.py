"""Recovers a shard whose log consensus lost: reports what is gone, then begins the log anew from the newest rollup in blob.

A rollup is a whole version: contents, critical readers, schemas, progress. Later commits were in the log alone and are gone. Some of their
parts may still exist; the report names them, because any Parquet reader can read their rows. Recovery deletes nothing. It may be repeated,
raced and killed: the new log appears in one compare-and-set, after its rollup. If a killed run left only that rollup, the rollup is no
reason to give up an existing log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from persist_engine.base.errors import (
    CorruptData,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    MissingBlob,
    ShardNotFound,
)
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.keys import PartKey, RollupKey, blob_key, parse_blob_key, shard_prefix
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.ids import ShardId
from persist_engine.model.rebirth import SEQNOS_LEFT_OUT, is_recovered_from
from persist_engine.model.state import ShardState
from persist_engine.parts.listings import with_nested
from persist_engine.shard.rebirth import begin_anew
from persist_engine.shard.versions import StateVersions

#: The limit on keys in a report. People read the report.
REPORTED_MAX = 1000


@dataclass(frozen=True, slots=True)
class Base:
    """A rollup and its version. Frontiers are times, None when closed. `birth` is that of its log."""

    key: str
    seqno: int
    walltime_ms: int
    birth: str
    since: int | None
    upper: int | None
    updates: int
    parts: int


@dataclass(frozen=True, slots=True)
class Log:
    """The log in consensus: its first and last version, and the birth in its newest entry (None: unreadable)."""

    earliest: int
    head: int
    birth: str | None


@dataclass(slots=True)
class Recovered:
    """The plan, or the result, of a recovery. `needed` means that the log is gone or ends before `base`. The versions `gone_from` to
    `gone_through` cannot be recovered (None: their number is unknown). `missing` holds blobs that `base` names and that do not exist.
    `left_over` holds the first REPORTED_MAX of the `left_over_count` parts that `base` does not name. `others` holds rollups that were not
    chosen. `seqno` and `birth` are those of the new log.
    """

    shard_id: ShardId
    base: Base
    log: Log | None
    needed: bool
    gone_from: int
    gone_through: int | None = None
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    left_over_count: int = 0
    others: list[Base] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    seqno: int | None = None
    birth: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return {**asdict(self), "shard_id": str(self.shard_id), "committed": self.seqno is not None}


def recover_shard(
    versions: StateVersions,
    shard_id: ShardId,
    *,
    commit: bool,
    replace_log: bool = False,
    rollup: str | None = None,
    last_seqno: int | None = None,
) -> Recovered:
    """Reports what can be recovered and, with `commit`, recovers it. Does nothing when there is no need, unless `rollup` (a whole key)
    names the rollup to use. A rollup counts as the one that it copies if a killed recovery left it, or if its log was lost before it had
    another rollup. `replace_log` gives up the log that consensus holds. `last_seqno` is the newest version known from elsewhere, such as
    a resource's status.

    Raises ShardNotFound when nothing of the shard exists, and MissingBlob when no rollup can be read. Raises InvalidUsage when rollups of
    several logs exist and `rollup` names none, when a later recovery began from an older rollup, and when an existing log must be replaced
    but `replace_log` is not given.
    """
    recovery = _Recovery(versions, shard_id)
    base, state, of = recovery.base(rollup)
    head = recovery.head()
    log = recovery.log(head)
    needed = head is None or head.seqno < of.seqno
    ends = (last_seqno, None if log is None else log.head)
    known = max((seqno for seqno in ends if seqno is not None), default=None)
    found = Recovered(shard_id, base, log, needed, gone_from=of.seqno + 1)
    if known is not None and known > of.seqno:
        found.gone_through = known
    found.others = [each for each, _ in recovery.readable if each.key != base.key]
    found.unreadable = recovery.unreadable
    found.missing, left_over = recovery.compared(state)
    found.left_over, found.left_over_count = left_over[:REPORTED_MAX], len(left_over)
    if not commit or not (needed or rollup is not None):
        return found
    if rollup is None:
        recovery.check_choice(of)
    if head is not None and not replace_log:
        raise InvalidUsage(
            f"consensus holds a log of shard {shard_id}, {SeqNo(log.earliest) if log else head.seqno} to {head.seqno}: "
            "to give it up, use --replace-log"
        )
    after = SeqNo(max(base.seqno, known or 0, *recovery.seqnos()))
    done = begin_anew(
        versions,
        state,
        base_key=base.key.removeprefix(shard_prefix(shard_id)),
        after=after,
        replaces=None if head is None else head.tip,
        existing=frozenset(recovery.existing),
    )
    if done is None:
        raise InvalidUsage(f"the log of shard {shard_id} changed meanwhile: run the command again")
    found.seqno, found.birth = int(done.seqno), done.birth.hex()
    return found


class _Recovery:
    """The blobs of one shard, listed once."""

    def __init__(self, versions: StateVersions, shard_id: ShardId) -> None:
        self._versions, self.shard_id = versions, shard_id
        self.blob, self.retry = versions.blob, versions.retry  # the attributes of a RunStore
        prefix = shard_prefix(shard_id)
        listing = versions.retry.external("list", lambda: list(versions.blob.list_prefix(prefix)), shard=shard_id)
        self.existing = {info.key.removeprefix(prefix) for info in listing}
        self._keys = list(_parsed(info.key for info in listing))
        self.unreadable: list[str] = []
        self.readable = sorted(self._read(), key=lambda each: (each[0].seqno, each[0].walltime_ms), reverse=True)

    def seqnos(self) -> list[int]:
        """The seqnos of all rollups, readable or not."""
        return [int(key.seqno) for key in self._keys if isinstance(key, RollupKey)]

    def base(self, wanted: str | None) -> tuple[Base, ShardState, Base]:
        """The rollup to begin from (`wanted` or the newest), its state, and the rollup that it copies (itself if it is no copy)."""
        if not self.readable:
            if not self._keys:
                raise ShardNotFound(f"nothing of shard {self.shard_id} exists", shard_id=self.shard_id)
            raise MissingBlob(
                f"no rollup of shard {self.shard_id} can be read in {self._versions.blob.address()}, so its parts are not "
                "known. If the bucket keeps versions, restore a deleted rollup (v<seqno>/r<id>) there",
                key=blob_key(self.shard_id, "v"),
            )
        if wanted is not None:
            for each in self.readable:
                if each[0].key == wanted:
                    return (*each, each[0])
            raise InvalidUsage(f"no rollup {wanted} of shard {self.shard_id} can be read")
        copies = self._copies()
        newest, *older = (base for base, _ in self.readable if base.key not in copies)
        strangers = _strangers([newest, *older])
        if strangers:
            logs = ", ".join(f"{each.key} (born as {each.birth})" for each in (newest, *strangers))
            text = f"rollups of several logs of shard {self.shard_id} exist: {logs}; name one with --rollup"
            raise InvalidUsage(text)
        # Prefer a copy: the new log then also descends from the log of the copy, so the copy is no ruin.
        taken = next(each for each in self.readable if copies.get(each[0].key, each[0].key) == newest.key)
        return (*taken, newest)

    def check_choice(self, base: Base) -> None:
        """Raises InvalidUsage when a later recovery, perhaps a killed one, copied an older rollup than `base`, the newest."""
        copies = self._copies()
        for each, _ in self.readable:
            origin = copies.get(each.key, base.key)
            if origin != base.key and each.seqno - SEQNOS_LEFT_OUT >= base.seqno:
                text = (
                    f"{each.key} is of a later recovery, which copied {origin}, an older rollup than {base.key}; perhaps it was killed: "
                    "name one of them with --rollup"
                )
                raise InvalidUsage(text)

    def _copies(self) -> dict[str, str]:
        """Maps each rollup that only copies another readable one to the one that it copies, both by whole key. Recoveries write copies;
        they are listed here when their log never began or has no other rollup.
        """
        births = Counter(base.birth for base, _ in self.readable)
        readable = {base.key for base, _ in self.readable}
        copied: dict[str, str] = {}
        for base, state in reversed(self.readable):
            older = max((seqno for seqno in state.rollups if seqno < state.seqno), default=state.seqno)
            origin = blob_key(self.shard_id, state.rollups[older].key) if older in state.rollups else base.key
            is_first = state.seqno - older >= SEQNOS_LEFT_OUT
            if is_first and births[base.birth] == 1 and origin in readable:
                copied[base.key] = copied.get(origin, origin)
        return copied

    def head(self) -> VersionedData | None:
        """The newest entry that consensus holds."""
        consensus, shard_id = self._versions.consensus, self.shard_id
        return self._versions.retry.external("head", lambda: consensus.head(shard_id), shard=shard_id)

    def log(self, head: VersionedData | None) -> Log | None:
        """The log that ends with `head`."""
        if head is None:
            return None
        first = self._versions.fetch_diffs_after(self.shard_id, SeqNo(0), limit=1)
        try:
            birth: str | None = decode_state_diff(head.data, key=f"{self.shard_id} {head.seqno}").birth.hex()
        except (CorruptData, Incompatible, InvariantViolated):
            birth = None
        return Log(int(first[0].seqno if first else head.seqno), int(head.seqno), birth)

    def compared(self, state: ShardState) -> tuple[list[str], list[str]]:
        """Whole keys of missing blobs that `state` names, and of existing parts that it does not name."""
        blobs = (blob for blob in live_blobs(state) if blob.kind != "rollup")
        named = {blob.partial_key for blob in with_nested(self, blobs, lambda _: None)}
        missing = sorted(blob_key(self.shard_id, key) for key in named - self.existing)
        parts = {key.partial for key in self._keys if isinstance(key, PartKey)}
        return missing, sorted(blob_key(self.shard_id, key) for key in parts - named)

    def _read(self) -> Iterable[tuple[Base, ShardState]]:
        for key in self._keys:
            if not isinstance(key, RollupKey):
                continue
            whole = blob_key(self.shard_id, key.partial)
            data = self._get(whole)
            if data is None:
                continue
            try:
                state = decode_rollup(data, key=whole).state
            except (CorruptData, Incompatible, InvariantViolated):
                self.unreadable.append(whole)
                continue
            yield _described(whole, state), state

    def _get(self, key: str) -> bytes | None:
        return self._versions.retry.external("get", lambda: self._versions.blob.get(key), shard=self.shard_id)


def _described(key: str, state: ShardState) -> Base:
    trace = state.trace
    return Base(
        key=key,
        seqno=int(state.seqno),
        walltime_ms=state.walltime_ms,
        birth=state.birth.hex(),
        since=trace.since.time,
        upper=trace.upper.time,
        updates=trace.sizes.rows,
        parts=trace.sizes.parts,
    )


def _strangers(bases: list[Base]) -> list[Base]:
    """The rollups that belong to another log than the first rollup does; logs that recoveries began count as one with the recovered log.
    Leaves out first versions, because they hold nothing.
    """
    births = {bytes.fromhex(base.birth) for base in bases}
    family = {bytes.fromhex(bases[0].birth)}
    grows = True
    while grows:
        before = len(family)
        family |= {old for old in births if any(is_recovered_from(birth, old) for birth in family)}
        grows = len(family) > before
    return [base for base in bases if base.seqno > 1 and bytes.fromhex(base.birth) not in family]


def _parsed(keys: Iterable[str]) -> Iterable[PartKey | RollupKey]:
    for key in keys:
        try:
            yield parse_blob_key(key)
        except InvalidUsage:
            continue  # the mark, or a key of another application
