"""How deep random tests go. `make test` draws what fits a run; `PERSIST_DEPTH=20 make test` draws twenty times as much."""

from __future__ import annotations

import os


def draws(count: int, *, quick: int | None = None) -> int:
    """`count` examples, times PERSIST_DEPTH. Without that variable `quick`, if it is given, or `count`.

    A test with a `quick` number is part of `make generated`, which sets the variable, and which CI runs beside `make test`.
    """
    depth = os.environ.get("PERSIST_DEPTH")  # noqa: TID251 - a knob of the test kit itself, like PATH
    if depth is None:
        return count if quick is None else quick
    return count * int(depth)
