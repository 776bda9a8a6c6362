"""The pictures of a shard: its frontiers over time, and its spine below on the same axis. Pure geometry, in units of the SVG.

Each picture has an equivalent text beside it: tables for the spine and the holds, and a sentence for the frontiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from persist_engine.base.wording import counted

from persist_operator.console.port import Resource
from persist_operator.console.scale import Scale, Tick
from persist_operator.console.texts import grouped, instant, number, size, text

WIDTH, LEFT, RIGHT = 980.0, 140.0, 968.0
_LANE, _BAR, _LEVEL, _BATCH = 22.0, 14.0, 34.0, 24.0
#: Space above the lanes, and below them for the axis.
_TOP, _FOOT = 8.0, 30.0
_LABEL_MAX = 18
#: The height of the mark between two hollow batches, below the label.
_SEAM = 6.0
#: The most holds in the picture. Further holds are only in the table.
HOLDS_MAX = 10
#: The approximate width of a character of a label.
_CHARACTER = 6.2
#: The narrowest visible box.
_NARROW = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle. `tone` is its class, `label` the text within (empty when there is no room), `title` its description."""

    x: float
    y: float
    width: float
    height: float
    tone: str
    label: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of a picture: the text at its left and its boxes."""

    y: float
    label: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture with its lanes and axis. `cut`: the place at which the axis leaves out a long gap. `says`: the description."""

    height: float
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    marks: tuple[tuple[float, str], ...]
    """Vertical lines through all lanes, with their classes."""
    cut: tuple[float, float] | None
    says: str
    width: float = WIDTH
    left: float = LEFT
    right: float = RIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class SpineBatch:
    """One logical batch of the spine. A compaction merges its hollow batches and runs into one run, unless it is compact."""

    id: str
    level: int
    lower: int | None
    upper: int | None
    since: int | None
    hollow: tuple[Resource, ...]
    runs: int
    parts: int
    rows: int
    bytes: int
    merge: str
    """`next`, `due`, or empty when there is nothing to merge."""


def spine_of(batches: Iterable[Resource]) -> list[SpineBatch]:
    """The spine from the rows of the engine's table `batches`, oldest first. The next compaction takes the oldest batch that is not
    compact.
    """
    grouped_rows: dict[tuple[str, int], list[Resource]] = {}
    for row in batches:
        grouped_rows.setdefault((text(row["spine"]), number(row["level"]) or 0), []).append(row)
    spine, is_next = [], True
    for (spine_id, level), rows in grouped_rows.items():
        runs = sum(number(row["runs"]) or 0 for row in rows)
        is_due = len(rows) > 1 or runs > 1
        spine.append(
            SpineBatch(
                id=spine_id,
                level=level,
                lower=number(rows[0]["lower"]),
                upper=number(rows[-1]["upper"]),
                since=max((number(row["since"]) or 0 for row in rows), default=None),
                hollow=tuple(rows),
                runs=runs,
                parts=sum(number(row["parts"]) or 0 for row in rows),
                rows=sum(number(row["rows"]) or 0 for row in rows),
                bytes=sum(number(row["bytes"]) or 0 for row in rows),
                merge="" if not is_due else "next" if is_next else "due",
            )
        )
        is_next = is_next and not is_due
    return spine


def scale_of(
    *, since: int | None, upper: int | None, holds: Iterable[int | None], spine: Sequence[SpineBatch]
) -> Scale:
    """The axis that contains all of these times."""
    times = [since, upper, *holds, *(one.lower for one in spine), *(one.upper for one in spine)]
    times += [number(row["upper"]) for one in spine for row in one.hollow]
    return Scale.over([time for time in times if time is not None], left=LEFT, right=RIGHT)


