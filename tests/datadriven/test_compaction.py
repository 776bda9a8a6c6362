"""Compaction scripts: what is planned, what a result replaces, what a run of it leaves in state and in blob (spec 12, 13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.compaction_plan import CompactionChunk, compaction_chunks
from persist_engine.model.spine.spine import MergeReq
from persist_engine.shard.machine import Machine
from persist_engine.work.compact import compact
from persist_kit.datadriven import Case, run
from persist_kit.world import SCHEMA, World

SCRIPTS = sorted((Path(__file__).parent / "compaction").glob("*.txt"))
TARGET = 1024


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 6


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    script = CompactionScript()
    try:
        run(path, script.answer)
    finally:
        script.close()


class Died(BaseException):
    """The process ended here."""


class CompactionScript:
    """One shard whose parts hold two rows each. After each directive: hollow batches with their runs, and the number of
    parts in blob.
    """

    def __init__(self) -> None:
        self.world = World(settings=_settings(1 << 30))
        self.client = self.world.process()
        self.shard_id = self.world.shard_id()
        self.writer = self.client.open_writer(self.shard_id, SCHEMA, purpose="script")
        self.upper = 0
        self.requests: dict[str, MergeReq] = {}

    def close(self) -> None:
        self.client.close()

    def machine(self, case: Case) -> Machine:
        """Of a process of its own, with the memory that the directive gives."""
        machine = self.world.process(settings=_settings(int(case.args.get("memory", 1 << 30)))).machine(self.shard_id)
        machine.refresh()
        return machine

    def answer(self, case: Case) -> str:
        lines: list[str] = []
        match case.directive:
            case "append":
                lines += self.append(case)
            case "since":
                with self.client.open_leased_reader(self.shard_id, SCHEMA, purpose="script") as reader:
                    reader.downgrade_since(Antichain.of(int(case.args["at"])))
            case "request":
                machine = self.machine(case)
                if case.args.get("merge") == "true":  # as if much had been written
                    machine.spine_exert(1 << 30)
                due = [batch for batch in machine.state.trace.spine_batches() if not batch.is_compact]
                self.requests[case.args["name"]] = due[0].request()
            case "plan":
                chunks = compaction_chunks(self.requests[case.args["name"]], _settings(int(case.args["memory"])))
                return "\n".join(_chunk(chunk) for chunk in chunks) or "nothing to do"
            case "compact":
                lines.append(self.compact(case))
            case "rows":
                return self.rows(int(case.args["as-of"]))
            case other:
                raise ValueError(f"unknown directive {other}")
        return "\n".join([*lines, self.story()])

    def append(self, case: Case) -> list[str]:
        """Lines of input are rows `id name time diff`; runs=N stages N batches and appends them as one."""
        width, runs = int(case.args.get("width", 1)), int(case.args.get("runs", 1))
        lower, self.upper = Antichain.of(self.upper), self.upper + width
        upper = Antichain.of(self.upper)
        rows = [line.split() for line in case.input.splitlines()]
        updates = [(((int(key),), (name,)), int(time), int(diff)) for key, name, time, diff in rows]
        share = max(1, -(-len(updates) // runs))
        pieces = [updates[at : at + share] for at in range(0, len(updates), share)] or [[]]
        batches = [self.writer.batch(piece, lower=lower, upper=upper) for piece in pieces]
        self.writer.compare_and_append_batch(batches, expected_upper=lower, new_upper=upper)
        return []

    def compact(self, case: Case) -> str:
        """`die-at=N`: the process ends at its Nth merge result, before it takes effect. `lose=true`: the answer to the
        first merge result is lost, and it took effect.
        """
        machine: Any = self.machine(case)
        calls = iter(range(1, 1000))
        original = machine.apply_merge_res

        def apply_merge_res(res: Any) -> Any:
            if next(calls) == int(case.args.get("die-at", 0)):
                raise Died
            return original(res)

        machine.apply_merge_res = apply_merge_res
        if case.args.get("lose") == "true":
            self.world.faults.fail_next("compare_and_set", happened=True)
        try:
            done = compact(machine, self.requests[case.args["name"]])
        except Died:
            return "died"
        return f"{done.ending.value} applied={done.applied} rows={done.rows_before}->{done.rows_after} deleted={done.blobs_deleted}"

    def rows(self, as_of: int) -> str:
        with self.client.open_leased_reader(self.shard_id, SCHEMA, purpose="script") as reader:
            table = reader.snapshot(as_of=Antichain.of(as_of)).to_table()
        return "\n".join(
            f"{row['key']['id']} {row['val']['name']} {row['time']} {row['diff']}" for row in table.to_pylist()
        )

    def story(self) -> str:
        state = self.machine(Case("", {}, "", "", 0)).state
        lines = []
        for batch in state.trace.spine_batches():
            for part_id, hollow in batch.parts:
                runs = " ".join("+".join(str(part.rows) for part in parts) for _, parts in hollow.runs())
                lines.append(f"{batch.id} L{batch.level}: {part_id} {hollow.desc} runs [{runs}]")
        parts = len(self.world.blob_keys(self.shard_id, kind="part"))
        return "\n".join([*lines, f"parts in blob {parts}"])


def _settings(memory: int) -> Settings:
    return Settings(
        batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=TARGET),
        compaction=CompactionSettings(memory_bytes_max=memory),
    )


def _chunk(chunk: CompactionChunk) -> str:
    what = "all" if chunk.run_ids is None else f"{len(chunk.run_ids)} runs"
    over = " over budget" if chunk.over_budget else ""
    return f"{what} of {chunk.input} as {chunk.desc}: {len(chunk.runs)} runs merged{over}"
