"""The garbage collectors of both sides decide when a frame can no longer be read. Tests run them, which takes a second of the JVM each time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from persist_engine.base.env import SystemEnv

PATIENCE_S = 120.0
#: How long one run of the collectors has to take effect before they run again.
_EFFECT_S = 2.0


def collect(spark: Any) -> None:
    """Runs both collectors: Python's first, because what Python no longer refers to may hold objects of the JVM."""
    gc.collect()
    spark._jvm.java.lang.System.gc()


def are_gone(spark: Any, readers: Callable[[], int]) -> bool:
    """Whether `readers()` becomes 0 within PATIENCE_S, while the collectors run."""
    pause, env = threading.Event(), SystemEnv()
    began = collected = env.monotonic_s()
    if not readers():
        return True
    collect(spark)
    while readers():
        now = env.monotonic_s()
        if now - began > PATIENCE_S:
            return False
        if now - collected > _EFFECT_S:
            collect(spark)
            collected = env.monotonic_s()
        pause.wait(0.02)
    return True
