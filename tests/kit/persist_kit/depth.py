"""How deep random tests go. `make test` draws what fits a run; `PERSIST_DEPTH=20 make test` draws twenty times as much."""

from __future__ import annotations

import os
import random


def draws(count: int, *, quick: int | None = None) -> int:
    """`count` examples, times PERSIST_DEPTH. Without that variable `quick`, if it is given, or `count`.

    A test with a `quick` number is part of `make generated`, which sets the variable, and which CI runs beside `make test`.
    """
    depth = os.environ.get("PERSIST_DEPTH")  # noqa: TID251 - a knob of the test kit itself, like PATH
    if depth is None:
        return count if quick is None else quick
    return count * int(depth)


def generator(seed: int) -> random.Random:
    """The generator of the draw of this number, the same in each run. PERSIST_FIRST is added to the number: other draws, also the same each time."""
    first = os.environ.get("PERSIST_FIRST", "0")  # noqa: TID251 - as above
    return random.Random(seed + int(first))  # noqa: S311 - repeatable on purpose
