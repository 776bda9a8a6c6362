"""The spine against a second one, written from section 11 of the specification alone and knowing nothing of the engine:
plain lists, no sharing, every rule where the text has it. Both must do the same, step by step, whatever is asked.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.spine import MergeReq, MergeRes, Parts
from persist_engine.model.spine.trace import Trace
from persist_kit.states import batch

#: (id lo, id hi, lower, upper, rows) of a hollow batch.
Piece = tuple[int, int, int, int, int]


@dataclass
class Logical:
    """A spine batch."""

    lo: int
    hi: int
    lower: int
    upper: int
    since: int
    pieces: list[Piece]

    @property
    def rows(self) -> int:
        return sum(piece[4] for piece in self.pieces)

    def seen(self) -> tuple[object, ...]:
        return self.lo, self.hi, self.lower, self.upper, self.since, tuple(self.pieces)


@dataclass
class Layer:
    """A level: at most two batches, and [since, work left] of their merge."""

    batches: list[Logical] = field(default_factory=list)
    merge: list[int] | None = None


def level_of(rows: int) -> int:
    level = 0
    while 1 << level < max(rows, 1):
        level += 1
    return level


@dataclass
class Text:
    """Section 11."""

    layers: list[Layer] = field(default_factory=list)
    next_id: int = 0
    upper: int = 0
    since: int = 0
    asked: list[Logical] = field(default_factory=list)

    def push(self, upper: int, rows: int) -> list[tuple[object, ...]]:
        self.asked = []
        new = Logical(self.next_id, self.next_id + 1, self.upper, upper, 0, [])
        new.pieces.append((new.lo, new.hi, new.lower, new.upper, rows))
        self.next_id, self.upper = new.hi, upper
        first = next((index for index, layer in enumerate(self.layers) if layer.batches), None)
        if rows == 0 and first is not None and [old.rows for old in self.layers[first].batches] == [0]:
            self.insert(first, new)
            self.insert(first, self.complete(first))
        else:
            self.introduce(new, level_of(rows))
        return self.requests()

    def exert(self, fuel: int) -> tuple[bool, list[tuple[object, ...]]]:
        self.asked = []
        before = copy.deepcopy(self.layers)
        self.tidy()
        every = [old for layer in self.layers for old in layer.batches]
        is_behind = any(old.rows and old.since != self.since for old in every)
        if fuel == 0 or (sum(len(old.pieces) for old in every) < 2 and not is_behind):
            self.layers = before
            return False, []
        if any(layer.merge for layer in self.layers):
            self.fuel(fuel)
        else:
            new = Logical(self.next_id, self.next_id + 1, self.upper, self.upper, self.since, [])
            new.pieces.append((new.lo, new.hi, self.upper, self.upper, 0))
            self.next_id = new.hi
            self.introduce(new, level_of(fuel))
        return True, self.requests()

    def replace(self, lo: int, hi: int, rows: int) -> None:
        for layer in reversed(self.layers):
            for old in layer.batches:
                if (old.lo, old.hi) == (lo, hi) and rows <= old.rows:
                    old.pieces = [(lo, hi, old.lower, old.upper, rows)]
                    return

    def grow(self, index: int) -> None:
        while len(self.layers) <= index:
            self.layers.append(Layer())

    def insert(self, index: int, new: Logical) -> None:
        self.grow(index)
        layer = self.layers[index]
        assert len(layer.batches) < 2
        layer.batches.append(new)
        if len(layer.batches) == 2:
            first, second = layer.batches
            layer.merge = [max(first.since, second.since, self.since), first.rows + second.rows]

    def complete(self, index: int) -> Logical:
        layer, self.layers[index] = self.layers[index], Layer()
        if len(layer.batches) == 1:
            return layer.batches[0]
        (first, second), merge = layer.batches, layer.merge
        assert merge is not None
        merged = Logical(first.lo, second.hi, first.lower, second.upper, merge[0], first.pieces + second.pieces)
        if merged.rows == 0:
            merged.pieces = [(merged.lo, merged.hi, merged.lower, merged.upper, 0)]
        else:
            self.asked.append(copy.deepcopy(merged))
        return merged

    def fuel(self, fuel: int) -> None:
        for index in range(len(self.layers)):
            merge = self.layers[index].merge
            if merge is not None:
                merge[1] -= min(fuel, merge[1])
                if merge[1] == 0:
                    self.insert(index + 1, self.complete(index))

    def introduce(self, new: Logical, level: int) -> None:
        self.fuel(8 * 2**level)
        self.grow(level)
        if any(layer.batches for layer in self.layers[:level]):
            carried: Logical | None = None
            for index in range(level):
                if carried is not None:
                    self.insert(index, carried)
                carried = self.complete(index) if self.layers[index].batches else None
            if carried is not None:
                self.insert(level, carried)
            if len(self.layers[level].batches) == 2:
                self.insert(level + 1, self.complete(level))
        self.insert(level, new)
        self.tidy()

    def tidy(self) -> None:
        if not self.layers or len(self.layers[-1].batches) != 1:
            return
        wanted = level_of(self.layers[-1].batches[0].rows)
        while wanted < len(self.layers) - 1:
            count = len(self.layers)
            top, below = self.layers[-1], self.layers[-2].batches
            if not below:
                self.layers[-2:] = [top]
                continue
            if len(below) == 1:
                weight = sum(len(layer.batches) * 2**index for index, layer in enumerate(self.layers[:-2]))
                if weight <= 2**count // 8:
                    self.layers[-2:] = [top]
                    self.insert(count - 2, below[0])
            return

    def requests(self) -> list[tuple[object, ...]]:
        def covers(one: Logical, other: Logical) -> bool:
            return one.lo <= other.lo and other.hi <= one.hi and one.since == other.since

        kept: list[Logical] = []
        for asked in reversed(self.asked):
            if not any(covers(other, asked) for other in kept):
                kept = [*(other for other in kept if not covers(asked, other)), asked]
        return [(each.lo, each.hi, each.since, tuple(each.pieces)) for each in kept]

    def seen(self) -> list[object]:
        return [
            ([each.seen() for each in layer.batches], tuple(layer.merge) if layer.merge else None)
            for layer in self.layers
        ]


def pieces(inputs: Parts) -> tuple[Piece, ...]:
    return tuple((i.lo, i.hi, p.desc.lower.time, p.desc.upper.time, p.rows) for i, p in inputs)


def seen(trace: Trace) -> list[object]:
    return [
        (
            [
                (b.id.lo, b.id.hi, b.desc.lower.time, b.desc.upper.time, b.desc.since.time, pieces(b.parts))
                for b in level.batches
            ],
            (level.merge.since.time, level.merge.remaining_work) if level.merge else None,
        )
        for level in trace.spine.levels
    ]


def asked(requests: tuple[MergeReq, ...]) -> list[tuple[object, ...]]:
    return [(each.id.lo, each.id.hi, each.desc.since.time, pieces(each.inputs)) for each in requests]


ROWS = {
    "small": [0, 1, 2, 3, 4],
    "mixed": [0, 1, 3, 17, 100, 1000, 5000],
    "large": [7, 900, 30_000, 100_000],
    "empty": [0, 0, 0, 1, 64],
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_the_spine_is_the_one_that_the_text_describes(rows: str):
    """Spec 11.1 to 11.9, 21.5."""
    for seed in range(60):
        rng = random.Random(f"{rows} {seed}")
        text, trace = Text(), Trace()
        for step in range(rng.randint(3, 60)):
            where = f"{rows}, seed {seed}, step {step}"
            action = rng.random()
            if action < 0.65:
                count, upper = rng.choice(ROWS[rows]), text.upper + rng.randint(1, 3)
                trace, requests = trace.push(batch(text.upper, upper, count))
                assert asked(requests) == text.push(upper, count), where
            elif action < 0.75:
                fuel = rng.choice([0, 1, 5, 64, 100, 5000, 100_000])
                trace, requests, worked = trace.exert(fuel)
                assert (worked, asked(requests)) == text.exert(fuel), where
            elif action < 0.85:
                text.since = max(text.since, rng.randint(0, 30))
                trace = trace.downgrade_since(Antichain.of(text.since))
            elif trace.batch_count:
                old = rng.choice(list(trace.spine_batches()))
                left = rng.randint(0, old.rows) if rng.random() < 0.7 else min(1, old.rows)
                made = batch(0, 1, left)
                output = HollowBatch(old.desc, left, made.parts, (), made.run_metas)
                trace, outcome = trace.apply_merge_res(MergeRes(output, old.id), checked=False)
                assert outcome.applied, where
                text.replace(old.id.lo, old.id.hi, left)
            assert seen(trace) == text.seen(), where
