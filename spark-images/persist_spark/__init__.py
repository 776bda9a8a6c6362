"""Spark over persist shards: the sink job (mint -> write -> append), the executor entry, the data source
`persist` and tables.

The public names load when they are first used, because executors import this package too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persist_spark.catalog.jar import catalog_settings as catalog_settings
    from persist_spark.datasource import register as register
    from persist_spark.table.attach import attach as attach
    from persist_spark.table.handle import PersistTable as PersistTable

_MODULES = {
    "PersistTable": "table.handle",
    "attach": "table.attach",
    "catalog_settings": "catalog.jar",
    "register": "datasource",
}

__all__ = ["PersistTable", "attach", "catalog_settings", "register"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
