"""The time line of a table as a picture: when rows were written, how many, and which times can be read.

    |      #            |
    |  #   #     #    # |     a bar for the writes of one stretch of time; its height is the number of updates, on a logarithmic scale
    +---====================  the axis; thick where times can be read, from since to the last write
        ^ since

It is SVG without scripts and fonts of its own. The colours are those of the text around it, so that dark notebooks work, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from persist_engine.base.wording import dated

_WIDTH, _HEIGHT = 720, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 10, 10, 24, 34
#: The limit on bars. With more, the bars would be so narrow that they would run into each other.
BARS_MAX = 120


@dataclass(frozen=True, slots=True)
class Write:
    """A write: its time, and the number of its updates.

    >>> (write,) = orders.timeline().writes
    >>> write.time == orders.last_time, write.updates
    (True, 2)
    """

    time: int
    updates: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the picture shows. `since` is the earliest time that can be read. `writes` holds the writes that the log still shows, in any
    order.

    >>> line = orders.timeline()
    >>> line.name, line.last == orders.last_time
    ('orders', True)
    """

    name: str
    since: int
    last: int | None
    writes: tuple[Write, ...]

    @property
    def svg(self) -> str:
        """The picture as SVG text, for a file or a page.

        >>> orders.timeline().svg[:4]
        '<svg'
        """
        return timeline_svg(self)

    def _repr_svg_(self) -> str:
        return self.svg


def timeline_svg(line: Timeline) -> str:
    """An `svg` element. Equal time lines give equal text."""
    title = f'<text x="{_LEFT}" y="15" font-weight="bold">{escape(line.name)}</text>'
    if line.last is None:
        return _svg(f'{title}<text x="{_LEFT}" y="{_HEIGHT // 2}">nothing was written yet</text>')
    first = min([line.since if line.since > 0 else line.last, line.last, *(write.time for write in line.writes)])
    span = max(line.last - first, 1)
    base = _HEIGHT - _BOTTOM

    def x(time: int) -> float:
        return round(_LEFT + (time - first) / span * (_WIDTH - _LEFT - _RIGHT), 1)

    readable = x(min(max(line.since, first), line.last))
    shapes = [
        title,
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}" stroke="currentColor" stroke-width="1"/>',
        f'<line x1="{readable}" x2="{x(line.last)}" y1="{base}" y2="{base}" stroke="#2a7" stroke-width="5">'
        f"<title>readable from {escape(dated(max(line.since, first)))} to {escape(dated(line.last))}</title></line>",
        *_bars(line.writes, first, span, base),
        f'<text x="{_LEFT}" y="{base + 16}">{escape(dated(first))}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{base + 30}" text-anchor="end">last write {escape(dated(line.last))}</text>',
    ]
    return _svg("".join(shapes))


def _bars(writes: Sequence[Write], first: int, span: int, base: int) -> list[str]:
    bars: dict[int, list[Write]] = {}
    for write in writes:
        bars.setdefault((write.time - first) * (BARS_MAX - 1) // span, []).append(write)
    most = max((sum(write.updates for write in bar) for bar in bars.values()), default=0)
    step = (_WIDTH - _LEFT - _RIGHT) / BARS_MAX
    return [_bar(bar, _LEFT + index * step, step, most, base) for index, bar in sorted(bars.items())]


def _bar(bar: Sequence[Write], x: float, step: float, most: int, base: int) -> str:
    updates = sum(write.updates for write in bar)
    height = round(2 + (base - _TOP - 2) * math.log1p(updates) / max(math.log1p(most), 1), 1)
    times = sorted(write.time for write in bar)
    when = dated(times[0]) if len(times) == 1 else f"{dated(times[0])} to {dated(times[-1])}"
    note = f"{len(bar)} write{'s' * (len(bar) > 1)}, {updates} updates, {when}"
    place = f'x="{round(x, 1)}" y="{round(base - height, 1)}" width="{round(step * 0.8, 1)}" height="{height}"'
    return f'<rect {place} fill="currentColor" fill-opacity="0.6"><title>{escape(note)}</title></rect>'


def _svg(inside: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
    )
    return f'{head}font-family="sans-serif" font-size="11" fill="currentColor" role="img">{inside}</svg>'
