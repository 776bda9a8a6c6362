"""Takes secrets out of texts that people are shown: messages, reports, statuses, logs. One design for all distributions.

SUBTLE: texts are long and not ours (logs, stack traces, keys of 10 MB), so everything here is linear in them: each search
goes on where the last one ended, and no pattern gives back what it took.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

HIDDEN = "***"
_SCHEME = re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,31}://", re.IGNORECASE)
_URL_END = re.compile(r"[\s\"]")
_NAMED = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)\\*+[\"']?\s*+[=:]\s*+")
_SECRET_NAME = re.compile(r"passw(?:or)?d|secret|token|credential|access.?key|api.?key|authorization", re.IGNORECASE)
#: Quoted up to the same quote (within a text that is itself quoted: up to the next), else as far as a value goes.
_VALUE = re.compile(
    r"(?:\\++[\"'][^\"'\n]*+[\"']?|\"(?:[^\"\\\n]|\\.)*+\"?|'(?:[^'\\\n]|\\.)*+'?"
    r"|(?:(?:Bearer|Basic)\s++)?+[^\s&\"',;)}\]]++)",
    re.IGNORECASE,
)
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")
_QUOTES = ("'", '"')


def without_secrets(text: str, *, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets, without user and password in URLs, without what is assigned to a secret's name,
    without AWS access keys. Names of files and of Kubernetes objects survive.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if secret:
            text = text.replace(secret, HIDDEN)
    return _AWS_KEY.sub(HIDDEN, _without_assigned(_without_userinfo(text)))


def shown_url(url: str) -> str:
    """What anybody may see of `url`, whatever its shape: neither credentials nor parameters."""
    # Not parsed: what is no URL, as with a raw / or ? in its password, must not show it either.
    scheme, colon, rest = url.partition(":")
    credentials, at, location = rest.rpartition("@")
    slashes = "//" if credentials.startswith("//") else ""
    shown = f"{scheme}{colon}{slashes}{HIDDEN}@{location}" if at else url
    return shown.partition("?")[0].partition("#")[0]


def _without_userinfo(text: str) -> str:
    """What stands before the last `@` of a URL is hidden: a password may hold others, and slashes."""
    begins = [match.end() for match in _SCHEME.finditer(text)]
    if not begins:
        return text
    kept = [text[: begins[0]]]
    for begin, next_begin in pairwise([*begins, len(text)]):
        end = _URL_END.search(text, begin, next_begin)
        at = text.rfind("@", begin, next_begin if end is None else end.start())
        kept.append(text[begin:next_begin] if at < 0 else f"{HIDDEN}{text[at:next_begin]}")
    return "".join(kept)


def _without_assigned(text: str) -> str:
    kept: list[str] = []
    done = 0
    for match in _NAMED.finditer(text):
        if match.start() < done or not _is_secret(match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value is None:
            continue
        opening, closing = (end if end in _QUOTES else "" for end in (value[0][0], value[0][1:][-1:]))
        kept += [text[done : match.end()], opening, HIDDEN, closing]
        done = value.end()
    return "".join([*kept, text[done:]])


def _is_secret(name: str) -> bool:
    # SUBTLE: `password_file=/run/...` names a file, `secretName: ...` an object: what the reader of a message needs to see.
    return not name.lower().endswith(("file", "name", "_dir")) and _SECRET_NAME.search(name) is not None
