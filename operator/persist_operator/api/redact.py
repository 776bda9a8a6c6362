"""Removes secrets from a text before it reaches a status, an Event or a log, and shortens the text to a limit."""

from __future__ import annotations

from persist_engine.base.secrets import without_secrets


def redact(text: str) -> str:
    """`text` without secrets, by the same rules as in the engine and in Spark jobs."""
    return without_secrets(text)


def clip(text: str, characters: int) -> str:
    """`text`, cut in the middle to at most `characters`. The beginning of an error says what happened, its end says why."""
    if len(text) <= characters:
        return text
    head = (characters - 5) // 3
    return f"{text[:head]} ... {text[len(text) - (characters - 5 - head) :]}"
