"""Hides possible secrets in a text of a support bundle: a log, a message, a statement. Pure.

Unlike a status, a bundle goes to other organisations. So this hides more than the redaction of statuses: words beside a secret-like name,
even without an assignment, and words that look like tokens. Sometimes it also hides a harmless word.

SUBTLE: logs are long and come from other programs. No pattern backtracks over consumed text, except within a fixed length.
"""

from __future__ import annotations

import re

from persist_engine.base.secrets import HIDDEN

from persist_operator.api.redact import redact

_SECRET_NAME = re.compile(
    r"passw(?:or)?d|pass.?phrase|secret|token|credential|(?:access|account|api|encryption|private|ssl|sas).?key|authorization|jaas|cookie"
    r"|signature|(?:^|[._-])(?:pw|pwd|sig|sas|auth)(?:$|[._-])",
    re.IGNORECASE,
)
_NAMES = re.compile(r"(?:name|names|ref|file|dir|path|version)$", re.IGNORECASE)
#: `--password x`, `db.password x`, `(a.secret.key,x)`, `password -> x`.
_BESIDE = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)(?P<between>\s*+[-=]>\s*+|[ \t]++|,)")
_VALUE = re.compile(r"\"[^\"]*+\"?|'[^']*+'?|[^\s,;)}\]\"']++")
#: A JSON object with a key and a value, also within quotes; an XML property and element.
_PATTERNS = (
    r"(?P<head>\\*+\"(?:key|name)\\*+\"\s*+:\s*+\\*+\"(?P<name>[^\"\\]*+)\\*+\"\s*+,\s*+\\*+\"value\\*+\"\s*+:\s*+\\*+\")[^\"\\]*+",
    r"(?P<head><name>(?P<name>[^<]*+)</name>\s*+<value>)[^<]*+",
    r"(?P<head><(?P<name>[\w.:-]++)>)[^<]++",
)
_NAMED = tuple(re.compile(one, re.IGNORECASE) for one in _PATTERNS)
#: JSON Web Tokens, tokens of GitHub, GitLab, Slack and Hugging Face, and words after Bearer, Basic, and AUTH of Redis.
_TOKEN = re.compile(
    r"\beyJ[\w-]{8,}+(?:\.[\w-]++)+|\b(?:gh[opsur]_|github_pat_|glpat-|xox[abeoprs]-|hf_)[\w-]{8,}+"
    r"|(?:(?<=\b[Bb]earer )|(?<=\bBasic )|(?<=\bAUTH ))[^\s\"',;]++"
)
#: Before the `@` of jdbc:oracle:thin:user/password@host, which has no `//`.
_ORACLE = re.compile(r"(?<=jdbc:oracle:)(\w{1,16}:)[^\s\"']{1,256}@")
#: A value that continues in the next lines: after `\` in Java properties, after `|` and `>` in YAML.
_GOES_ON = re.compile(r"(?:\\|[|>][+-]?)\s*$")
_KEY_BEGINS, _KEY_ENDS = "PRIVATE KEY-----", "-----END "
#: The number of lines of the longest private key.
_KEY_LINES_MAX = 200


def is_name(name: str) -> bool:
    """Whether a field of this name holds the name of an object or a file, which the reader of the bundle needs."""
    return _NAMES.search(name) is not None


def is_secret(name: str) -> bool:
    """Whether the value of a field with this name is always hidden."""
    return not is_name(name) and _SECRET_NAME.search(name) is not None


def masked(text: str) -> str:
    """`text` without possible secrets, with the same number of lines."""
    kept: list[str] = []
    indent, key_lines = -1, 0
    for line in text.split("\n"):
        own = len(line) - len(line.lstrip())
        if key_lines:
            kept.append(HIDDEN)
            key_lines = 0 if _KEY_ENDS in line else key_lines - 1
        elif 0 <= indent < own:
            kept.append(HIDDEN)
        else:
            shown = _line(line)
            indent = own if shown != line and _GOES_ON.search(line) else -1
            key_lines = _KEY_LINES_MAX if _KEY_BEGINS in line and _KEY_ENDS not in line else 0
            kept.append(shown)
    return "\n".join(kept)


def _line(line: str) -> str:
    line = _ORACLE.sub(rf"\1{HIDDEN}@", redact(line))
    for pattern in _NAMED:
        line = pattern.sub(lambda found: found["head"] + HIDDEN if is_secret(found["name"]) else found[0], line)
    return _TOKEN.sub(HIDDEN, _without_neighbours(line))


def _without_neighbours(line: str) -> str:
    """Hide the word after a secret-like name, if the name is an option or a property, or if an arrow follows it."""
    kept, done = [], 0
    for found in _BESIDE.finditer(line):
        name, between = found["name"].lstrip("-"), found["between"]
        is_option = found["name"].startswith("-") or "." in name
        value = _VALUE.match(line, found.end())
        if value is None or not is_secret(name) or not (is_option or ">" in between) or value.start() < done:
            continue
        kept += [line[done : value.start()], HIDDEN]
        done = value.end()
    return "".join([*kept, line[done:]])
