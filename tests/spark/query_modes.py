"""Settings of the session under which queries return the same rows. Queries take turns in them: filter pushdown to Python sources and
adaptive execution on and off.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

#: For a few hundred rows, compilation takes longer than execution.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
PUSH, KEEP = ({"spark.sql.python.filterPushdown.enabled": offered} for offered in ("true", "false"))
AQE, STATIC = ({"spark.sql.adaptive.enabled": adaptive} | INTERPRETED for adaptive in ("true", "false"))
COMPILED = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}
MODES = {
    "push-compiled": PUSH | COMPILED,
    "push-aqe": PUSH | AQE,
    "push-static": PUSH | STATIC,
    "keep-aqe": KEEP | AQE,
    "keep-static": KEEP | STATIC,
}


def named(query: str, mode: str, *more: str) -> Any:
    """A test case named by its mode and query."""
    return pytest.param(query, mode, *more, id=f"{mode}: {query}")


def in_turn(queries: tuple[str, ...], *more: str) -> list[Any]:
    """Each query with one of the modes. In three of four modes filters are pushed."""
    modes = itertools.cycle(("push-aqe", "push-static", "push-aqe", "keep-static"))
    return [named(query, mode, *more) for query, mode in zip(queries, modes, strict=False)]
