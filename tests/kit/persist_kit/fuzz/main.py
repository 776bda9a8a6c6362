"""`make fuzz`: runs one target under atheris, from the corpus in the tree.

python -m persist_kit.fuzz.main TARGET --corpus tests/fuzz/corpus [--runs 10000] [--grown DIR] [options of libFuzzer]

A finding stops the run with a trace, the input in a file `crash-...` and exit code 77. Add that file to the corpus with the fix. `--grown`
keeps inputs that reached new code, so that a later run continues from there.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

#: Modules without instrumentation. New code that is reached here is not a fact about a decoder, and it is most of the code that runs. Each
#: module is named, because the name of a package does not exclude its modules.
_NOT_FUZZED = [f"persist_engine.testing.{name}" for name in ("fuzz_targets", "fuzz_wire", "states", "world")]

with atheris.instrument_imports(include=["persist_engine"], exclude=_NOT_FUZZED):
    from persist_kit.fuzz.targets import TARGETS, Target

#: An input that takes longer than this counts as a hang. The slowest known good input takes 50 ms.
TIMEOUT_S = 20
BYTES_MAX = 1 << 16


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="fuzz", description="fuzzing of every decoder")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder with one folder of inputs per target; not changed"
    )
    parser.add_argument("--grown", type=Path, help="folder for inputs that reach new code; created when missing")
    parser.add_argument("--runs", type=int, default=10_000)
    options, further = parser.parse_known_args(arguments)
    target = TARGETS[options.target]
    folders = []
    if options.grown is not None:
        grown = options.grown / target.name
        grown.mkdir(parents=True, exist_ok=True)
        folders.append(str(grown))
    folders.append(str(options.corpus / target.name))
    command = [
        "fuzz",
        f"-runs={options.runs}",
        f"-timeout={TIMEOUT_S}",
        f"-max_len={BYTES_MAX}",
        "-rss_limit_mb=4096",
        *further,
        *folders,
    ]

    def once(data: bytes) -> None:
        target.check(data)

    mutator = {} if target.mutate is None else {"custom_mutator": _mutator(target)}
    atheris.Setup(command, once, **mutator)
    atheris.Fuzz()
    return 0


def _mutator(target: Target) -> Callable[[bytes, int, int], bytes]:
    def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
        rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
        assert target.mutate is not None
        if rng.random() < 0.1:
            return bytes(atheris.Mutate(data, bytes_max))
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.mutate(data, rng, lambda raw: bytes(atheris.Mutate(raw, len(raw) + 16)))
        return data[:bytes_max]

    return mutate


if __name__ == "__main__":
    sys.exit(main())
