"""Plans that the actions of one frame share: kept for a time, in a folder of their own, and never wrong."""

import itertools

import pytest
from persist_spark.source.kept_plans import kept


@pytest.fixture
def ask(tmp_path):
    """Asks for a plan; every plan that is made is another one."""
    numbers = itertools.count()

    def ask(frame="f", columns="c", now_ms=0, folder=tmp_path / "plans"):
        def planned():
            return [b"split", bytes([next(numbers)])]

        return kept(frame, columns, planned, now_ms=now_ms, keep_ms=1000, folder=folder)[1][0]

    return ask


def test_a_plan_is_made_once_for_a_frame_and_its_columns(ask):
    assert [ask(), ask(), ask(now_ms=999)] == [0, 0, 0]
    assert [ask("g"), ask(columns="d"), ask("g"), ask()] == [1, 2, 1, 0]


def test_a_plan_that_is_too_old_is_made_anew_and_then_removed(ask, tmp_path):
    assert [ask(), ask(now_ms=1000), ask(now_ms=1500), ask(now_ms=2000)] == [0, 1, 1, 2]
    ask("g", now_ms=1 << 50)
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_a_plan_of_a_clock_that_was_set_back_since_is_made_anew(ask):
    """Regression: it was used until that time came, long after its lease had ended."""
    assert [ask(now_ms=100_000), ask(now_ms=100_500), ask(now_ms=50_000), ask(now_ms=50_999)] == [0, 0, 1, 1]


def test_a_folder_of_others_keeps_nothing(ask, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(tmp_path / "plans")
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        first = ask(folder=tmp_path / name)
        assert ask(folder=tmp_path / name) == first + 1
    assert list((tmp_path / "open").iterdir()) == []


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b"[]", b'{"until_ms": 9999999}', b'{"until_ms": 9999999, "splits": [7]}']
)
def test_a_damaged_plan_is_made_anew(ask, tmp_path, damaged):
    ask()
    [file] = (tmp_path / "plans").iterdir()
    file.write_bytes(damaged)
    assert [ask(), ask()] == [1, 1]
