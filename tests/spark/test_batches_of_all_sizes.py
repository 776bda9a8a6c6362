"""Streams whose batches have no rows, few, or many, in each envelope that streams, and Mirrors of such inputs: the shard holds what a dict
says, batch by batch, and after the same input as one batch.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from envelope_run import Row, Target, key_of, upserted
from persist_engine.base.env import SystemEnv
from persist_kit.depth import draws
from persist_spark.report import Log
from persist_spark.spec import Envelope, EnvelopeType, Input, OnError, Stream
from persist_spark.streaming import few_rows
from persist_spark.streaming.stream import run_stream
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KEYS, VALUES = ("id", "part"), ("at", "x", "more")
KEY, VALUE = "id BIGINT, part STRING", "at BIGINT, x DOUBLE, more STRUCT<a: INT, b: STRING>"
STRUCT = "STRUCT<id: BIGINT, part: STRING, at: BIGINT, x: DOUBLE, more: STRUCT<a: INT, b: STRING>>"
KEYLESS = "the row has no key: every field of the key is null"
#: Rows of the batches. Of the first FEW the driver takes a batch to itself.
SIZES, FEW = (3, 0, 0, 2, 14, 1, 0, 12, 4), 5
Held = Counter[tuple[Any, Any]]


@dataclass(frozen=True)
class Case:
    """An envelope: its input, and what its rows mean."""

    envelope: Envelope
    order: str | None = None

    @property
    def collects(self) -> bool:
        return self.envelope.on_error is OnError.COLLECT

    @property
    def is_debezium(self) -> bool:
        return self.envelope.type is EnvelopeType.DEBEZIUM

    @property
    def columns(self) -> str:
        if self.is_debezium:
            return (
                f"before {STRUCT}, after {STRUCT}, op STRING, source STRUCT<lsn: BIGINT>, err STRING, skipped BOOLEAN"
            )
        return f"{KEY}, {VALUE}, seq BIGINT, gone BOOLEAN, n BIGINT, err STRING, skipped BOOLEAN"

    @property
    def sql(self) -> str:
        envelope = self.envelope
        given = [envelope.order_column, envelope.delete_column, envelope.diff_column]
        names = ["before", "after", "op", "source"] if self.is_debezium else [*KEYS, *VALUES]
        names += [name for name in given if name is not None and name not in names and "." not in name]
        return f"select {', '.join([*names, *(['err'] if self.collects else [])])} from input where skipped is null"

    def row(self, dice: random.Random, seq: int) -> Row:
        row: Row = {
            "id": dice.choice([None, 1, 2, 3]),
            "part": dice.choice([None, "", "p"]),
            "at": 3 * seq - dice.choice([0, 50]),  # each one once, some of them late
            "x": dice.choice([None, math.nan, 0.0, -0.0, 1.5]),
            "more": dice.choice([None, {"a": None, "b": "x"}, {"a": 1, "b": None}]),
        }
        error = {"err": f"bad {seq % 3}"} if self.collects and dice.random() < 0.2 else {}
        if not self.is_debezium:
            diffs = [None, -1, 1, 2] if self.collects else [-1, 0, 1, 2]
            return {**row, "seq": seq, "gone": dice.random() < 0.3, "n": dice.choice(diffs), **error}
        row |= {"id": row["id"] or 4, "part": row["part"] or ""}
        moved = {**row, "id": dice.choice([1, 2, 3, 4])}
        events: list[Row] = [
            {"op": "c", "after": row},
            {"op": "u", "before": moved, "after": row},
            {"op": "d", "before": row},
            {},  # a tombstone
        ]
        if self.collects:
            events += [{"op": "t"}, {"op": "c"}, {"op": "d"}, {"op": "d", "before": {**row, "part": None}}]
        return {**dice.choice(events), "source": {"lsn": seq}, **error}

    def after(self, held: Held, rows: list[Row]) -> Held:
        """The contents after a batch."""
        match self.envelope.type:
            case EnvelopeType.APPEND:
                return held + Counter(self.entry(row, self.fault(row)) for row in rows)
            case EnvelopeType.MIRROR:
                return Counter(self.entry(row, self.fault(row)) for row in rows)
            case EnvelopeType.DIFF:
                added = Counter(held)
                for row in rows:
                    added[self.entry(row, self.fault(row))] += 1 if row["n"] is None else row["n"]
                return Counter({each: diff for each, diff in added.items() if diff})
        commands = [command for row in rows for command in self.commands(row)]
        good, bad = ([row for row in commands if bool(self.fault(row)) is is_bad] for is_bad in (False, True))
        key = (*KEYS, "err") if self.collects else KEYS
        state = {entry[0]: entry[1] for entry in held if not self.is_error(entry)}
        envelope = Envelope(type=EnvelopeType.UPSERT, order_column=self.order, delete_column="gone")
        state = upserted(state, good, key=key, value=VALUES, envelope=envelope)
        entries = {(name, key_of(value)) for name, value in state.items()}
        entries |= {self.entry(row, self.fault(row)) for row in bad} | {entry for entry in held if self.is_error(entry)}
        return Counter(dict.fromkeys(entries, 1))

    def is_error(self, entry: tuple[Any, Any]) -> bool:
        return self.collects and entry[0][-1] is not None

    def entry(self, row: Row, fault: str | None) -> tuple[Any, Any]:
        err = (fault,) if self.collects else ()
        if fault:
            return (None, None, *err), (None, None, None)
        return key_of([*(row[name] for name in KEYS), *err]), key_of(row[name] for name in VALUES)

    def fault(self, row: Row) -> str | None:
        """Why the row, or the command, is an error."""
        if not self.collects:
            return None
        if row.get("err"):
            return str(row["err"])
        if self.envelope.type is EnvelopeType.DIFF and row["n"] is None:
            name = json.dumps({name: row[name] for name in KEYS}, separators=(",", ":"))
            return f"envelope.diffColumn: n is null in the row with key {name}"
        is_keyless = self.envelope.type is EnvelopeType.UPSERT and row["id"] is None and row["part"] is None
        return KEYLESS if is_keyless else None

    def commands(self, row: Row) -> list[Row]:
        """What a row of an Upsert means, or an event of Debezium, in the columns of an Upsert."""
        if not self.is_debezium:
            return [{**row, "err": row.get("err")}]
        op, before, after, err = (row.get(name) for name in ("op", "before", "after", "err"))
        beside = {"seq": row["source"]["lsn"], "gone": False, "err": None}
        if err is None and op is None and before is None and after is None:
            return []
        if err is None:
            err = {
                "t": "op t (truncate): an event that removes all rows; exclude it with input.format.sql, and empty the shard",
                "c": None if after else "after is null in an event with op c",
                "d": "before is null in a delete; let the table log its key" if not before else None,
            }.get(op or "")
        if err is None and op == "d" and before["part"] is None:
            err = "before.part is null in a delete; let the table log its key"
        if err is not None:
            return [{**beside, "err": err}]
        if op == "d":
            return [{**before, **beside, "gone": True}]
        is_moved = op == "u" and before["id"] != after["id"]
        return [*([{**before, **beside, "gone": True}] if is_moved else []), {**after, **beside}]


def _case(kind: EnvelopeType, *, collects: bool, order: str | None = None, **columns: str) -> Case:
    on_error = OnError.COLLECT if collects else OnError.FAIL
    return Case(Envelope(type=kind, on_error=on_error, **columns), order)


CASES = {
    "append": _case(EnvelopeType.APPEND, collects=False),
    "append, errors": _case(EnvelopeType.APPEND, collects=True),
    "diff": _case(EnvelopeType.DIFF, collects=False, diff_column="n"),
    "diff, errors": _case(EnvelopeType.DIFF, collects=True, diff_column="n"),
    "upsert": _case(EnvelopeType.UPSERT, collects=False, order="at", order_column="at", delete_column="gone"),
    "upsert, errors": _case(EnvelopeType.UPSERT, collects=True, order="seq", order_column="seq", delete_column="gone"),
    "debezium": _case(EnvelopeType.DEBEZIUM, collects=False, order="seq"),
    "debezium, errors": _case(EnvelopeType.DEBEZIUM, collects=True, order="seq"),
}
MIRRORS = {f"mirror{', errors' if each else ''}": _case(EnvelopeType.MIRROR, collects=each) for each in (False, True)}


def batches_of(case: Case, dice: random.Random) -> list[list[Row]]:
    """Rows by batch. Some rows come twice."""
    start, seq, made = dice.randrange(len(SIZES)), 0, []
    for size in (*SIZES[start:], *SIZES[:start]):
        rows: list[Row] = []
        while len(rows) < size:
            rows.append(dice.choice(rows) if rows and dice.random() < 0.15 else case.row(dice, seq := seq + 1))
        made.append(rows)
    return made


def held(target: Target) -> Held:
    upper = target.client.recent_upper(target.id).time
    if upper == 0:
        return Counter()
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        rows = reader.snapshot(upper - 1).to_table().to_pylist()
    found: Held = Counter()
    for row in rows:
        found[key_of(row["key"].values()), key_of(row["val"].values())] += row["diff"]
    return found


class Files:
    """A folder of JSON files, of which a batch reads one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        folder.mkdir()

    def add(self, rows: Iterable[Row], dice: random.Random) -> None:
        """A file without rows is empty, or has rows that SQL does not select."""
        lines = [json.dumps(row) for row in rows] or ['{"skipped": true}'] * dice.choice([0, 1, 30])
        path = self.folder / f"{self.count:03}.json"
        path.write_text("".join(f"{line}\n" for line in lines))
        os.utime(path, (1_700_000_000 + self.count,) * 2)  # Spark takes the oldest first
        self.count += 1


