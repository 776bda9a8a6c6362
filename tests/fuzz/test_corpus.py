"""Every input of the fuzzing corpus, and some thousand changed ones, obey the law of their target. `make fuzz` goes on."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from persist_engine.codec.batch import decode_batch
from persist_engine.model.batch import HollowBatch
from persist_kit.fuzz.targets import TARGETS, Finding, Target

CORPUS = Path(__file__).resolve().parent / "corpus"
#: Changed inputs per target; a part costs milliseconds, the others well below one.
MUTATIONS = {"part": 60}
MUTATIONS_ELSE = 400


def inputs(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_of_the_corpus_decodes_or_is_refused(name: str):
    target = TARGETS[name]
    accepted = [target.check(data) for data in inputs(name)]
    assert any(accepted), "no seed of this target is valid any more: run tests/fuzz/seeds.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_decode_or_are_refused(name: str):
    target, seeds = TARGETS[name], inputs(name)
    rng = random.Random(zlib.crc32(name.encode()))
    refused = 0
    for _ in range(MUTATIONS.get(name, MUTATIONS_ELSE)):
        data = changed(target, rng.choice(seeds), rng)
        try:
            refused += not target.check(data)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__} for {data!r}") from error
    assert refused, "nothing of what was changed is refused: the changes do not get through"


def changed(target: Target, data: bytes, rng: random.Random) -> bytes:
    def scramble(raw: bytes) -> bytes:
        return scrambled(raw, rng)

    for _ in range(rng.choice((1, 1, 2, 4))):
        data = target.mutate(data, rng, scramble) if target.mutate is not None else scramble(data)
    return data


def scrambled(raw: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, dropped, doubled or put in."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 8)]
            case 2:
                out[at:at] = out[at : at + rng.randint(1, 8)]
            case _:
                out[at:at] = rng.randbytes(rng.randint(1, 4))
    return bytes(out)


def test_a_decoder_that_gives_back_something_else_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def counts_one_more(data: bytes) -> HollowBatch:
        batch = decode_batch(data)
        return replace(batch, rows=batch.rows + 1)

    monkeypatch.setattr("persist_kit.fuzz.targets.decode_batch", counts_one_more)
    with pytest.raises(Finding, match="came back as"):
        TARGETS["batch"].check(inputs("batch")[0])
