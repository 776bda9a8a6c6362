"""Trace scripts: what a change of a trace is as a diff, and how replicas apply it, with and without structure (spec 8).

REWRITE=1 makes the scripts say what they do.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from persist_engine.base.errors import InvariantViolated
from persist_engine.model.diff.field_diff import Delete, FieldDiff, Insert
from persist_engine.model.diff.legacy_diff import apply_unstructured
from persist_engine.model.diff.trace_diff import TraceDiff, apply_structured, changes
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeRes
from persist_engine.model.spine.trace import Trace
from persist_kit.datadriven import Case, run
from persist_kit.states import batch

SCRIPTS = sorted((Path(__file__).parent / "trace").glob("*.txt"))


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 5


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    run(path, TraceScript().answer, rewrite=bool(os.environ.get("REWRITE")))


class TraceScript:
    """Traces by name. Lines of input change one; `diff from= to=` shows the difference, `apply` applies it."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}
        self.diffs: dict[str, TraceDiff] = {}

    def answer(self, case: Case) -> str:
        args = case.args
        match case.directive:
            case "trace":  # name=, of= (copied) and the changes as input
                start = self.traces.get(args.get("of", ""), Trace(structured=args.get("structure", "yes") == "yes"))
                for line in case.input.splitlines():
                    start = changed(start, line.split())
                self.traces[args["name"]] = start
                return shown(start)
            case "flatten":
                return flat(self.traces[args["name"]])
            case "diff":
                made = changes(self.traces[args["from"]], self.traces[args["to"]])
                self.diffs[args["name"]] = made
                return described(made) or "nothing"
            case "make-diff":  # by hand: +lower,upper,rows or -lower,upper,rows
                legacy: list[FieldDiff] = []
                for line in case.input.splitlines():
                    content = batch(*map(int, line[1:].split(",")))
                    legacy.append(Insert(content, None) if line[0] == "+" else Delete(content, None))
                self.diffs[args["name"]] = TraceDiff(legacy_batches=tuple(legacy))
                return "ok"
            case "apply":
                return self.apply(args["diff"], args["to"])
            case other:
                raise ValueError(f"unknown directive {other}")

    def apply(self, diff: str, to: str) -> str:
        paths: list[str] = []
        before = self.traces[to]
        how = apply_structured if before.structured else apply_unstructured
        try:
            after = how(before, self.diffs[diff], paths.append)
        except InvariantViolated as error:
            return f"InvariantViolated: {error}"
        after.validate(deep=True)
        self.traces[to] = after
        same = [name for name, trace in sorted(self.traces.items()) if trace == after and name != to]
        return "\n".join([",".join(paths), f"equals {','.join(same) or 'none'}", shown(after)])


def changed(trace: Trace, words: list[str]) -> Trace:
    match words:
        case ["push", lower, upper, rows]:
            return trace.push_without_requests(batch(int(lower), int(upper), int(rows)))
        case ["since", time]:
            return trace.downgrade_since(Antichain.of(int(time)))
        case ["merged", lower, upper, rows]:
            after, outcome = trace.apply_merge_res(
                MergeRes(batch(int(lower), int(upper), int(rows)), None), checked=False
            )
            assert outcome.applied, outcome
            return after
        case ["claim", lo, hi, start]:
            return trace.claim(SpineId(int(lo), int(hi)), int(start))
        case ["exert", fuel]:
            return trace.exert(int(fuel))[0]
        case _:
            raise ValueError(f"unknown change {words}")


def shown(trace: Trace) -> str:
    parts = " ".join(
        f"L{held.level}:{held.id}({','.join(f'{b.desc} {b.rows}' for _, b in held.parts)})"
        for held in trace.spine_batches()
    )
    return f"since {trace.since.time} {'structured' if trace.structured else 'flat'} {parts or 'empty'}"


def flat(trace: Trace) -> str:
    stored = trace.flatten()
    lines = [f"legacy {each.desc} {each.rows}" for each in stored.legacy_batches]
    lines += [f"hollow {key} {each.desc}" for key, each in sorted(stored.hollow_batches.items())]
    lines += [
        f"spine {key} L{each.level} {each.desc} of {list(each.parts)}"
        for key, each in sorted(stored.spine_batches.items())
    ]
    lines += [
        f"merge {key} work={each.remaining_work} start={each.active_compaction_start_ms}"
        for key, each in sorted(stored.merges.items())
    ]
    assert Trace.unflatten(stored) == trace
    return "\n".join(lines) or "nothing"


def described(diff: TraceDiff) -> str:
    lines = [f"since {change.old}->{change.to}" for change in diff.since]
    for name in ("legacy_batches", "hollow_batches", "spine_batches", "merges"):
        for change in getattr(diff, name):
            what = f"{change.key.desc} {change.key.rows}" if name == "legacy_batches" else f"{change.key}"
            lines.append(f"{type(change).__name__.lower()} {name} {what}")
    return "\n".join(lines)
