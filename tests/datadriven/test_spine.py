"""Spine scripts: what a push, a merge result or exertion makes of the levels (spec 11, 12, Appendix C)."""

from __future__ import annotations

from pathlib import Path

import pytest
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeReq, MergeRes, level_for
from persist_engine.model.spine.trace import Trace
from persist_kit.datadriven import Case, run
from persist_kit.states import batch

SCRIPTS = sorted((Path(__file__).parent / "spine").glob("*.txt"))


def test_there_are_scripts() -> None:
    """Spec 21.4."""
    assert len(SCRIPTS) >= 5


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    run(path, SpineScript().answer)


class SpineScript:
    """One trace, driven line by line. After each directive it must be sound and survive being flattened."""

    def __init__(self) -> None:
        self.trace = Trace()

    def answer(self, case: Case) -> str:
        words = {key: int(value) for key, value in case.args.items() if key not in {"input", "upper"}}
        match case.directive:
            case "level":
                return str(level_for(words["rows"]))
            case "push":
                upper = case.args["upper"]
                pushed = batch(
                    words["lower"], None if upper == "inf" else int(upper), words["rows"], since=words.get("since", 0)
                )
                self.trace, requests = self.trace.push(pushed)
                out = [requests_text(requests), self.dump()]
            case "downgrade-since":
                self.trace = self.trace.downgrade_since(Antichain.of(words["since"]))
                out = [self.dump()]
            case "merge-res":
                output = batch(words["lower"], int(case.args["upper"]), words["rows"], since=words.get("since", 0))
                where = case.args.get("input")
                where_id = None if where is None else SpineId(*map(int, where.split("-")))
                before = self.trace
                self.trace, outcome = self.trace.apply_merge_res(MergeRes(output, where_id), checked=False)
                assert outcome.applied or self.trace is before
                out = [outcome.value, self.dump()]
            case "claim":
                self.trace = self.trace.claim(SpineId(*map(int, case.args["input"].split("-"))), words["start"])
                out = [self.dump()]
            case "fueled":
                out = [requests_text(self.trace.fueled_requests(claimed_before_ms=words["before"]))]
            case "exert":
                self.trace, requests, worked = self.trace.exert(words["fuel"])
                out = [f"worked={str(worked).lower()}", requests_text(requests), self.dump()]
            case other:
                raise AssertionError(f"unknown directive {other}")
        self.trace.validate(deep=True)
        assert Trace.unflatten(self.trace.flatten()) == self.trace
        return "\n".join(line for line in out if line)

    def dump(self) -> str:
        lines = []
        for index in reversed(range(len(self.trace.spine.levels))):
            level = self.trace.spine.levels[index]
            for held in level.batches:
                claim = "" if held.active_compaction_start_ms is None else f" claimed@{held.active_compaction_start_ms}"
                parts = ",".join(str(part_id) for part_id, _ in held.parts)
                lines.append(f"L{index} {held.id} {held.desc} rows={held.rows} parts={parts}{claim}")
            if level.merge is not None:
                lines.append(
                    f"L{index} merge {level.merge_id}@{level.merge.since.time} work={level.merge.remaining_work}"
                )
        return "\n".join(lines)


def requests_text(requests: tuple[MergeReq, ...]) -> str:
    return "\n".join(
        f"request {req.id} {req.desc} inputs={','.join(str(part_id) for part_id, _ in req.inputs)}" for req in requests
    )