def frontiers_picture(
    scale: Scale, *, since: int | None, upper: int | None, holds: Sequence[tuple[str, int | None]]
) -> Picture:
    """since, upper and holds. The readable window begins at since and ends before upper. `holds` are (label, since)."""
    start = RIGHT if since is None else scale.x(since)
    end = RIGHT if upper is None else scale.x(upper)
    readable = f"readable as of times from {instant(since)} to before {instant(upper)}"
    compacted = f"times before {instant(since)} count as {instant(since)}"
    window = [_bar((start, end), _TOP, "window", label="readable", title=readable)]
    if start - LEFT > _NARROW:
        window.insert(0, _bar((LEFT, start), _TOP, "past", label="compacted", title=compacted))
    lanes = [Lane(y=_TOP, label="shard", boxes=tuple(window))]
    for index, (label, held) in enumerate(holds[:HOLDS_MAX]):
        y = _TOP + _LANE * (index + 1)
        at = RIGHT if held is None else scale.x(held)
        bar = _bar((at, max(at, end)), y, "hold", label=f"from {instant(held)}", title=f"{label} holds {instant(held)}")
        lanes.append(Lane(y=y, label=_short(label, _LABEL_MAX), boxes=(bar,)))
    marks = [(round(start, 1), "since"), (round(end, 1), "upper")]
    held_by = f"; {counted(len(holds), 'hold')}" if holds else ""
    return Picture(
        height=_TOP + _LANE * len(lanes) + _FOOT,
        lanes=tuple(lanes),
        ticks=tuple(scale.ticks()),
        marks=tuple(marks),
        cut=scale.cut,
        says=f"since {instant(since)}, upper {instant(upper)}{held_by}",
    )


def spine_picture(scale: Scale, spine: Sequence[SpineBatch]) -> Picture:
    """The batches by level and time; the largest level on top. Marks divide a spine batch into its hollow batches."""
    levels = sorted({one.level for one in spine}, reverse=True)
    lanes = []
    for index, level in enumerate(levels):
        y = 4 + _LEVEL * index
        boxes: list[Box] = []
        for one in spine:
            if one.level == level:
                boxes += _batch_boxes(scale, one, y)
        lanes.append(Lane(y=y, label=f"level {level}", boxes=tuple(boxes)))
    due = [one for one in spine if one.merge]
    merged = f"; {len(due)} of them are due for a merge" if due else "; nothing to merge"
    return Picture(
        height=4 + _LEVEL * len(levels) + _FOOT,
        lanes=tuple(lanes),
        ticks=tuple(scale.ticks()),
        marks=(),
        cut=scale.cut,
        says=f"{counted(len(spine), 'spine batch')} in {counted(len(levels), 'level')}{merged}",
    )


def _batch_boxes(scale: Scale, one: SpineBatch, y: float) -> list[Box]:
    """The frame of a spine batch, and the marks between its hollow batches."""
    left, right = _ends(scale, one.lower, one.upper)
    size_text = f"{counted(one.rows, 'row')}, {size(one.bytes)}"
    merge = {"next": "; merged next", "due": "; due for a merge"}.get(one.merge, "")
    title = f"batch {one.id}, level {one.level}, [{instant(one.lower)}, {instant(one.upper)}): {size_text}{merge}"
    tone = {"next": "next", "due": "due"}.get(one.merge, "compact" if one.rows else "empty")
    label = _fitting(right - left, f"{grouped(one.rows)} rows · {size(one.bytes)}", f"{grouped(one.rows)}")
    boxes = [Box(x=left, y=y, width=max(right - left - 1, _NARROW), height=_BATCH, tone=tone, label=label, title=title)]
    for row in one.hollow[1:]:
        at = round(scale.x(number(row["lower"]) or 0), 1)
        seam = f"seam {tone}"
        boxes.append(
            Box(x=at, y=y + _BATCH - _SEAM, width=1.5, height=_SEAM, tone=seam, label="", title=text(row["batch"]))
        )
    return boxes


def _ends(scale: Scale, lower: int | None, upper: int | None) -> tuple[float, float]:
    left = LEFT if lower is None else scale.x(lower)
    return round(left, 1), round(RIGHT if upper is None else scale.x(upper), 1)


def _bar(ends: tuple[float, float], y: float, tone: str, *, label: str, title: str) -> Box:
    left, right = ends
    width = max(right - left, _NARROW)
    return Box(
        x=round(min(left, RIGHT - _NARROW), 1),
        y=y,
        width=round(width, 1),
        height=_BAR,
        tone=tone,
        label=_fitting(width, label),
        title=title,
    )


def _fitting(width: float, *labels: str) -> str:
    """The first label that fits; empty when none does."""
    return next((label for label in labels if len(label) * _CHARACTER + 8 <= width), "")


def _short(label: str, length: int) -> str:
    return label if len(label) <= length else f"{label[: length - 1]}…"
