"""The depth of random tests. `make test` draws as many examples as fit a run; `PERSIST_DEPTH=20 make test` draws twenty times as many."""

from __future__ import annotations

import os
import random


def draws(count: int, *, quick: int | None = None) -> int:
    """The number of examples: `count` times PERSIST_DEPTH. Without that variable, `quick` if it is given, or else `count`.

    A test with a `quick` number is part of `make generated`, which sets the variable. CI runs it beside `make test`.
    """
    depth = os.environ.get("PERSIST_DEPTH")  # noqa: TID251 - a knob of the test kit itself, like PATH
    if depth is None:
        return count if quick is None else quick
    return count * int(depth)


def generator(seed: int) -> random.Random:
    """The random generator for draw number `seed`, the same in each run. PERSIST_FIRST is added to the number and gives other draws, which
    are also the same in each run.
    """
    first = os.environ.get("PERSIST_FIRST", "0")  # noqa: TID251 - as above
    return random.Random(seed + int(first))  # noqa: S311 - repeatable on purpose
