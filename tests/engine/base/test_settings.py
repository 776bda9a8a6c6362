"""Numbers from outside: what the environment may switch off, and what makes no sense."""

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import (
    COMPACTION_DISABLED_VARIABLE,
    CompactionSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
    WatchSettings,
    with_environ,
)


@pytest.mark.parametrize(
    ("text", "enabled"),
    [(None, True), ("", True), ("0", True), ("False", True), (" no ", True), ("1", False), ("true", False)],
)
def test_the_environment_disables_compaction_for_a_process(text, enabled):
    environ = {} if text is None else {COMPACTION_DISABLED_VARIABLE: text}
    assert with_environ(Settings(), environ).compaction.enabled is enabled


def test_it_never_enables_it():
    off = Settings(compaction=CompactionSettings(enabled=False))
    assert with_environ(off, {COMPACTION_DISABLED_VARIABLE: "0"}) == off


@pytest.mark.parametrize(
    ("group", "bad"),
    [
        (CompactionSettings, {"concurrency": 0}),
        (CompactionSettings, {"queue_max": 0}),
        (CompactionSettings, {"claim_min_version": "99.0.0"}),
        (CompactionSettings, {"claim_min_version": "one"}),
        # Each of these would only have shown later: as work without end, a busy loop, or a reader that sees nothing.
        (MaintenanceSettings, {"rollup_threshold": 0}),
        (MaintenanceSettings, {"gc_versions_min": 0}),
        (MaintenanceSettings, {"gc_versions_max": 0}),
        (MaintenanceSettings, {"gc_delete_concurrency": 0}),
        (MaintenanceSettings, {"recent_diffs_max": 0}),
        (RetrySettings, {"initial_ms": 0}),
        (RetrySettings, {"clamp_ms": 0}),
        (RetrySettings, {"factor": 0.5}),
        (RetrySettings, {"jitter": 1.5}),
        (WatchSettings, {"initial_ms": 0}),
        (WatchSettings, {"clamp_ms": -1}),
        (WatchSettings, {"pushed_clamp_ms": 0}),
        (WatchSettings, {"factor": 0.9}),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(group, bad):
    with pytest.raises(InvalidUsage, match=f"settings: .*{next(iter(bad))}|not a version"):
        group(**bad)
