"""How results look: rich tables on a terminal, tab-separated text in a pipe, JSON on request. Results go to stdout, everything else to
stderr.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import typer

from persist_engine.base.wording import dated

#: Escapes the characters that would end a cell or a row of tab-separated text.
_IN_ONE_CELL = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})
#: Escapes the characters that control a terminal or change the direction of text. Line ends and tabs stay.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
#: Names of numbers that are counts. Names that end in "bytes" are counts, too.
_COUNTS = frozenset({"rows", "updates", "batches", "parts", "parts_read"})
#: Names of numbers that are times.
_TIMES = frozenset(
    {"since", "upper", "retained_since", "walltime_ms", "waits_from_ms", "waits_after_merge_ms", "uncollected_from_ms"}
)


def plain(value: Any) -> Any:
    """`value` in types that JSON can hold: dataclasses and mappings as objects (without private fields), bytes as hex."""
    if type(value).__name__ == "Antichain":
        return value.time
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if type(value).__name__ == "SharedMap":
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


def print_json(value: Any) -> None:
    """Prints one JSON document: indented on a terminal, on one line in a pipe."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(plain(value), indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say_unchanged(needed: str = "--commit", *, to: str = "do it") -> None:
    """Says on stderr after a dry run that nothing was changed, and which option makes the change."""
    typer.echo(f"nothing was changed: give {needed} to {to}", err=True)


def is_count(name: str) -> bool:
    """Whether a column or field of ours counts things. Other numbers are ids and times, which are never grouped."""
    return name.endswith("bytes") or name in _COUNTS


def is_time(name: str) -> bool:
    """Whether a column or field of ours is a time: people see its date beside it."""
    return name in _TIMES


def tab_separated(cells: Sequence[object]) -> str:
    """One line of plain text."""
    return "\t".join("" if cell is None else str(cell).translate(_IN_ONE_CELL) for cell in cells) + "\n"


def inert(text: str) -> str:
    """`text` with escapes, so that a terminal shows control characters and does not act on them."""
    return text.translate(_SHOWN)


def print_rows(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    counts: Callable[[str], bool] = is_count,
    times: Callable[[str], bool] = is_time,
) -> None:
    """Prints a table. On a terminal it aligns numbers, groups the digits of columns for which `counts` is true, and adds the date to the
    columns for which `times` is true. In a pipe numbers stay bare.
    """
    if not sys.stdout.isatty():
        sys.stdout.write(tab_separated(columns))
        sys.stdout.writelines(map(tab_separated, rows))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    held = [tuple(row) for row in rows]
    shown = [_shown_by(column, counts, times) for column in columns]
    table = Table()
    for index, column in enumerate(columns):
        is_number = any(isinstance(row[index], int) for row in held)
        table.add_column(Text(inert(column)), justify="right" if is_number else "left", overflow="fold")
    for row in held:
        # rich would interpret a bare string as markup.
        table.add_row(*(Text(show(cell)) for show, cell in zip(shown, row, strict=True)))
    Console().print(table)


def print_pairs(value: Mapping[str, Any]) -> None:
    """Prints names and values, one pair on each line."""
    is_tty = sys.stdout.isatty()
    print_rows(
        ("field", "value"),
        [(name, _shown_by(name, is_count, is_time)(item) if is_tty else item) for name, item in value.items()],
    )


def _shown_by(name: str, counts: Callable[[str], bool], times: Callable[[str], bool]) -> Callable[[object], str]:
    """The function that formats a cell of the column or field `name` for a terminal."""
    number = "{:,}".format if counts(name) else dated if times(name) else str

    def show(cell: object) -> str:
        if cell is None:
            return "-"
        if isinstance(cell, int) and not isinstance(cell, bool):
            return number(cell)
        return inert(str(cell))

    return show


class Bar(Protocol):
    """Progress of one piece of work."""

    def __call__(self, done: float, total: float, text: str = "") -> None:
        """Shows that `done` of `total` is done, in any unit, with `text` beside it."""


@contextmanager
def progress_bar(label: str, *, quiet: bool) -> Iterator[Bar]:
    """Shows a bar on stderr while the block runs. Shows nothing when stderr is not a terminal, or with `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield _no_bar
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(label, total=None, text="")

        def bar(done: float, total: float, text: str = "") -> None:
            shown.update(task, completed=done, total=total, text=text)

        yield bar


def _no_bar(done: float, total: float, text: str = "") -> None:
    pass


def reading(bar: Bar) -> Callable[[int, int], None]:
    """A function that shows the progress of reading parts one by one. It takes the bytes of one part, and of all."""
    read = 0

    def show(count: int, total: int) -> None:
        nonlocal read
        read += count
        bar(read, total, f"{read / 1e6:,.1f} MB read")

    return show


def ago(milliseconds: int) -> str:
    """A duration in its two largest units: `3 d 4 h`, `12 m 5 s`."""
    left = max(0, milliseconds) // 1000
    pieces = []
    for unit, seconds in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, seconds)
        if count:
            pieces.append(f"{count} {unit}")
    return " ".join(pieces[:2]) or "0 s"
