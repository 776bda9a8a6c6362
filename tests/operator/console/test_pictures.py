"""The geometry of the pictures, and what the spine shows as merged next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_operator.console.picture import LEFT, RIGHT, frontiers_picture, scale_of, spine_of, spine_picture
from persist_operator.console.scale import Scale

DAY = 86_400_000
NOW = 1_790_000_000_000


def row(spine, level, lower, upper, *, runs=1, rows=10, since=0):
    return {
        "spine": spine,
        "level": level,
        "batch": f"{spine} [{lower},{upper})",
        "lower": lower,
        "upper": upper,
        "since": since,
        "runs": runs,
        "parts": runs,
        "rows": rows,
        "bytes": rows * 10,
    }


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200), st.integers(0, 2**64 - 1))
def test_a_scale_keeps_the_order_and_stays_within_the_picture(times, other):
    scale = Scale.over(times, left=LEFT, right=RIGHT)
    places = [scale.x(time) for time in sorted({*times, other})]
    assert places == sorted(places)
    assert all(LEFT - 0.001 <= place <= RIGHT + 0.001 for place in places)
    known = [scale.x(time) for time in sorted(set(times))]
    assert len(set(known)) == len(known), "two times of the scale share a place"


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60))
def test_labels_of_an_axis_do_not_touch(times):
    ends = []
    for tick in Scale.over(times, left=LEFT, right=RIGHT).ticks():
        width = len(tick.label) * 6.9
        start = {"start": tick.x, "end": tick.x - width, "middle": tick.x - width / 2}[tick.anchor]
        ends.append((start, start + width))
    assert ends
    assert all(before[1] < after[0] for before, after in zip(ends, ends[1:], strict=False))


def test_the_decades_before_the_first_row_are_cut_out():
    scale = Scale.over([0, NOW, NOW + DAY], left=0, right=1000)
    assert scale.cut == (0, 40)
    assert scale.x(NOW + DAY) - scale.x(NOW) == pytest.approx(960)


@pytest.mark.parametrize(
    ("rows", "merges"),
    [
        ([row("0-1", 1, 0, 5)], [""]),
        ([row("0-1", 1, 0, 5, runs=2)], ["next"]),
        ([row("0-2", 2, 0, 5), row("0-2", 2, 5, 9)], ["next"]),
        (
            [row("0-1", 3, 0, 5), row("1-3", 2, 5, 7), row("1-3", 2, 7, 9), row("3-4", 0, 9, 10, runs=2)],
            ["", "next", "due"],
        ),
        ([], []),
    ],
    ids=["compact", "two runs", "two batches", "the oldest first", "nothing"],
)
def test_a_compaction_takes_what_is_not_compact_the_oldest_first(rows, merges):
    assert [one.merge for one in spine_of(rows)] == merges


def test_a_spine_batch_sums_up_its_hollow_batches():
    (one,) = spine_of([row("0-2", 2, 0, 5, rows=7, since=3), row("0-2", 2, 5, None, rows=8, since=4)])
    assert (one.lower, one.upper, one.since, one.rows, one.bytes, one.runs, one.parts) == (0, None, 4, 15, 150, 2, 2)


def test_the_spine_is_drawn_with_its_largest_level_on_top_and_closed_ends_at_the_edge():
    spine = spine_of([row("0-2", 2, 0, 5), row("0-2", 2, 5, 9), row("2-3", 0, 9, None)])
    picture = spine_picture(scale_of(since=0, upper=None, holds=[], spine=spine), spine)
    assert [lane.label for lane in picture.lanes] == ["level 2", "level 0"]
    big, seam = picture.lanes[0].boxes
    (last,) = picture.lanes[1].boxes
    assert (big.tone, seam.tone, last.tone) == ("next", "seam next", "compact")
    assert big.x == LEFT
    assert big.x < seam.x < big.x + big.width
    assert "closed" in last.title
    assert "1 of them are due" in picture.says


def test_frontiers_show_the_readable_window_and_the_holds():
    scale = scale_of(since=10, upper=90, holds=[10, 40], spine=[])
    picture = frontiers_picture(scale, since=10, upper=90, holds=[("operator retention", 10), ("report", 40)])
    assert [lane.label for lane in picture.lanes] == ["shard", "operator retention", "report"]
    (window,) = picture.lanes[0].boxes
    assert (window.x, window.x + window.width) == (LEFT, RIGHT)
    report = picture.lanes[2].boxes[0]
    assert LEFT < report.x < RIGHT
    assert "since 10, upper 90; 2 holds" in picture.says


def test_a_closed_shard_has_a_picture_too():
    picture = frontiers_picture(
        scale_of(since=None, upper=None, holds=[None], spine=[]), since=None, upper=None, holds=[("x", None)]
    )
    assert picture.says == "since closed, upper closed; 1 hold"
