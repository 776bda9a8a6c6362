"""How deep random tests go. `make test` draws what fits a run; `make test DEPTH=20` draws twenty times as much."""

from __future__ import annotations

import os


def draws(count: int) -> int:
    """`count` examples, times PERSIST_DEPTH (1 unless set)."""
    return count * int(os.environ.get("PERSIST_DEPTH", "1"))  # noqa: TID251 - a knob of the test kit itself, like PATH
