"""Many commands decided against what the shard holds, table by table, against a loop over the rows."""

import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import LastOfKeys, NotOneValue, consolidate, last_of_each_key, updates_against
from persist_engine.dataflow.upsert import last_of_key
from persist_kit.depth import draws

KEY = pa.struct([("a", pa.float64()), ("s", pa.struct([("t", pa.string())]))])
VAL = pa.struct([("x", pa.float64()), ("n", pa.int64())])
_keys = st.tuples(
    st.sampled_from([None, 0.0, -0.0, 1.0, 7.5, math.nan]),
    st.none() | st.builds(dict, t=st.sampled_from([None, "", "k"])),
)
_vals = st.tuples(st.sampled_from([None, 0.0, -0.0, 2.0, math.nan]), st.none() | st.integers(0, 3))


def _structs(rows, kind):
    names = [field.name for field in kind]
    return pa.array([dict(zip(names, row, strict=True)) for row in rows], kind)


def _same(value):
    """A value that is equal in Python where the engine finds equality: one NaN, one zero."""
    if isinstance(value, tuple):
        return tuple(map(_same, value))
    if isinstance(value, dict):
        return tuple(map(_same, value.values()))
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _updates(rows):
    """Consolidated rows of the shard: ((key, val), diff)."""
    columns = {"key": _structs([key for (key, _), _ in rows], KEY), "val": _structs([val for (_, val), _ in rows], VAL)}
    diffs = pa.array([diff for _, diff in rows], pa.int64())
    return consolidate(pa.table({**columns, "time": pa.array([5] * len(rows), pa.int64()), "diff": diffs}))


def _rows(table):
    found = {}
    for row in table.to_pylist():
        name = _same(tuple(row["key"].values())), _same(tuple(row["val"].values()))
        found[name] = found.get(name, 0) + row["diff"]
    return {name: diff for name, diff in found.items() if diff}


@given(
    held=st.lists(st.tuples(_keys, _vals), max_size=14, unique_by=lambda row: _same(row[0])),
    given_=st.lists(st.tuples(_keys, _vals, st.booleans()), max_size=14, unique_by=lambda row: _same(row[0])),
    bad=st.none() | st.tuples(_keys, _vals, st.sampled_from([-1, 1, 2])),
    size=st.integers(1, 6),
    keeps=st.booleans(),
)
@settings(max_examples=draws(300), deadline=None)
def test_updates_are_those_of_a_loop(held, given_, bad, size, keeps):
    shard = _updates([((key, val), 1) for key, val in held] + ([((bad[0], bad[1]), bad[2])] if bad else []))
    commands = pa.table(
        {
            "key": _structs([key for key, *_ in given_], KEY),
            "val": _structs([(None, None) if gone else val for _, val, gone in given_], VAL),
            "order": pa.array([val[1] for _, val, _ in given_], pa.int64()),
            "deleted": pa.array([gone for *_, gone in given_], pa.bool_()),
        }
    )
    commands = commands.take(pa.array(last_of_each_key(commands, None)))
    contents = _rows(shard)
    by_key = {}
    for (key, val), diff in contents.items():
        by_key.setdefault(key, []).append((val, diff))
    asked = [(_same(key), val, gone) for key, val, gone in given_]
    wrong = [key for key, *_ in asked if key in by_key and by_key[key] != [(by_key[key][0][0], 1)]]

    def decided():
        batches = shard.combine_chunks().to_batches(max_chunksize=size)
        return list(updates_against(commands, iter(batches), keeps_greater="n" if keeps else None))

    if wrong:
        with pytest.raises(NotOneValue) as caught:
            decided()
        key = _same(tuple(caught.value.key[0].as_py().values()))
        values = by_key[key]
        assert key in wrong
        assert (caught.value.held, caught.value.total) == (len(values), sum(diff for _, diff in values))
        return
    expected = {}
    for key, val, gone in asked:
        was = by_key[key][0][0] if key in by_key else None
        if keeps and was is not None and was[1] is not None and (val[1] is None or was[1] > val[1]):
            continue
        if was is not None and (gone or was != _same(val)):
            expected[key, was] = -1
        if not gone and was != _same(val):
            expected[key, _same(val)] = 1
    found = decided()
    assert _rows(pa.concat_tables([shard.slice(0, 0).drop_columns(["time"]), *found])) == expected
    assert sum(table.num_rows for table in found) == len(expected), "no update is made in vain"


_row = st.tuples(
    st.sampled_from([None, 0.0, -0.0, math.nan]), st.integers(0, 2), st.none() | st.integers(0, 3), st.booleans()
)


@given(tables=st.lists(st.lists(_row, max_size=8), max_size=5), chunk=st.integers(0, 6), has_order=st.booleans())
@settings(max_examples=draws(300), deadline=None)
def test_the_last_of_many_tables_is_that_of_one(tables, chunk, has_order):
    def table(rows):
        return pa.table(
            {
                "key": _structs([(a, None) for a, *_ in rows], KEY),
                "val": _structs([(None, n) for _, n, *_ in rows], VAL),
                "order": pa.array([order if has_order else None for *_, order, _ in rows], pa.int64()),
                "deleted": pa.array([gone for *_, gone in rows], pa.bool_()),
            }
        )

    expected, together = LastOfKeys(), LastOfKeys()
    with pytest.MonkeyPatch.context() as patch:
        if tables:
            expected.add(table([row for rows in tables for row in rows]))
        patch.setattr(last_of_key, "_CHUNK_ROWS", chunk)
        patch.setattr(last_of_key, "_KEPT_FACTOR", 1)
        for rows in tables:
            together.add(table(rows))
        one, many = expected.result(), together.result()
    if one is None or many is None:
        assert one is many
        return
    assert one[1].tolist() == many[1].tolist()
    assert [_same(key) for key in one[0].column("key").to_pylist()] == [
        _same(key) for key in many[0].column("key").to_pylist()
    ]
    decided = [at for at in range(one[0].num_rows) if at not in set(one[1].tolist())]
    for name in ("val", "order", "deleted"):
        assert [one[0].column(name)[at].as_py() for at in decided] == [
            many[0].column(name)[at].as_py() for at in decided
        ]


@pytest.mark.parametrize(
    ("kind", "ascending"),
    [
        (pa.float64(), [None, -1.5, 0.0, 2.0, math.inf, math.nan]),
        (pa.binary(), [None, b"", b"a", b"a\x00", b"b"]),
        (pa.bool_(), [None, False, True]),
        (pa.time64("ns"), [None, 0, 5]),
        (pa.duration("us"), [None, -5, 0, 5]),
        (
            pa.struct([("o0", pa.int32()), ("o1", pa.string())]),
            [None, {"o0": None, "o1": "z"}, {"o0": 1, "o1": None}, {"o0": 1, "o1": "a"}, {"o0": 2, "o1": None}],
        ),
    ],
    ids=str,
)
def test_orders_of_every_type(kind, ascending):
    for last in range(1, len(ascending)):
        rows = [*ascending[:last][::-1], ascending[last], *ascending[:last]]
        table = pa.table(
            {
                "key": _structs([(1.0, None)] * len(rows), KEY),
                "val": _structs([(None, n) for n in range(len(rows))], VAL),
            }
        )
        assert list(last_of_each_key(table, pa.array(rows, kind))) == [last]
