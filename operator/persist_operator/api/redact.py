"""Removes secrets and control characters from a text before it reaches a status, an Event or a log, and shortens the text to a limit."""

from __future__ import annotations

import re

from persist_engine.base.secrets import without_secrets

#: All but line ends and tabs. A terminal that shows a status would obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def redact(text: str) -> str:
    """`text` without secrets, by the same rules as in the engine and in Spark jobs, and with a blank for each control character."""
    return _CONTROL.sub(" ", without_secrets(text))


def clip(text: str, characters: int) -> str:
    """`text`, cut in the middle to at most `characters`. The beginning of an error says what happened, its end says why."""
    if len(text) <= characters:
        return text
    head = (characters - 5) // 3
    return f"{text[:head]} ... {text[len(text) - (characters - 5 - head) :]}"
