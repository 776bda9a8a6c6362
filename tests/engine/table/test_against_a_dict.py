"""A table beside a multiset of rows, under any sequence of writes: the contents now, at every time before, and the changes in between."""

from __future__ import annotations

import math
from collections import Counter

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import SeededEnv, connect
from persist_kit.depth import draws

keys = st.sampled_from([None, 0.0, -0.0, 1.5, -2.0, math.nan, math.inf])
values = st.sampled_from([None, "", "a", "b"])
frames = st.lists(st.tuples(keys, values), max_size=6)
SCHEMA = pa.schema([("x", pa.float64()), ("name", pa.string())])
steps = st.one_of(
    st.tuples(st.sampled_from(["append", "upsert", "overwrite"]), frames),
    st.tuples(st.just("delete"), st.sampled_from(["name = 'a'", "x > 0", "x IS NULL", "NOT (name = 'b')", "name IN ('', 'b')"])),
)  # fmt: skip


def canonical(row):
    x, name = row
    return ("nan" if x is not None and math.isnan(x) else x if x is None else x + 0.0), name


def passes(where, row):
    """As SQL says; NaN is greater than every number."""
    x, name = row
    return {
        "name = 'a'": name == "a",
        "x > 0": x is not None and (x == "nan" or x > 0),
        "x IS NULL": x is None,
        "NOT (name = 'b')": name is not None and name != "b",
        "name IN ('', 'b')": name in {"", "b"},
    }[where]


def applied(model, step, given):
    if step == "append":
        return model + Counter(map(canonical, given))
    if step == "overwrite":
        return Counter(map(canonical, given))
    if step == "delete":
        return Counter({row: count for row, count in model.items() if not passes(given, row)})
    last = {canonical(row)[0]: canonical(row) for row in given}
    return Counter({row: count for row, count in model.items() if row[0] not in last}) + Counter(last.values())


def contents(table):
    return Counter(canonical((row["x"], row["name"])) for row in table.to_pylist())


@settings(max_examples=draws(40), deadline=None)
@given(st.lists(steps, max_size=8), st.booleans())
def test_a_table_is_a_multiset_with_a_past(sequence, compacts):
    env = SeededEnv(start_ms=1_800_000_000_000)
    with connect("mem:", env=env, maintain=False) as db:
        table = db.create("t", key="x DOUBLE", value="name STRING")
        model, past = Counter(), []
        for step, argument in sequence:
            if step == "delete":
                done = table.delete(argument)
            else:
                frame = pa.table([list(column) for column in zip(*argument, strict=True)] or [[], []], schema=SCHEMA)
                if step == "upsert":
                    done = table.upsert(
                        frame.append_column("n", pa.array(range(frame.num_rows), pa.int64())), order_by="n"
                    )
                else:
                    done = getattr(table, step)(frame)
            before, model = model, applied(model, step, argument)
            assert contents(table.to_arrow()) == model
            assert (done.inserted, done.deleted) == ((model - before).total(), (before - model).total())
            assert (done.time is None) == (model == before)
            past.append((table.last_time, model))
            env.advance_ms(10)
        if compacts:
            table.optimize()
        for time, then in past:
            if time:  # 0 is the time of a table without writes, which the retention passes with the first one
                assert contents(table.at(time).to_arrow()) == then
                assert table.at(time).count() == then.total()
        replayed = Counter()
        for change in table.changes("start"):
            if change.before is not None:
                replayed[canonical(change.before.values())] -= 1
            if change.after is not None:
                replayed[canonical(change.after.values())] += 1
        assert +replayed == model
        assert not -replayed
