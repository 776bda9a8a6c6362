"""Garbage collection scripts: what a run truncates, deletes and removes, version by version (spec 14.5). REWRITE=1 makes
the scripts say what they do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.client.closing import close_shard, finalize_shard
from persist_engine.client.read.handle import ReadHandle
from persist_engine.model.frontier import Antichain
from persist_engine.model.queries import rollup_seqnos
from persist_engine.shard.machine import Machine
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.datadriven import Case, run
from persist_kit.world import SCHEMA, World, row

SCRIPTS = sorted((Path(__file__).parent / "gc").glob("*.txt"))


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 3


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    script = GcScript()
    try:
        run(path, script.answer, rewrite=bool(os.environ.get("REWRITE")))
    finally:
        script.close()


class Died(BaseException):
    """The process ended here."""


class Dying:
    """A machine, or its versions, whose method `verb` is where the process ends."""

    def __init__(self, inner: Any, verb: str) -> None:
        self._inner, self._verb = inner, verb

    def __getattr__(self, name: str) -> Any:
        if name == self._verb:
            raise Died
        value = getattr(self._inner, name)
        return Dying(value, self._verb) if name == "versions" else value


class GcScript:
    """One shard. After each directive: the live versions, the rollups that state names, the parts in blob."""

    def __init__(self) -> None:
        self.world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
        self.client = self.world.process()
        self.shard_id = self.world.shard_id()
        self.writer = self.client.open_writer(self.shard_id, SCHEMA, purpose="script")
        self.upper = 0
        self.readers: dict[str, ReadHandle] = {}

    def close(self) -> None:
        for reader in self.readers.values():
            reader.expire()
        self.client.close()

    def answer(self, case: Case) -> str:
        machine = self.client.machine(self.shard_id)
        lines: list[str] = []
        match case.directive:
            case "append":
                for _ in range(int(case.args["times"])):
                    updates = [row(self.upper, "a", self.upper)]
                    lower, self.upper = Antichain.of(self.upper), self.upper + 1
                    self.writer.compare_and_append(updates, expected_upper=lower, new_upper=Antichain.of(self.upper))
            case "rollup":
                lines.append(write_rollup(machine).ending.value)
            case "reader":
                name = case.args["name"]
                self.readers[name] = self.client.open_leased_reader(self.shard_id, SCHEMA, purpose=name)
            case "expire":
                self.readers.pop(case.args["name"]).expire()
            case "close":
                close_shard(self.client, self.shard_id)
            case "tombstone":
                machine.become_tombstone()
            case "finalize":
                lines += [f"{each.type}: {each.message}" for each in finalize_shard(self.client, self.shard_id)]
                lines.append(f"rollup blobs {self.rollup_blobs()}")
            case "gc":
                lines.append(self.gc(machine, case))
                if lines == ["InvalidUsage"]:
                    return lines[0]
            case other:
                raise ValueError(f"unknown directive {other}")
        return "\n".join([*lines, self.story()])

    def gc(self, machine: Machine, case: Case) -> str:
        upto = SeqNo.parse(case.args["upto"]) if "upto" in case.args else None
        target: Any = Dying(machine, case.args["die-at"]) if "die-at" in case.args else machine
        try:
            done = gc_and_truncate(target, upto)
        except Died:
            return "died"
        except InvalidUsage:
            return "InvalidUsage"
        counts = f"truncated={done.diffs_truncated} blobs={done.blobs_deleted} removed={done.rollups_removed}"
        return f"{done.ending.value} {counts}"

    def rollup_blobs(self) -> str:
        return ",".join(sorted(key.split("/")[1] for key in self.world.blob_keys(self.shard_id, kind="rollup")))

    def story(self) -> str:
        machine = self.client.machine(self.shard_id)
        state = machine.refresh()
        bounds = machine.versions.live_diff_bounds(self.shard_id)
        assert bounds is not None
        rollups = ",".join(str(seqno) for seqno in rollup_seqnos(state))
        parts = len(self.world.blob_keys(self.shard_id, kind="part"))
        return f"versions {int(bounds.earliest)}..{int(bounds.current)} rollups {rollups} parts {parts}"
