"""Removes secrets and control characters from a text before it reaches a status, an Event or a log, and shortens the text to a limit."""

from __future__ import annotations

import re

from persist_engine.base.secrets import without_secrets

#: Control characters except line ends and tabs, which a terminal that shows a status would obey; and surrogates (halves of characters),
#: which a report in JSON may hold. UTF-8 cannot encode surrogates: the API server would store another text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

#: Marks that reorder the text around them, so that a name would look like another.
_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with a blank for each control character and half of a character, and without marks that change the order of letters."""
    return _REORDERING.sub("", _CONTROL.sub(" ", text))


def redact(text: str) -> str:
    """`text` without secrets, by the same rules as in the engine and in Spark jobs, and `printable`."""
    return printable(without_secrets(text))


def one_line(text: str) -> str:
    """`text` redacted, as one line without blanks at its ends."""
    return " ".join(redact(text).split())


def clip(text: str, characters: int) -> str:
    """`text`, cut in the middle to at most `characters`. The beginning of an error shows what happened, and its end shows why."""
    if len(text) <= characters:
        return text
    head = (characters - 5) // 3
    return f"{text[:head]} ... {text[len(text) - (characters - 5 - head) :]}"
