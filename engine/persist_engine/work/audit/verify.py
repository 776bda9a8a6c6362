"""Verification: everything that a shard's live versions name exists, decodes, and matches its description there.

    log      diffs decode and apply one after the other from the earliest rollup; every state keeps the invariants;
             the blobs that each diff adds and releases account exactly for those that the states name
    rollups  each named rollup decodes to exactly the state that the diffs lead to
    blobs    no rollup is of a version that the log lacks; no part is newer than the newest version
    parts    all exist and have the right size; a sample is also checked for bytes, rows, sums, order and statistics

Verification only reads. It may run concurrently with writers and collectors; a blob that was collected meanwhile is not a finding. Each
problem is a finding, never an exception. Only storage errors that outlast their retries are raised.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from persist_engine.base.errors import (
    CorruptData,
    ForkedLog,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    MissingBlob,
)
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import PartKey, RollupKey, blob_key, parse_blob_key, shard_prefix
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.model.batch import (
    HollowBatch,
    HollowPart,
    HollowRollup,
    HollowRun,
    InlinePart,
    Part,
    RunKind,
    RunOrder,
    RunPart,
)
from persist_engine.model.diff.state_diff import StateDiff, deleted_blobs, inserted_blobs
from persist_engine.model.ids import ShardId
from persist_engine.model.invariants import check_invariants
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState
from persist_engine.parts.fetch import PartSource
from persist_engine.parts.listings import listed
from persist_engine.rows.schema import Schema
from persist_engine.shard.machine import Machine
from persist_engine.shard.roundtrip import is_same_trace
from persist_engine.shard.versions import StateVersions
from persist_engine.work.audit.finding import FindingKind, Verification
from persist_engine.work.audit.references import References
from persist_engine.work.audit.ruins import ruins_among
from persist_engine.work.audit.verify_parts import RunChecked, RunToCheck, check_run
from persist_engine.work.audit.walk import VersionWalk, WalkEnd, live_keys

#: The number of runs that are checked at once. Each check holds one part in memory.
CHECK_THREADS = 4

#: A batch that is not appended within an hour of its staging was abandoned, or its version is lost.
ABANDONED_AFTER_MS = 3_600_000
RECOVER = "`persist admin recover` shows what can be recovered"

#: Receives the runs checked, the runs in all, and the bytes read; for progress bars.
OnChecked = Callable[[int, int, int], None]


def verify_shard(machine: Machine, *, sample: float = 1.0, on_checked: OnChecked | None = None) -> Verification:
    """Checks everything. Reads the contents of about `sample` (0 to 1) of the parts, the same ones every time."""
    return _Verifying(machine, sample, on_checked).run()


def lost_shard(versions: StateVersions, shard_id: ShardId) -> Verification | None:
    """The verification of a shard without a log. If blobs prove that a log existed, it reports the shard as lost; otherwise None."""
    ruin = versions.creation.first_ruin(shard_id)
    if ruin is None:
        return None
    found = Verification(shard_id)
    text = f"consensus {versions.consensus.address()} has no log of the shard, but blobs of it exist: {RECOVER}"
    found.error(FindingKind.LOG_LOST, ruin, text)
    return found


def shards_without_log(versions: StateVersions, known: Collection[ShardId]) -> list[ShardId]:
    """The shards, in order, that have blobs in the blob store and are not among the shards `known` to consensus. Lists all blobs."""

    def listed() -> set[str]:
        return {info.key.partition("/")[0] for info in versions.blob.list_prefix("")}

    found = []
    for name in versions.retry.external("list", listed) - set(known):
        with contextlib.suppress(InvalidUsage):
            found.append(ShardId(name))
    return sorted(found)


class _Verifying:
    """One run of the verification."""

    def __init__(self, machine: Machine, sample: float, on_checked: OnChecked | None) -> None:
        self._machine = machine
        self._sample = sample
        self._on_checked = on_checked
        self._found = Verification(machine.shard_id)
        self._newest = machine.state
        """The newest state seen. It has the schemas of all parts seen, also when a writer evolved the schema meanwhile."""
        self._runs: dict[tuple[object, ...], RunToCheck] = {}
        self._sizes: dict[str, int] = {}
        self._listed: dict[str, tuple[Part, ...]] = {}
        self._unnamed: list[PartKey | RollupKey] = []
        self._has_walked = False

    def run(self) -> Verification:
        try:
            self._walk()
        except (CorruptData, Incompatible, InvariantViolated) as error:
            # An unreadable version hides the ones after it. Check what can still be reached.
            self._note(error, f"{self._machine.shard_id} versions", FindingKind.DIFF_DOES_NOT_APPLY)
            self._see(self._machine.state)
            self._newest = max(self._newest, self._machine.state, key=lambda state: state.seqno)
        missing = self._check_sizes() + self._check_runs()
        if self._has_walked:
            self._check_ruins()
        self._settle(missing)
        return self._found

    # -- the log and its rollups --------------------------------------------------------------------------------------

    def _walk(self) -> None:
        """Walks all live versions and gathers what they name. Restarts when a collector overtakes."""
        began_at: SeqNo | None = None
        while True:
            named = self._machine.refresh().rollups
            walk = VersionWalk(self._machine)
            first = walk.seqno
            self._found.versions, self._found.rollups = 1, 0
            self._newest = walk.state
            self._see(walk.state)
            self._check_state(walk.state, None)
            references = live_keys(walk.state)
            self._check_rollup(named.get(walk.seqno), walk.state)
            while isinstance(diff := walk.advance(), StateDiff):
                self._found.versions += 1
                self._newest = walk.state
                references -= {blob.partial_key for blob in deleted_blobs(diff)}
                references |= {blob.partial_key for blob in inserted_blobs(diff)}
                self._check_references(references, walk.state)
                self._see_diff(diff)
                self._check_rollup(named.get(walk.seqno), walk.state)
            if diff is WalkEnd.NEWEST:
                self._check_state(walk.state, None)
                self._has_walked = True
                return
            if first == began_at:
                text = f"the version after {walk.seqno} is missing from the log, but later ones exist: restore consensus, or {RECOVER}"
                self._found.error(FindingKind.LOG_GAP, f"{walk.state.shard_id} {walk.seqno}", text)
                return
            began_at = first

    def _check_state(self, state: ShardState, before: ShardState | None) -> None:
        try:
            check_invariants(before, state, deep=True)
        except InvariantViolated as error:
            self._found.error(FindingKind.INVARIANT, f"{state.shard_id} {state.seqno}", str(error))

    def _check_references(self, references: set[str], state: ShardState) -> None:
        named = live_keys(state)
        if references != named:
            odd = sorted(references ^ named)[:3]
            text = f"the diffs up to {state.seqno} account for other blobs than the state names: {odd}"
            self._found.error(FindingKind.REFERENCES_DIFFER, f"{state.shard_id} {state.seqno}", text)
            references.clear()
            references |= named

    def _check_rollup(self, rollup: HollowRollup | None, state: ShardState) -> None:
        """Checks the rollup of `state`, if the newest version names one."""
        if rollup is None:
            return
        machine = self._machine
        key = blob_key(machine.shard_id, rollup.key)
        data = machine.retry.external("verify rollup", lambda: machine.blob.get(key), shard=machine.shard_id)
        if data is None:
            return  # _check_sizes reports it
        self._found.rollups += 1
        self._found.bytes_read += len(data)
        try:
            decoded = decode_rollup(data, key=key)
        except (CorruptData, Incompatible, InvariantViolated) as error:
            self._note(error, key, FindingKind.CORRUPT)
            return
        if encode_rollup(Rollup(decoded.state)) == encode_rollup(Rollup(state)):
            return
        found, wanted = decoded.state.trace, state.trace
        bare, decoded_bare = (replace(each, trace=Trace()) for each in (state, decoded.state))
        same = encode_rollup(Rollup(decoded_bare)) == encode_rollup(Rollup(bare))
        if same and not (found.structured or wanted.structured) and is_same_trace(found, wanted):
            return
        # From older diffs, levels may be rebuilt differently (spec 20, bug 25). The batches are the same even then.
        if same and tuple(found.batches()) == tuple(wanted.batches()):
            self._found.warning(FindingKind.ROLLUP_DIFFERS, key, "holds the same batches in other levels than the log")
        else:
            self._found.error(
                FindingKind.ROLLUP_DIFFERS, key, f"is not the state that the diffs lead to at {state.seqno}"
            )

    def _note(self, error: Exception, key: str, otherwise: FindingKind) -> None:
        key = getattr(error, "detail", {}).get("key", key)
        match error:
            case MissingBlob():
                kind = FindingKind.MISSING_BLOB
            case ForkedLog():
                kind = FindingKind.LOG_FORKED
            case CorruptData():
                kind = FindingKind.CORRUPT
            case Incompatible():
                kind = FindingKind.INCOMPATIBLE
            case _:
                kind = otherwise
        self._found.error(kind, str(key), str(error))

    # -- the blobs that they name -------------------------------------------------------------------------------------

    def _see(self, state: ShardState) -> None:
        for rollup in state.rollups.values():
            self._see_rollup(rollup)
        for batch in state.trace.batches():
            self._see_batch(batch)

    def _see_diff(self, diff: StateDiff) -> None:
        for change in (*diff.rollups, *diff.hollow_batches):
            added = getattr(change, "to", None)
            if isinstance(added, HollowRollup):
                self._see_rollup(added)
            elif isinstance(added, HollowBatch):
                self._see_batch(added)
        for legacy in diff.legacy_batches:
            self._see_batch(legacy.key)

    def _see_rollup(self, rollup: HollowRollup) -> None:
        if rollup.size_bytes is not None:
            self._sizes[rollup.key] = rollup.size_bytes
        else:
            self._sizes.setdefault(rollup.key, -1)

    def _see_batch(self, batch: HollowBatch) -> None:
        for meta, members in batch.runs():
            parts = tuple(self._parts_of(members))
            is_sorted = meta.order is RunOrder.STRUCTURED
            kind = RunKind.ANY if meta.truncated else meta.kind
            self._runs[(batch.desc, parts)] = RunToCheck(batch.desc, parts, is_sorted, kind, len(parts) == 1)

    def _parts_of(self, members: Iterable[RunPart]) -> Iterator[Part]:
        """The parts of a run, in order, including those behind listings. Records the size of every blob."""
        for member in members:
            if not isinstance(member, InlinePart):
                if self._sizes.get(member.key) == member.size_bytes and isinstance(member, HollowRun):
                    yield from self._listed.get(member.key, ())
                    continue
                self._sizes[member.key] = member.size_bytes
            if isinstance(member, HollowRun):
                self._listed[member.key] = tuple(self._parts_of(self._listing(member)))
                yield from self._listed[member.key]
            else:
                yield member

    def _listing(self, run: HollowRun) -> tuple[RunPart, ...]:
        try:
            return listed(self._machine, run)
        except MissingBlob:
            return ()  # _check_sizes reports it
        except (CorruptData, Incompatible) as error:
            self._note(error, run.key, FindingKind.CORRUPT)
            return ()

    def _check_sizes(self) -> list[str]:
        """Compares sizes with one listing, made after all names were gathered. Returns the keys that are missing from it."""
        machine, prefix = self._machine, shard_prefix(self._machine.shard_id)
        expected = dict(self._sizes)
        self._found.parts = sum(1 for key in expected if not key.startswith("v"))
        for info in machine.retry.external("list", lambda: list(machine.blob.list_prefix(prefix))):
            size = expected.pop(info.key.removeprefix(prefix), None)
            if size is None and (key := _parsed(info.key)) is not None:
                self._unnamed.append(key)
            if size is not None and size >= 0 and size != info.size_bytes:
                text = f"has {info.size_bytes} bytes, state says {size}"
                self._found.error(FindingKind.WRONG_SIZE, info.key, text)
        return sorted(expected)

    def _check_ruins(self) -> None:
        """Checks whether existing blobs that no live version names belong to versions that the log lost."""
        rollups = [key for key in self._unnamed if isinstance(key, RollupKey)]
        seen = frozenset(self._sizes)
        existing = {blob_key(self._machine.shard_id, key.partial) for key in self._unnamed}
        for ruin in ruins_among(self._machine, rollups, seen.__contains__):
            if ruin.names is not None and ruin.names.isdisjoint(existing):
                continue
            kind = FindingKind.LOG_BEHIND if ruin.is_behind else FindingKind.LOG_FORKED
            what = "is no rollup of the log" if ruin.is_of_recovery else "is a rollup of versions that the log lost"
            self._found.error(kind, ruin.key, f"{what} ({ruin.why}): {ruin.remedy}")
        newest, now_ms = self._machine.state, self._machine.env.now_ms()
        ahead = sorted(
            key.partial
            for key in self._unnamed
            if isinstance(key, PartKey) and newest.walltime_ms < key.part_id.staged_ms < now_ms - ABANDONED_AFTER_MS
        )
        if ahead:
            text = (
                f"{len(ahead)} parts were staged after the newest version, {newest.seqno}, and longer ago than an hour: their "
                f"batches were abandoned, or linked by versions that the log lost; compare with status.log, or {RECOVER}"
            )
            self._found.warning(FindingKind.PARTS_AHEAD, blob_key(newest.shard_id, ahead[0]), text)

    def _check_runs(self) -> list[str]:
        """Reads the sampled parts. Returns the keys that turned out to be missing."""
        runs = [run for run in map(self._sampled, self._runs.values()) if run.parts]
        missing: list[str] = []
        for done, checked in enumerate(self._checked(runs), start=1):
            self._found.findings += [
                replace(finding, key=blob_key(self._machine.shard_id, finding.key)) for finding in checked.findings
            ]
            self._found.parts_read += checked.parts
            self._found.rows += checked.rows
            self._found.bytes_read += checked.bytes_read
            missing += checked.missing
            if self._on_checked is not None:
                self._on_checked(done, len(runs), self._found.bytes_read)
        return missing

    def _checked(self, runs: list[RunToCheck]) -> Iterator[RunChecked]:
        machine = self._machine
        schemas = {schema_id: Schema.from_pair(pair) for schema_id, pair in self._newest.schemas.items()}
        newest = schemas[max(schemas)]
        source = PartSource(machine.shard_id, machine.blob, newest, machine.retry, machine.metrics, path="verify")
        left = iter(runs)
        with ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="persist-verify") as pool:
            while window := list(islice(left, CHECK_THREADS * 4)):
                yield from pool.map(lambda run: check_run(source, run, schemas), window)

    def _sampled(self, run: RunToCheck) -> RunToCheck:
        picked = tuple(part for part in run.parts if not isinstance(part, HollowPart) or self._is_picked(part.key))
        return replace(run, parts=picked)

    def _is_picked(self, key: str) -> bool:
        return zlib.crc32(key.encode()) < self._sample * 2**32

    def _settle(self, missing: list[str]) -> None:
        """A missing blob is lost when a readable version names it. Otherwise it was collected."""
        if not missing:
            return
        try:
            references = References(self._machine)
        except (CorruptData, Incompatible, InvariantViolated):
            references = None  # the versions themselves are broken, which was reported
        for key in sorted(set(missing)):
            if references is None or references.is_needed(key):
                text = "a readable version names it, but it does not exist"
                self._found.error(FindingKind.MISSING_BLOB, blob_key(self._machine.shard_id, key), text)
            else:
                self._found.collected += 1


def _parsed(key: str) -> PartKey | RollupKey | None:
    try:
        return parse_blob_key(key)
    except InvalidUsage:
        return None  # the mark, or a key of another application
