"""Settings: numbers, grouped by room, in frozen dataclasses. Stores, env and metrics are passed as arguments, never in settings.

Each main, CLI command or job builds its settings once. The code that it calls reads no globals and no environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.version import APPLIER_VERSION, parse_version

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: The default retention of a new shard: seven days if its times are milliseconds.
RETAIN_MS = 7 * 24 * 3600 * 1000
#: This environment variable disables compaction for the whole process; it overrides the settings.
COMPACTION_DISABLED_VARIABLE = "PERSIST_COMPACTION_DISABLED"
#: The memory of a process that a compaction's bound does not include: the interpreter, its libraries, the clients of S3 and Redis.
#: (Measured: with 512 MiB, wide rows peak at 417 to 427 MiB.)
CLIENTS_BYTES = 176 * MIB
#: The bound of a compaction is at least this many output parts, because a compaction keeps several in memory while it writes one.
PARTS_IN_BOUND = 8
#: The process and its libraries take about 170 MiB without any data. With less memory than this, too little is left for merging
#: (measured with 384 MiB: 393 MiB used).
MEMORY_BYTES_LEAST = 512 * MIB
#: 100 years. A time that far ahead still fits into a key.
_DELETIONS_KEPT_MS_MAX = 36_525 * 24 * 3600 * 1000
_NO = frozenset({"", "0", "false", "no", "off"})


def _need(condition: bool, message: str) -> None:  # noqa: FBT001
    if not condition:
        raise InvalidUsage(f"settings: {message}")


def _need_pauses(group: str, initial_ms: float, factor: float, clamp_ms: float) -> None:
    """Require a positive pause that never shrinks. Otherwise the loop would run at full speed."""
    _need(initial_ms > 0, f"{group}.initial_ms must be more than 0")
    _need(factor >= 1, f"{group}.factor must be at least 1")
    _need(clamp_ms > 0, f"{group}.clamp_ms must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings for turning updates into parts."""

    target_part_bytes: int = 128 * MIB
    """A writer cuts a part at this many bytes in memory. A larger value raises the writer's memory (times outstanding parts)."""
    inline_part_bytes_max: int = 4 * KIB
    """A part encoded smaller than this (exclusive) stays inside state; 0 disables inlining. A larger value
    enlarges state and diffs."""
    inline_total_bytes_max: int = 1 * MIB
    """Bound on inline bytes in one shard's state (exclusive); beyond it writers must flush. A larger value
    makes opening a shard slower."""
    outstanding_parts_max: int = 2
    """Uploads in flight per builder. Further additions wait."""
    runs_max: int = 1
    """The builder merges runs while it writes until at most this many remain; below 2 every part stays its own run. A larger
    value moves work from writers to readers and compactions."""
    combine_inline: bool = True
    """Whether the inline parts of all batches in one append become one part."""
    stats_bytes_max: int = 1024
    """Statistics of a part are trimmed to about this size."""
    run_parts_max: int | None = None
    """Ordered runs with more parts than this are stored in blob as listings of at most this many entries each. None: never.
    A larger value enlarges state and reduces the listings that reads and collection must fetch first. Worth setting (for
    example to 1000) beyond some thousand parts."""

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
    """Settings for reading shards."""

    stats_audit_percent: int = 0
    """Percentage of the parts skipped by statistics that a read fetches all the same, to verify that they hold no matching row.
    A larger value raises the bytes that filtered reads fetch and detects wrong statistics sooner."""

    def __post_init__(self) -> None:
        _need(0 <= self.stats_audit_percent <= 100, "read.stats_audit_percent must be from 0 to 100")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Settings for the duration of leases and registrations."""

    reader_lease_ms: int = 15 * 60 * 1000
    """A leased reader is removed if it does not heartbeat for this long. It heartbeats twice per lease."""
    writer_lease_ms: int = 60 * 60 * 1000
    """A writer's registration (token, last upper) expires this long after its last append."""
    critical_downgrade_interval_ms: int = 30_000
    """A critical since moves at most once in this interval, unless forced."""

    def __post_init__(self) -> None:
        _need(self.reader_lease_ms >= 0, "lease.reader_lease_ms must not be negative")
        _need(self.writer_lease_ms >= 0, "lease.writer_lease_ms must not be negative")
        _need(self.critical_downgrade_interval_ms >= 0, "lease.critical_downgrade_interval_ms must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceSettings:
    """When maintenance falls due."""

    rollup_threshold: int = 128
    """A rollup is due this many seqnos after the last one. A larger value raises the number of diffs to read on open."""
    rollup_claim_ms: int = 5_000
    """A claimed rollup that was not added within this time is offered again."""
    gc_versions_min: int = 32
    """GC is requested when at least this many versions can be truncated."""
    gc_claim_ms: int = 15 * 60 * 1000
    """A claimed GC that did not finish within this time is offered again."""
    gc_versions_max: int = 128_000
    """One GC request covers at most this many versions beyond the last request."""
    gc_delete_concurrency: int = 32
    """Blob deletes in flight."""
    deletions_kept_ms: int = 90 * 24 * 60 * 60 * 1000
    """How long the records of deletions that this process writes are kept. 0: it writes none."""
    recent_diffs_max: int = 30 * 128
    """Bound of the fast scan on open. A longer log is opened from its newest rollup."""
    structure_flat_traces: bool = True
    """Whether a shard stored without a spine structure gets one with its next version, permanently. False: the shard stays flat
    as long as every process that writes it sets False."""
    validate_roundtrip: bool = False
    """Whether each version is encoded, decoded, applied again and compared before it is committed. Doubles the work. For tests
    and for diagnosis."""

    def __post_init__(self) -> None:
        # With a threshold of 0, the version that links a rollup would make the next rollup due.
        _need(self.rollup_threshold >= 1, "maintenance.rollup_threshold must be at least 1")
        _need(self.rollup_claim_ms >= 0, "maintenance.rollup_claim_ms must not be negative")
        _need(self.gc_versions_min >= 1, "maintenance.gc_versions_min must be at least 1")
        _need(self.gc_claim_ms >= 0, "maintenance.gc_claim_ms must not be negative")
        _need(self.gc_versions_max >= 1, "maintenance.gc_versions_max must be at least 1")
        _need(self.gc_delete_concurrency >= 1, "maintenance.gc_delete_concurrency must be at least 1")
        is_sound = 0 <= self.deletions_kept_ms <= _DELETIONS_KEPT_MS_MAX
        _need(is_sound, "maintenance.deletions_kept_ms must be from 0 to 100 years")
        _need(self.recent_diffs_max >= 1, "maintenance.recent_diffs_max must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """Settings for compaction: how much memory a physical one may use, and which requests are worth doing."""

    memory_bytes_max: int = 1 * GIB
    """The memory bound of one compaction. The compaction keeps it if it is at least 4 x batch.target_part_bytes."""
    sift_bytes_min: int = 1 * MIB
    """A compaction of at least this many bytes writes the rows that cancelled to runs of their own, so that reads of the newest contents
    need not fetch them. A larger value saves blobs, and slows these reads of small shards."""
    inputs_min: int = 8
    parts_min: int = 8
    updates_min: int = 1024
    """A request is worth doing if it has at least this many inputs, or parts, or updates."""
    enabled: bool = True
    """False: requests are dropped, and readers merge the unmerged runs at each read."""
    concurrency: int = 5
    """Compactions that one client's background maintenance runs at once. Each needs `memory_bytes_max`."""
    queue_max: int = 20
    """Length of the background queue. Further requests are dropped and offered again when their claims lapse."""
    timeout_ms_min: int = 90_000
    timeout_ms_per_mib: int = 1_000
    """A compaction is given up when it exceeds both limits; the second is multiplied by the MiB of its inputs."""
    claim_ms: int = 60 * 60 * 1000
    """A claimed compaction that was not applied within this time is offered again."""
    claim_percent: int = 100
    """How many unclaimed compactions an append takes over when it creates no merge work itself, in hundredths. A larger
    value shrinks a backlog faster and gives writers more work. 0: none."""
    claim_min_version: str | None = None
    """Batches with parts written by code older than this version are compacted even if nothing is to be merged, until none is
    left. This retires an old format. At most this code's own version. None: disabled."""

    def __post_init__(self) -> None:
        _need(self.memory_bytes_max >= 0, "compaction.memory_bytes_max must not be negative")
        _need(self.sift_bytes_min >= 0, "compaction.sift_bytes_min must not be negative")
        _need(self.claim_ms >= 0, "compaction.claim_ms must not be negative")
        _need(self.claim_percent >= 0, "compaction.claim_percent must not be negative")
        if self.claim_min_version is not None:  # otherwise this code would rewrite the output of newer code for ever
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
    """A retry loop logs at warning from this many attempts on; where nothing else shows the wait, also after ten seconds."""
    give_up_ms: float | None = None
    """None: retry forever, as persist does. A number: after this time the loop raises Unavailable with the operation and the address."""

    def __post_init__(self) -> None:
        _need_pauses("retry", self.initial_ms, self.factor, self.clamp_ms)
        _need(0 <= self.jitter <= 1, "retry.jitter must be from 0 to 1")
        _need(self.give_up_ms is None or self.give_up_ms >= 0, "retry.give_up_ms must not be negative, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Polling for a newer state while waiting for an upper. docs/adr/0002-stores.md gives the reasons."""

    initial_ms: float = 20.0
    factor: float = 2.0
    clamp_ms: float = 1_200.0
    push: bool = True
    """Whether to receive commits of other processes as pushed news, if the store supports it. False: waiting only polls."""
    pushed_clamp_ms: float = 5_000.0
    """Replaces `clamp_ms` while news arrives. A larger value raises the delay if a writer's push is off or a message is lost."""

    def __post_init__(self) -> None:
        _need_pauses("watch", self.initial_ms, self.factor, self.clamp_ms)
        _need(self.pushed_clamp_ms > 0, "watch.pushed_clamp_ms must be more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    read: ReadSettings = field(default_factory=ReadSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    maintenance: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    retry: RetrySettings = field(default_factory=RetrySettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    retain_ms: int | None = RETAIN_MS
    """Default retention of new shards: since stays this far behind upper, in the shard's own time unit, even if all readers
    release earlier times. An existing shard keeps its own value (`client.set_retention`). With a larger value,
    compaction must keep more times distinct. None or 0: no retention."""

    def __post_init__(self) -> None:
        is_sound = self.retain_ms is None or 0 <= self.retain_ms < 1 << 63
        _need(is_sound, "retain_ms must be from 0 to 2**63 - 1, or None; None or 0: no retention")


def within_memory(settings: Settings, memory_bytes: int) -> Settings:
    """Return `settings` for a process that may use `memory_bytes` and runs one compaction at a time. They bound the compaction,
    and make parts small enough for that bound. Raises InvalidUsage below MEMORY_BYTES_LEAST, where no bound can be kept.
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
    """Return `settings`, with compaction disabled if `environ` sets PERSIST_COMPACTION_DISABLED to anything but empty, 0,
    false, no or off. Mains call it with their environment; the code below them reads no environment.
    """
    if environ.get(COMPACTION_DISABLED_VARIABLE, "").strip().lower() in _NO:
        return settings
    return replace(settings, compaction=replace(settings.compaction, enabled=False))