def streamed(spark: SparkSession, target: Target, case: Case, files: Files, check: Any) -> Log:
    """A driver that reads what is there and ends. `check` is called after each batch."""

    class Checks(Log):
        def event(self, event: str, **fields: Any) -> None:
            super().event(event, **fields)
            if event == "batch":
                check(fields["batch"])

    options = {"path": str(files.folder), "maxFilesPerTrigger": "1", "mode": "FAILFAST"}
    source = Input(format="json", schema=case.columns, options=options, sql=case.sql)
    spec = replace(target.spec([], case.columns, case.envelope), input=source, stream=Stream(is_bounded=True))
    log = Checks(io.StringIO(), SystemEnv())
    run_stream(spark, spec, stop=threading.Event(), env=SystemEnv(), log=log)
    return log


@pytest.mark.parametrize("seed", range(draws(1)))
@pytest.mark.parametrize("name", CASES)
def test_a_stream_of_all_sizes_is_what_a_dict_says(local_spark, make_target, tmp_path, monkeypatch, name, seed):
    case, dice = CASES[name], random.Random(f"{name} {seed}")
    key = f"{KEY}, err STRING" if case.collects else KEY
    here, there, files = make_target(key, VALUE), make_target(key, VALUE), Files(tmp_path / "in")
    monkeypatch.setattr(few_rows, "FEW_ROWS", FEW)
    monkeypatch.setattr(few_rows, "commands_max", lambda _: FEW)
    batches, expected = batches_of(case, dice), [Counter[Any]()]
    for rows in batches:
        files.add(rows, dice)
        expected.append(case.after(expected[-1], rows))
    seen = []
    log = streamed(local_spark, here, case, files, lambda batch: seen.append((batch, held(here))))
    assert seen == list(enumerate(expected[1:]))
    names = [json.loads(line)["event"] for line in log._stream.getvalue().splitlines()]
    assert "staged" in names
    assert ("decided" in names) is case.envelope.type.has_keys, "few rows are for the driver"
    there.run([row for rows in batches for row in rows], case.columns, case.envelope, input={"sql": case.sql})
    assert held(there) == case.after(Counter(), [row for rows in batches for row in rows])


@pytest.mark.parametrize("seed", range(draws(1)))
@pytest.mark.parametrize("name", MIRRORS)
def test_a_mirror_of_all_sizes_is_what_a_dict_says(make_target, name, seed):
    case, dice = MIRRORS[name], random.Random(f"{name} {seed}")
    target = make_target(f"{KEY}, err STRING" if case.collects else KEY, VALUE)
    for rows in batches_of(case, dice)[:6]:
        target.run(rows, case.columns, case.envelope, input={"sql": case.sql, "allow_empty": True})
        assert held(target) == case.after(Counter(), rows)
