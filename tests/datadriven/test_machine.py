"""Machine scripts: what commands answer and what they make of a shard, one process or several (spec 9).

REWRITE=1 makes the scripts say what they do.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from persist_engine.base.errors import PersistError
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, WriterId
from persist_engine.model.queries import is_finalized, is_tombstone, seqno_since
from persist_engine.shard.machine import Machine, SinceAhead
from persist_kit.datadriven import Case, run
from persist_kit.states import batch, inline_batch
from persist_kit.world import SCHEMA, World

SCRIPTS = sorted((Path(__file__).parent / "machine").glob("*.txt"))


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 8


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    run(path, MachineScript().answer, rewrite=bool(os.environ.get("REWRITE")))


def frontier(text: str) -> Antichain:
    return Antichain.empty() if text == "closed" else Antichain.of(int(text))


class MachineScript:
    """One shard. `by=` names the process that acts; every process has its own, maybe stale, copy of the state."""

    def __init__(self) -> None:
        settings = Settings(
            batch=BatchSettings(inline_total_bytes_max=100),
            compaction=CompactionSettings(claim_ms=1000),
            maintenance=MaintenanceSettings(validate_roundtrip=True),
        )
        self.world = World(settings=settings)
        self.start_ms = self.world.env.now_ms()
        self.shard_id = self.world.shard_id()
        self.processes: dict[str, PersistClient] = {}
        self.names: dict[str, str] = {}
        self.process("a").initialise(self.shard_id, SCHEMA)

    def process(self, name: str) -> PersistClient:
        if name not in self.processes:
            self.processes[name] = self.world.process()
        return self.processes[name]

    def answer(self, case: Case) -> str:
        args = dict(case.args)
        by = args.pop("by", "a")
        if case.directive == "restart":
            self.processes.pop(by, None)
            return "ok"
        machine = self.process(by).machine(self.shard_id)
        calls = self.world.consensus.calls.copy()
        try:
            out = getattr(self, "do_" + case.directive.replace("-", "_"))(machine, **args)
        except PersistError as error:
            out = f"{type(error).__name__}: {error}"
        for name, written in self.names.items():
            out = out.replace(written, name)
        commits = (self.world.consensus.calls - calls)["compare_and_set"]
        return f"{out}\n{self.story(machine)} cas={commits}"

    def story(self, machine: Machine) -> str:
        state = machine.state
        trace = state.trace
        words = [str(state.seqno), f"since={trace.since}", f"upper={trace.upper}", f"hold={seqno_since(state)}"]
        for label, ids in (
            ("writers", state.writers),
            ("leased", state.leased_readers),
            ("critical", state.critical_readers),
        ):
            names = {written: name for name, written in self.names.items()}
            held = sorted(names.get(str(each), "?") for each in ids)
            words += [f"{label}={','.join(held)}"] if held else []
        return " ".join(words + ["tombstone"] * is_tombstone(state) + ["finalized"] * is_finalized(state))

    def named(self, kind: type, name: str) -> object:
        made = kind.from_bytes(name.encode().rjust(16, b"\0"))  # type: ignore[attr-defined]
        self.names[name] = str(made)
        return made

    # -- directives

    def do_append(
        self, machine: Machine, writer: str, lower: str, upper: str, rows: str = "0", inline: str = "0"
    ) -> str:
        low, high = frontier(lower), frontier(upper)
        made = (
            inline_batch(low.time, high.time, b"x" * int(inline))
            if int(inline)
            else batch(low.time, high.time, int(rows))
        )
        answer, maintenance = machine.compare_and_append(made, writer_id=self.named(WriterId, writer), purpose="script")
        requests = "".join(f" request={req.id}" for req in maintenance.requests)
        fields = "" if type(answer).__name__ != "UpperMismatch" else f" current={answer.current}"
        return type(answer).__name__ + fields + requests

    def do_fail_next(self, machine: Machine, verb: str, happened: str, answered: str = "no", times: str = "1") -> str:
        self.world.faults.fail_next(verb, happened=happened == "yes", answered=answered == "yes", times=int(times))
        return "ok"

    def do_advance(self, machine: Machine, ms: str) -> str:
        self.world.env.advance_ms(int(ms))
        return f"clock {self.world.env.now_ms() - self.start_ms}"

    def do_refresh(self, machine: Machine) -> str:
        machine.refresh()
        return "ok"

    def do_register_leased(self, machine: Machine, reader: str, lease: str = "10000", critical: str = "no") -> str:
        answer, _ = machine.register_leased_reader(
            self.named(LeasedReaderId, reader),
            lease_ms=int(lease),
            purpose="script",
            since_from_critical=critical == "yes",
        )
        return f"since={answer.since} seqno={answer.seqno}"

    def do_heartbeat(self, machine: Machine, reader: str) -> str:
        return f"existed={machine.heartbeat_leased_reader(self.named(LeasedReaderId, reader))[0].existed}"

    def do_downgrade(self, machine: Machine, reader: str, since: str, outstanding: str = "") -> str:
        seqno = SeqNo.parse(outstanding) if outstanding else None
        reader_id = self.named(LeasedReaderId, reader)
        answer, _ = machine.downgrade_since(reader_id, outstanding_seqno=seqno, new_since=frontier(since))
        return f"since={answer.since}"

    def do_register_critical(self, machine: Machine, reader: str, opaque: str) -> str:
        answer, _ = machine.register_critical_reader(
            self.named(CriticalReaderId, reader), opaque=opaque.encode(), purpose="script"
        )
        return f"since={answer.since} opaque={answer.opaque.decode()}"

    def do_compare_and_downgrade(self, machine: Machine, reader: str, expected: str, opaque: str, since: str) -> str:
        answer, _ = machine.compare_and_downgrade_since(
            self.named(CriticalReaderId, reader),
            expected_opaque=expected.encode(),
            new_opaque=opaque.encode(),
            new_since=frontier(since),
        )
        shown = f" opaque={answer.opaque.decode()}" if hasattr(answer, "opaque") else ""
        return f"{type(answer).__name__} since={answer.since}{shown}"

    def do_expire(self, machine: Machine, name: str, kind: str) -> str:
        match kind:
            case "writer":
                existed, _ = machine.expire_writer(self.named(WriterId, name))
            case "leased":
                existed, _ = machine.expire_leased_reader(self.named(LeasedReaderId, name))
            case _:
                existed, _ = machine.expire_critical_reader(self.named(CriticalReaderId, name))
        return f"existed={existed}"

    def do_snapshot(self, machine: Machine, as_of: str) -> str:
        answer = machine.snapshot_batches(frontier(as_of), 0)
        if answer is None:
            return "not yet"
        return (
            f"since {answer.since} is ahead"
            if isinstance(answer, SinceAhead)
            else " ".join(str(b.desc) for b in answer)
        )

    def do_listen(self, machine: Machine, at: str) -> str:
        answer = machine.next_listen_batch(frontier(at), 0)
        return "not yet" if answer is None else str(answer.desc)

    def do_wait(self, machine: Machine, past: str) -> str:
        return f"past={machine.wait_for_upper_past(frontier(past), 0)}"

    def do_claim(self, machine: Machine, most: str = "9") -> str:
        answer, _ = machine.claim_compactions(max_requests=int(most))
        return "claimed " + ",".join(str(request.id) for request in answer.requests)

    def do_exert(self, machine: Machine, fuel: str) -> str:
        answer, _ = machine.spine_exert(int(fuel))
        return "requests " + ",".join(str(request.id) for request in answer.requests)

    def do_become_tombstone(self, machine: Machine) -> str:
        machine.become_tombstone()
        return f"batches={machine.state.trace.batch_count} rows={machine.state.trace.rows}"
