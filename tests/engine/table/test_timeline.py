"""The time line of a table: a pure function of times, which draws every write and nothing outside its frame."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.table.pictures.timeline import BARS_MAX, Timeline, Write

SVG = "{http://www.w3.org/2000/svg}"
TIMES = st.integers(0, 2**62)


def bars(line):
    return list(ElementTree.fromstring(line.svg).iter(f"{SVG}rect"))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=10), TIMES, st.lists(st.tuples(TIMES, st.integers(1, 2**40)), min_size=1, max_size=200))
def test_every_write_is_in_one_bar_within_the_frame(name, since, writes):
    name = "".join(letter for letter in name if letter.isprintable())
    last = max(time for time, _ in writes)
    found = bars(Timeline(name, since, last, tuple(Write(*each) for each in writes)))
    notes = ["".join(bar.itertext()) for bar in found]
    assert sum(int(note.split()[0]) for note in notes) == len(writes)
    assert sum(int(note.split(", ")[1].split()[0]) for note in notes) == sum(updates for _, updates in writes)
    assert len(found) <= BARS_MAX
    for bar in found:
        x, y, width, height = (float(bar.get(key)) for key in ("x", "y", "width", "height"))
        assert 10 <= x <= x + width <= 711
        assert 24 <= y <= y + height <= 86.2


@pytest.mark.parametrize(("since", "start"), [(0, 10.0), (1_000, 10.0), (1_500, 360.0), (9_000, 710.0)])
def test_the_readable_times_are_marked(since, start):
    line = Timeline("t", since, 2_000, (Write(1_000, 1), Write(2_000, 1)))
    marked = [each for each in ElementTree.fromstring(line.svg).iter(f"{SVG}line") if each.get("stroke") == "#2a7"]
    assert [(float(each.get("x1")), float(each.get("x2"))) for each in marked] == [(start, 710.0)]


def test_texts_are_escaped_and_an_empty_table_says_so():
    line = Timeline("<script>", 0, None, ())
    assert "&lt;script&gt;" in line.svg
    assert "nothing was written yet" in line.svg
    assert not bars(line)


def test_of_a_table(orders):
    assert not bars(orders.timeline())
    orders.append([{"id": each, "name": None, "price": None} for each in (1, 2)])
    orders.delete("id = 1")
    orders.optimize()
    orders.alter(add="note STRING")
    line = orders.timeline()
    assert [write.updates for write in sorted(line.writes, key=lambda write: write.time)] == [2, 1]
    assert line.last == orders.last_time
    assert line._repr_svg_() == line.svg
