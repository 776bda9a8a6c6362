"""Rollup scripts: what is written, linked, removed, and what opening a shard then reads (spec 7, 14.1, 14.2).

REWRITE=1 makes the scripts say what they do.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from persist_engine.base.errors import PersistError
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.model.batch import HollowRollup
from persist_engine.model.frontier import Antichain
from persist_engine.model.queries import rollup_seqnos
from persist_engine.model.state import ShardState
from persist_engine.work.audit.walk import VersionWalk
from persist_engine.work.rollup import write_rollup
from persist_kit.datadriven import Case, run
from persist_kit.world import SCHEMA, World, row

SCRIPTS = sorted((Path(__file__).parent / "rollup").glob("*.txt"))


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 4


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    run(path, RollupScript().answer, rewrite=bool(os.environ.get("REWRITE")))


class RollupScript:
    """One shard, several processes. A rollup is named by its seqno, with a letter where there are several of one seqno."""

    def __init__(self) -> None:
        self.world = World(
            settings=Settings(
                batch=BatchSettings(inline_part_bytes_max=0),
                maintenance=MaintenanceSettings(rollup_threshold=4, rollup_claim_ms=1000, recent_diffs_max=8),
            )
        )
        self.shard_id = self.world.shard_id()
        self.processes: dict[str, PersistClient] = {}
        self.written: dict[str, tuple[SeqNo, HollowRollup]] = {}
        self.upper = 0
        self.process("a").initialise(self.shard_id, SCHEMA)

    def process(self, name: str) -> PersistClient:
        if name not in self.processes:
            self.processes[name] = self.world.process()
        return self.processes[name]

    def answer(self, case: Case) -> str:
        args = dict(case.args)
        client = self.process(args.pop("by", "a"))
        try:
            lines = getattr(self, "do_" + case.directive.replace("-", "_"))(client, **args)
        except PersistError as error:
            lines = [self.anonymous(f"{type(error).__name__}: {error}")]
        return "\n".join([*lines, self.story()])

    def anonymous(self, text: str) -> str:
        for word in text.replace(",", " ").split():
            if "/r" in word:
                text = text.replace(word, word.split("/r")[0].removeprefix(f"{self.shard_id}/"))
        return text.replace(str(self.shard_id), "s")

    def story(self) -> str:
        log = self.world.consensus._inner.scan(self.shard_id, SeqNo(0), 1000)
        blobs = sorted(key.split("/")[1] for key in self.world.blob_keys(self.shard_id, kind="rollup"))
        return f"versions {log[0].seqno}..{log[-1].seqno} blobs {','.join(blobs) or 'none'}"

    @staticmethod
    def linked(state: ShardState) -> str:
        claim = "" if state.active_rollup is None else f" claimed for {state.active_rollup.seqno}"
        return f"at {state.seqno} links {','.join(map(str, rollup_seqnos(state)))}{claim}"

    # -- directives

    def do_append(self, client: PersistClient, times: str = "1") -> list[str]:
        due = []
        with_due = client.open_writer(self.shard_id, SCHEMA, purpose="script")
        for _ in range(int(times)):
            lower, self.upper = Antichain.of(self.upper), self.upper + 1
            done = with_due.compare_and_append(
                [row(1, "a", self.upper - 1)], expected_upper=lower, new_upper=Antichain.of(self.upper)
            )
            due += [f"rollup due {done.maintenance.rollup}"] if done.maintenance.rollup else []
        return [*due, self.linked(client.machine(self.shard_id).state)]

    def do_rollup(self, client: PersistClient) -> list[str]:
        done = write_rollup(client.machine(self.shard_id))
        return [done.ending.value, self.linked(client.machine(self.shard_id).state)]

    def do_write(self, client: PersistClient, name: str) -> list[str]:
        """The blob only, of what this process knows."""
        machine = client.machine(self.shard_id)
        made = machine.versions.write_rollup_for_state(machine.state)
        if made is None:
            return ["nothing to write"]
        self.written[name] = (machine.state.seqno, HollowRollup(*made))
        return [f"written {machine.state.seqno}"]

    def do_link(self, client: PersistClient, name: str) -> list[str]:
        machine = client.machine(self.shard_id)
        answer, _ = machine.add_rollup(*self.written[name])
        return [f"applied={answer.applied}", self.linked(machine.state)]

    def do_unlink(self, client: PersistClient, seqno: str) -> list[str]:
        machine = client.machine(self.shard_id)
        at = SeqNo.parse(seqno)
        answer, _ = machine.remove_rollups([(at, machine.refresh().rollups.get(at) or HollowRollup("v0/none", None))])
        return [f"removed {','.join(map(str, answer.seqnos)) or 'none'}", self.linked(machine.state)]

    def do_truncate(self, client: PersistClient, to: str) -> list[str]:
        walk = VersionWalk(client.machine(self.shard_id))
        while walk.seqno < SeqNo.parse(to):
            walk.advance()
        return [f"dropped {client.machine(self.shard_id).versions.truncate_diffs(walk.seqno, walk.state)}"]

    def do_lose(self, client: PersistClient, seqno: str) -> list[str]:
        keys = [key for key in self.world.blob_keys(self.shard_id, kind="rollup") if f"/{seqno}/" in key]
        return [f"lost {sum(self.world.blob.delete(key) is not None for key in keys)}"]

    def do_open(self, client: PersistClient) -> list[str]:
        """By a fresh process: what it reads."""
        before = self.world.consensus.calls.copy()
        fresh = self.world.process()
        state = fresh.machine(self.shard_id).state
        calls = self.world.consensus.calls - before
        return [f"opened {state.seqno} upper {state.trace.upper} scans={calls['scan']} heads={calls['head']}"]

    def do_walk(self, client: PersistClient) -> list[str]:
        """All live states."""
        states = client.machine(self.shard_id).versions.fetch_all_live_states(self.shard_id)
        assert states is not None
        first = states.seqno
        while states.advance() is not None:
            pass
        return [f"walked {first}..{states.seqno}"]

    def do_advance(self, client: PersistClient, ms: str) -> list[str]:
        self.world.env.advance_ms(int(ms))
        return []

    def do_fail_next(self, client: PersistClient, verb: str, happened: str) -> list[str]:
        self.world.faults.fail_next(verb, happened=happened == "yes")
        return []
