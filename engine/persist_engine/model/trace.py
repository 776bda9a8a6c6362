"""The spine as the state sees it. (Contract only; see the brief.)"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trace:
    """Placeholder shape."""
