"""What a shard holds is shown on a terminal, never obeyed by it."""

from __future__ import annotations

import pytest
from persist_engine import connect
from persist_engine.cli.output import print_rows
from persist_kit.command_line import persist


def test_regression_a_cell_gives_no_orders_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a title, a clipboard, or rows that another row paints over."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    print_rows(("a\x1b[31mname",), [("\x1b]0;owned\x07",), ("\x9b2J",), ("a\u202eb",), ("häuser\tzwei",)])
    shown = capsys.readouterr().out
    for order in "\x1b\x07\x9b\u202e":
        assert order not in shown.replace("\x1b[1m", "").replace("\x1b[0m", "")
    for text in (r"a\x1b[31mname", r"\x1b]0;owned\x07", r"\x9b2J", r"a\u202eb", "häuser"):
        assert text in shown


def test_the_lines_of_changes_hold_no_orders_of_columns_names(tmp_path):
    with connect(f"file://{tmp_path}") as db:
        db.create("t", key="`a\x1b[31m\nb` INT").append([{"a\x1b[31m\nb": 1}])
    stores = ["--blob", f"file://{tmp_path}/blobs", "--consensus", f"sqlite://{tmp_path}/consensus.db"]
    (line,) = persist("changes", "t", "--since", "start", *stores).stdout.splitlines()
    assert line.endswith(r"insert  a\x1b[31m\nb=1")
