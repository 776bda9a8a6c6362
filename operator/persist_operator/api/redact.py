"""Takes secrets out of texts before they reach a status, an event or a log, and cuts them to their room."""

from __future__ import annotations

from persist_engine.base.secrets import without_secrets


def redact(text: str) -> str:
    """`text` without secrets, as the engine and its Spark jobs hide them, too."""
    return without_secrets(text)


def clip(text: str, characters: int) -> str:
    """`text` cut in the middle to at most `characters`: the beginning says what, the end says why."""
    if len(text) <= characters:
        return text
    head = (characters - 5) // 3
    return f"{text[:head]} ... {text[len(text) - (characters - 5 - head) :]}"
