"""Numbers from outside: what the environment may switch off, and what makes no sense."""

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import COMPACTION_DISABLED_VARIABLE, CompactionSettings, Settings, with_environ


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
    "bad", [{"concurrency": 0}, {"queue_max": 0}, {"claim_min_version": "99.0.0"}, {"claim_min_version": "one"}]
)
def test_numbers_that_make_no_sense_are_refused(bad):
    with pytest.raises(InvalidUsage):
        CompactionSettings(**bad)
