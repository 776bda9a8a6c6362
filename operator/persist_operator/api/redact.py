"""Takes secrets out of texts before they reach a status, an event or a log."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE)
_KEYED = re.compile(
    r"(?P<key>[\w.-]*(?:secret|passw(?:or)?d|token|access[._-]?key|credential)[\w.-]*)(?P<sep>[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&)}]+)",
    re.IGNORECASE,
)
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")
_HIDDEN = "***"


def redact(text: str) -> str:
    """`text` without URL user infos, values of keys that sound secret, and AWS access keys. Names of files survive."""

    def hide(match: re.Match[str]) -> str:
        if match["key"].lower().endswith(("_file", "name")):
            return match[0]
        return f"{match['key']}{match['sep']}{_HIDDEN}"

    return _AWS_KEY.sub(_HIDDEN, _KEYED.sub(hide, _USERINFO.sub(rf"\g<scheme>{_HIDDEN}@", text)))


def clip(text: str, characters: int) -> str:
    """`text` cut in the middle to at most `characters`: the beginning says what, the end says why."""
    if len(text) <= characters:
        return text
    head = (characters - 5) // 3
    return f"{text[:head]} ... {text[len(text) - (characters - 5 - head) :]}"
