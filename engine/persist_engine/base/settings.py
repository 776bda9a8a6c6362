"""Numbers, grouped by room, frozen. Components (stores, env, metrics) are passed beside them, never inside.

Read once at main, cli or job; below that nothing reads a global or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.version import APPLIER_VERSION, parse_version

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: Retention of a shard that is created without another: seven days, where their times are milliseconds.
RETAIN_MS = 7 * 24 * 3600 * 1000
#: Environment variable that switches compaction off for a whole process, whatever its settings say.
COMPACTION_DISABLED_VARIABLE = "PERSIST_COMPACTION_DISABLED"
#: Of a process's memory, for what no bound of a compaction counts: clients of S3 and Redis take 35 MiB, and allocators keep
#: of wide rows about a third of the rest.
CLIENTS_BYTES = 224 * MIB
#: So many parts as are written fit into the bound of a compaction: it holds several while it writes one.
PARTS_IN_BOUND = 8
#: Below it the process and its libraries, some 170 MiB without any data, leave too little to merge in (measured: 393 of 384 MiB).
MEMORY_BYTES_LEAST = 512 * MIB
_NO = frozenset({"", "0", "false", "no", "off"})


def _need(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise InvalidUsage(f"settings: {message}")


def _need_pauses(group: str, initial_ms: float, factor: float, clamp_ms: float) -> None:
    """A pause of nothing, or one that shrinks to it, would be a loop at full speed."""
    _need(initial_ms > 0, f"{group}.initial_ms must be more than 0")
    _need(factor >= 1, f"{group}.factor must be at least 1")
    _need(clamp_ms > 0, f"{group}.clamp_ms must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How updates become parts."""

    target_part_bytes: int = 128 * MIB
    """A part is cut when it reaches this many bytes in memory. Grows with it: memory of a writer (times outstanding parts)."""
    inline_part_bytes_max: int = 4 * KIB
    """Parts encoded smaller than this stay inside state (exclusive); 0 turns inlining off. Grows with it: state and diffs."""
    inline_total_bytes_max: int = 1 * MIB
    """Bound on inline bytes in one shard's state (exclusive); beyond it writers must flush. Grows with it: cost of opening a shard."""
    outstanding_parts_max: int = 2
    """Uploads in flight per builder before adds wait."""
    runs_max: int = 1
    """A builder merges runs while it writes until at most this many are left; below 2 every part stays a run. Grows with
    it: work of readers and compactions; shrinks with it: work of writers."""
    combine_inline: bool = True
    """Whether the inline parts of all batches in one append become one."""
    stats_bytes_max: int = 1024
    """Part statistics are trimmed to about this size."""
    run_parts_max: int | None = None
    """Longer runs that are in order are kept as listings in blob, of at most this many entries each; None: never. Grows with
    it: state; falls: reads and collection fetch listings first. Worth setting (to 1000, say) beyond some thousand parts."""

    def __post_init__(self) -> None:
        _need(self.target_part_bytes >= KIB, "batch.target_part_bytes must be at least 1 KiB")
        _need(self.inline_part_bytes_max >= 0, "batch.inline_part_bytes_max must not be negative")
        _need(self.inline_total_bytes_max >= 0, "batch.inline_total_bytes_max must not be negative")
        _need(self.stats_bytes_max >= 0, "batch.stats_bytes_max must not be negative")
        _need(self.runs_max >= 1, "batch.runs_max must be at least 1")
        _need(self.outstanding_parts_max >= 1, "batch.outstanding_parts_max must be at least 1")
        _need(self.run_parts_max is None or self.run_parts_max >= 2, "batch.run_parts_max must be at least 2, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How shards are read."""

    stats_audit_percent: int = 0
    """Of a hundred parts that statistics let a read skip, so many are fetched all the same, to see that they held no row it
    wanted. Grows with it: what filtered reads fetch; and how soon lying statistics are found."""

    def __post_init__(self) -> None:
        _need(0 <= self.stats_audit_percent <= 100, "read.stats_audit_percent must be from 0 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Permissions with an end."""

    reader_lease_ms: int = 15 * 60 * 1000
    """A leased reader that has not heartbeat for this long is removed; it beats every half of it."""
    writer_lease_ms: int = 60 * 60 * 1000
    """A writer's registration (token, last upper) lives this long after its last append."""
    critical_downgrade_interval_ms: int = 30_000
    """Critical sinces move at most this often unless forced."""

    def __post_init__(self) -> None:
        _need(self.reader_lease_ms >= 0, "lease.reader_lease_ms must not be negative")
        _need(self.writer_lease_ms >= 0, "lease.writer_lease_ms must not be negative")
        _need(self.critical_downgrade_interval_ms >= 0, "lease.critical_downgrade_interval_ms must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceSettings:
    """When work falls due."""

    rollup_threshold: int = 128
    """A rollup is due when this many seqnos have passed since the last one. Grows with it: diffs to read on open."""
    rollup_claim_ms: int = 5_000
    """A claimed rollup that was not added within this time is offered again."""
    gc_versions_min: int = 32
    """GC is requested when at least this many versions could be truncated."""
    gc_claim_ms: int = 15 * 60 * 1000
    """A claimed GC that did not finish within this time is offered again."""
    gc_versions_max: int = 128_000
    """One GC request covers at most this many versions beyond the last."""
    gc_delete_concurrency: int = 32
    """Blob deletes in flight."""
    recent_diffs_max: int = 30 * 128
    """Bound of the fast scan on open; beyond it the scan jumps to the newest rollup."""
    structure_flat_traces: bool = True
    """Whether a shard whose spine structure was never stored gets it with its next version, to keep it. Off: it stays flat,
    for as long as every process that writes it leaves it so."""
    validate_roundtrip: bool = False
    """Whether every version is, before it is committed, encoded, decoded and applied anew, and compared: twice the work.
    For tests, and for doubts."""

    def __post_init__(self) -> None:
        # 0: the version that links a rollup would make the next one due.
        _need(self.rollup_threshold >= 1, "maintenance.rollup_threshold must be at least 1")
        _need(self.rollup_claim_ms >= 0, "maintenance.rollup_claim_ms must not be negative")
        _need(self.gc_versions_min >= 1, "maintenance.gc_versions_min must be at least 1")
        _need(self.gc_claim_ms >= 0, "maintenance.gc_claim_ms must not be negative")
        _need(self.gc_versions_max >= 1, "maintenance.gc_versions_max must be at least 1")
        _need(self.gc_delete_concurrency >= 1, "maintenance.gc_delete_concurrency must be at least 1")
        _need(self.recent_diffs_max >= 1, "maintenance.recent_diffs_max must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """How much a physical compaction may hold in memory and which requests are worth it."""

    memory_bytes_max: int = 1 * GIB
    """Bound of one compaction; at least 4 x batch.target_part_bytes to keep its promise."""
    inputs_min: int = 8
    parts_min: int = 8
    updates_min: int = 1024
    """A request is worth doing when it has at least this many inputs, or parts, or updates."""
    enabled: bool = True
    """Off: requests are dropped; readers pay for what is not merged."""
    concurrency: int = 5
    """Compactions that one client's background maintenance does at once. Grows with it: memory, by `memory_bytes_max` each."""
    queue_max: int = 20
    """Requests that wait in one background queue; more are dropped, and offered again when their claims lapse."""
    timeout_ms_min: int = 90_000
    timeout_ms_per_mib: int = 1_000
    """A compaction that takes longer than both, the second times the MiB of its inputs, is given up."""
    claim_ms: int = 60 * 60 * 1000
    """A claimed compaction that was not applied within this time is offered again."""
    claim_percent: int = 100
    """How many compactions that nobody is at an append takes over when it makes no work itself, in hundredths. Grows with
    it: how fast a backlog goes down, and the work of writers. 0: never."""
    claim_min_version: str | None = None
    """Batches with parts that code before this version wrote are compacted too, though nothing is to be merged, until none is
    left: to retire a format. At most this code's own version. None: never."""

    def __post_init__(self) -> None:
        _need(self.memory_bytes_max >= 0, "compaction.memory_bytes_max must not be negative")
        _need(self.claim_ms >= 0, "compaction.claim_ms must not be negative")
        _need(self.claim_percent >= 0, "compaction.claim_percent must not be negative")
        if self.claim_min_version is not None:  # what newer code wrote is rewritten by this code, for ever
            is_ours = parse_version(self.claim_min_version) <= parse_version(APPLIER_VERSION)
            _need(is_ours, f"compaction.claim_min_version must be at most {APPLIER_VERSION}")
        _need(self.concurrency >= 1, "compaction.concurrency must be at least 1")
        _need(self.queue_max >= 1, "compaction.queue_max must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """Backoff against failing stores."""

    initial_ms: float = 4.0
    factor: float = 2.0
    clamp_ms: float = 16_000.0
    jitter: float = 0.1
    """Each sleep is multiplied by a uniform draw from [1 - jitter, 1 + jitter)."""
    warn_attempts: int = 30
    """Attempts after which a retry loop logs at warning."""
    give_up_ms: float | None = None
    """None retries forever (as persist does). With a number, the loop raises Unavailable naming the operation and the address."""

    def __post_init__(self) -> None:
        _need_pauses("retry", self.initial_ms, self.factor, self.clamp_ms)
        _need(0 <= self.jitter <= 1, "retry.jitter must be from 0 to 1")
        _need(self.give_up_ms is None or self.give_up_ms >= 0, "retry.give_up_ms must not be negative, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Polling for a newer state while waiting for an upper; docs/adr/0002-stores.md has the reasons."""

    initial_ms: float = 20.0
    factor: float = 2.0
    clamp_ms: float = 1_200.0
    push: bool = True
    """Whether to hear of others' commits as they happen (where the store can tell). Off: waiting only polls."""
    pushed_clamp_ms: float = 5_000.0
    """As `clamp_ms`, while commits are being heard. Grows with it: the delay when a writer's push is off or a message is lost."""

    def __post_init__(self) -> None:
        _need_pauses("watch", self.initial_ms, self.factor, self.clamp_ms)
        _need(self.pushed_clamp_ms > 0, "watch.pushed_clamp_ms must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of them."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    read: ReadSettings = field(default_factory=ReadSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    maintenance: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    retry: RetrySettings = field(default_factory=RetrySettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    retain_ms: int | None = RETAIN_MS
    """Retention that shards are created with: since stays so far behind upper, in the shard's own times, whatever readers let
    go of. A shard that exists keeps its own (`client.set_retention`). Grows with it: what compaction must keep apart. None
    or 0: none."""

    def __post_init__(self) -> None:
        is_sound = self.retain_ms is None or 0 <= self.retain_ms < 1 << 63
        _need(is_sound, "retain_ms must be from 0 to 2**63 - 1, or None; None or 0: no retention")


def within_memory(settings: Settings, memory_bytes: int) -> Settings:
    """`settings` for a process that may take `memory_bytes` and compacts one thing at a time: the bound of a compaction,
    and parts cut small enough for it to be kept. InvalidUsage below MEMORY_BYTES_LEAST, where it could not be.
    """
    if memory_bytes < MEMORY_BYTES_LEAST:
        raise InvalidUsage(
            f"a process that compacts needs at least {MEMORY_BYTES_LEAST // MIB} MiB of memory, {memory_bytes // MIB} MiB were "
            "given: raise --memory-mib (PERSIST_MEMORY_MIB), or compaction.memoryLimit of the PersistShard"
        )
    bound = memory_bytes - CLIENTS_BYTES
    part_bytes = min(settings.batch.target_part_bytes, max(MIB, bound // PARTS_IN_BOUND))
    return replace(
        settings,
        batch=replace(settings.batch, target_part_bytes=part_bytes),
        compaction=replace(settings.compaction, memory_bytes_max=bound),
    )


def with_environ(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """`settings`, without compaction where `environ` has PERSIST_COMPACTION_DISABLED (set, and not to 0, false, no or
    off). For mains, which hand in theirs: nothing below them reads the environment.
    """
    if environ.get(COMPACTION_DISABLED_VARIABLE, "").strip().lower() in _NO:
        return settings
    return replace(settings, compaction=replace(settings.compaction, enabled=False))
