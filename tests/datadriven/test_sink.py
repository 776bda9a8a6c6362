"""Sink scripts: what the machines of spec 17 decide, event by event. REWRITE=1 makes the scripts say what they do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.dataflow.sink.spill import ArrowLaws
from persist_engine.flow.append import Append
from persist_engine.flow.correction import BufferPolicy, CorrectionBuffer
from persist_engine.flow.desired import DesiredFrontiers, Stream
from persist_engine.flow.mint import Describe, Mint
from persist_engine.flow.refresh import Refresh
from persist_engine.flow.write import Stage, Write
from persist_engine.model.frontier import Antichain
from persist_engine.rows.ingest import normalise
from persist_kit.datadriven import Case, parse, rewritten, run
from persist_kit.world import SCHEMA

SCRIPTS = sorted((Path(__file__).parent / "sink").glob("*.txt"))


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 8


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    run(path, SinkScript().answer, rewrite=bool(os.environ.get("REWRITE")))


def test_rewriting_keeps_all_but_the_answers() -> None:
    script = "# why\n\none a=1\nrow\n----\nold\nanswer\n\n# because\ntwo\n----\n"
    assert rewritten(script, ["new", "x\ny"]) == "# why\n\none a=1\nrow\n----\nnew\n\n# because\ntwo\n----\nx\ny\n"
    assert [case.directive for case in parse(script)] == ["one", "two"]


def frontier(text: str) -> Antichain:
    return Antichain.empty() if text == "closed" else Antichain.of(int(text))


def table(text: str) -> pa.Table:
    """Lines of `key time diff`."""
    rows = [line.split() for line in text.splitlines()]
    updates = [(((int(key),), ("",)), int(time), int(diff)) for key, time, diff in rows]
    tables = list(normalise(updates, SCHEMA))
    return tables[0] if tables else SCHEMA.updates_schema.empty_table()


def lines(updates: pa.Table) -> list[str]:
    return [f"  {row['key']['id']} {row['time']} {row['diff']}" for row in updates.to_pylist()]


class Numbers:
    """Spill that remembers what it holds."""

    def __init__(self) -> None:
        self.tables: dict[int, pa.Table] = {}
        self.written = 0

    def write(self, spilled: pa.Table) -> int:
        self.written += 1
        self.tables[self.written] = spilled
        return self.written

    def read(self, number: int) -> pa.Table:
        return self.tables[number]

    def delete(self, number: int) -> None:
        del self.tables[number]


class SinkScript:
    """One machine at a time: `mint`, `write`, `append`, `buffer` and `refresh` begin a new one."""

    def __init__(self) -> None:
        self.machine: Any = None
        self.spill = Numbers()

    def answer(self, case: Case) -> str:
        method = getattr(self, case.directive.replace("-", "_"), None)
        if method is None:
            raise ValueError(f"unknown directive {case.directive}")
        try:
            return "\n".join(method(case))
        except (InvalidUsage, InvariantViolated) as error:
            return f"{type(error).__name__}: {error}"

    # -- mint ------------------------------------------------------------------------------------------------------------

    def mint(self, case: Case) -> list[str]:
        desired = DesiredFrontiers() if case.args.get("errors") == "yes" else DesiredFrontiers.without_errors()
        as_of = frontier(case.args.get("as-of", "0"))
        self.machine = Mint(desired, as_of=as_of, read_only=case.args.get("read-only") == "yes")
        return self._minted([])

    def desired(self, case: Case) -> list[str]:
        """Rows for a write machine and a buffer, a frontier for both machines."""
        if "frontier" not in case.args:
            self.machine.on_desired(table(case.input))
            return self._size()
        stream = Stream(case.args.get("stream", "ok"))
        instructions = self.machine.on_desired_frontier(stream, frontier(case.args["frontier"]))
        return self._minted(instructions) if isinstance(self.machine, Mint) else self._written(instructions)

    def upper(self, case: Case) -> list[str]:
        return self._minted(self.machine.on_shard_upper(frontier(case.args["frontier"])))

    def allow_writes(self, _case: Case) -> list[str]:
        return self._minted(self.machine.allow_writes())

    def _minted(self, instructions: list) -> list[str]:
        return [*map(str, instructions), f"output {self.machine.output_frontier}"]

    # -- write -----------------------------------------------------------------------------------------------------------

    def write(self, case: Case) -> list[str]:
        desired = DesiredFrontiers() if case.args.get("errors") == "yes" else DesiredFrontiers.without_errors()
        self.machine = Write(desired, CorrectionBuffer(ArrowLaws(), since=frontier(case.args.get("as-of", "0"))))
        return []

    def persisted(self, case: Case) -> list[str]:
        if "frontier" not in case.args:
            self.machine.on_persisted(table(case.input))
            return self._size()
        return self._written(self.machine.on_persisted_frontier(frontier(case.args["frontier"])))

    def describe(self, case: Case) -> list[str]:
        described = Describe(frontier(case.args["lower"]), frontier(case.args["upper"]))
        instructions = self.machine.on_description(described)
        return self._written(instructions) if isinstance(self.machine, Write) else list(map(str, instructions))

    def _written(self, instructions: list) -> list[str]:
        out = []
        for instruction in instructions:
            out.append(str(instruction))
            if isinstance(instruction, Stage):
                for corrections in self.machine.corrections(instruction):
                    out += lines(corrections)
        return [*out, *self._size()]

    def _size(self) -> list[str]:
        buffer = self.machine.buffer if isinstance(self.machine, Write) else self.machine
        return [f"buffer since {buffer.since} rows {buffer.size().rows}"]

    # -- append ----------------------------------------------------------------------------------------------------------

    def append(self, _case: Case) -> list[str]:
        self.machine = Append()
        return []

    def batch(self, case: Case) -> list[str]:
        return list(map(str, self.machine.on_batch(frontier(case.args["lower"]), case.args["name"])))

    def staged_before(self, case: Case) -> list[str]:
        return list(map(str, self.machine.on_batches_frontier(frontier(case.args["frontier"]))))

    def appended(self, _case: Case) -> list[str]:
        return list(map(str, self.machine.on_appended()))

    def mismatch(self, case: Case) -> list[str]:
        return list(map(str, self.machine.on_mismatch(frontier(case.args["current"]))))

    def close(self, _case: Case) -> list[str]:
        return list(map(str, self.machine.on_close()))

    # -- buffer ----------------------------------------------------------------------------------------------------------

    def buffer(self, case: Case) -> list[str]:
        numbers = {name.replace("-", "_"): int(case.args[name]) for name in case.args if name != "spill"}
        self.spill = Numbers()
        policy = BufferPolicy(**{"rows_min": 1, **numbers})
        self.machine = CorrectionBuffer(
            ArrowLaws(), policy=policy, spill=self.spill if case.args.get("spill") == "yes" else None
        )
        return []

    def insert(self, case: Case) -> list[str]:
        self.machine.insert(table(case.input))
        return self._buffered()

    def insert_negated(self, case: Case) -> list[str]:
        self.machine.insert_negated(table(case.input))
        return self._buffered()

    def advance_since(self, case: Case) -> list[str]:
        self.machine.advance_since(frontier(case.args["to"]))
        return self._buffered()

    def consolidate_at_since(self, _case: Case) -> list[str]:
        self.machine.consolidate_at_since()
        return self._buffered()

    def updates_before(self, case: Case) -> list[str]:
        found = list(self.machine.updates_before(frontier(case.args["upper"])))
        return [line for updates in found for line in lines(updates)] + self._buffered()

    def _buffered(self) -> list[str]:
        size = self.machine.size()
        spilled = f" chunks spilled {len(self.spill.tables)}" if self.spill.written else ""
        return [
            f"since {self.machine.since} rows {size.rows} of {size.capacity_rows} "
            f"inserted {size.inserted_rows} cancelled {size.cancelled_rows}{spilled}"
        ]

    # -- refresh ---------------------------------------------------------------------------------------------------------

    def refresh(self, case: Case) -> list[str]:
        every = case.args.get("every")
        self.machine = Refresh(
            every=None if every is None else int(every),
            aligned_to=int(case.args.get("aligned-to", 0)),
            at=tuple(map(int, filter(None, case.args.get("at", "").split(",")))),
        )
        return [f"last {self.machine.last}"]

    def round(self, case: Case) -> list[str]:
        """Lines of frontiers."""
        return [f"{{{line}}} -> {self.machine.frontier(frontier(line))}" for line in case.input.splitlines()]

    def show(self, case: Case) -> list[str]:
        return lines(self.machine.apply(table(case.input))) or ["nothing"]
