"""Numbers from outside: what the environment may switch off, and what makes no sense."""

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import (
    COMPACTION_DISABLED_VARIABLE,
    BatchSettings,
    CompactionSettings,
    LeaseSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
    WatchSettings,
    with_environ,
    within_memory,
)


@pytest.mark.parametrize(
    ("text", "enabled"),
    [(None, True), ("", True), ("0", True), ("False", True), (" no ", True), ("1", False), ("true", False)],
)
def test_the_environment_disables_compaction_for_a_process(text, enabled):
    environ = {} if text is None else {COMPACTION_DISABLED_VARIABLE: text}
    assert with_environ(Settings(), environ).compaction.enabled is enabled


def test_the_environment_never_enables_compaction():
    off = Settings(compaction=CompactionSettings(enabled=False))
    assert with_environ(off, {COMPACTION_DISABLED_VARIABLE: "0"}) == off


NONSENSE = [
    (BatchSettings, "batch", {"inline_total_bytes_max": -1, "stats_bytes_max": -1, "runs_max": 0}),
    (LeaseSettings, "lease", {"reader_lease_ms": -1, "critical_downgrade_interval_ms": -1}),
    (
        MaintenanceSettings,
        "maintenance",
        {
            "rollup_threshold": 0,
            "rollup_claim_ms": -1,
            "gc_versions_min": 0,
            "gc_claim_ms": -1,
            "gc_versions_max": 0,
            "gc_delete_concurrency": 0,
            "recent_diffs_max": 0,
        },
    ),
    (CompactionSettings, "compaction", {"concurrency": 0, "queue_max": 0, "memory_bytes_max": -1, "claim_ms": -1}),
    (RetrySettings, "retry", {"initial_ms": 0, "factor": 0.5, "clamp_ms": 0, "jitter": 1.1, "give_up_ms": -1}),
    (WatchSettings, "watch", {"initial_ms": 0, "factor": 0.9, "clamp_ms": -1, "pushed_clamp_ms": 0}),
]


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [(each, f"{group}.{name}", value) for each, group, bad in NONSENSE for name, value in bad.items()],
)
def test_numbers_that_make_no_sense_are_refused_by_name(settings, name, value):
    """Among them those that would never end: a rollup due for every link of a rollup, pauses of nothing."""
    with pytest.raises(InvalidUsage, match=f"settings: {name} must"):
        settings(**{name.partition(".")[2]: value})


@pytest.mark.parametrize("bad", ["99.0.0", "one"])
def test_a_version_to_retire_is_one_that_there_was(bad):
    with pytest.raises(InvalidUsage):
        CompactionSettings(claim_min_version=bad)


def test_a_process_is_left_room_beside_its_bound_and_writes_parts_that_fit_into_it():
    within = [within_memory(Settings(), mib << 20) for mib in (512, 1024, 4096)]
    assert [each.compaction.memory_bytes_max >> 20 for each in within] == [336, 848, 3920]
    assert [each.batch.target_part_bytes >> 20 for each in within] == [42, 106, 128]
    with pytest.raises(InvalidUsage, match="needs at least 512 MiB of memory, 511 MiB were given"):
        within_memory(Settings(), 511 << 20)
