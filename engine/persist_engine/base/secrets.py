"""Removes secrets from text that people will see: messages, reports, statuses, logs. All distributions use this one module.

SUBTLE: the text is often long and not ours (logs, stack traces, keys of 10 MB). So everything here runs in linear time: each search
continues where the previous one ended, and no pattern backtracks over text that it consumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise

HIDDEN = "***"
#: The begin of a URL up to user and password. Oracle's driver takes them before the slashes.
_SCHEME = re.compile(r"(?<![a-z0-9+.-])(?:[a-z][a-z0-9+.-]{0,31}://|jdbc:oracle:[a-z0-9]{1,8}:)", re.IGNORECASE)
_URL_END = re.compile(r"[\s\"]")
#: A name before its value. Scala shows an entry of a map as `name -> value`.
_NAMED = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)\\*+[\"']?\s*+(?:[=:]|->)\s*+")
#: The names that sound secret. `sig` and the signature are parameters of URLs that give access to their holder.
_SECRET_NAME = re.compile(
    r"passw(?:or)?d|pass.?phrase|secret|token|credential|(?:access|account|api|encryption|private|shared).?key|authorization|cookie"
    r"|signature|(?:^|[._-])(?:pass|pw|pwd|sig|auth)$|\.sas\.",
    re.IGNORECASE,
)
#: A quoted value ends at the matching quote (inside text that is itself quoted: at the next quote); a bare one at a delimiter.
#: Python shows some values with a letter or a class before the quote.
_VALUE = re.compile(
    r"(?:\\++[\"'][^\"'\n]*+[\"']?|(?:[A-Za-z]{0,32}+\(?+)(?:\"(?:[^\"\\\n]|\\.)*+\"?|'(?:[^'\\\n]|\\.)*+'?)"
    r"|(?:(?:Bearer|Basic)\s++)?+[^\s&\"',;)}\]]++)",
    re.IGNORECASE,
)
#: An option of a command line, also as an item of a list, before its value. A value does not begin with a dash.
_OPTION = re.compile(r"(?<![\w.-])(?P<name>--?\w[\w.-]*+)(?:\\*+[\"']\s*+,\s*+|[ \t]++(?:\\\n\s*+)?+)(?![-=:\s])")
#: A word of prose before what may be its value.
_WORD = re.compile(
    r"(?<![\w./-])(?P<name>passw(?:or)?d|pwd|passphrase|(?:api|access|secret)[ _-]?key|secret|token)[ \t]++(?![-=:\s])",
    re.IGNORECASE,
)
#: Words that follow the name of an option in prose.
_PROSE = re.compile(
    r"(?:an?|and|are|as|at|by|can|cannot|do|does|for|from|has|if|in|is|it|may|means|must|names|needs|not|of|on|or|requires|says|should"
    r"|takes|that|the|then|to|too|was|which|will|with|without)[.:]*+",
    re.IGNORECASE,
)
_PLAIN_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
#: The name of a Kubernetes object, or a number: what follows the words secret and token in messages.
_OBJECT_NAME = re.compile(r"(?:[a-z0-9]{1,19}[./-]+)*[a-z0-9]{1,19}")
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")
_PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY-----")
_PRIVATE_KEY_END = re.compile(r"-----END (?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY-----")
_QUOTES = ("'", '"')


def without_secrets(text: str, *, secrets: Iterable[str] = ()) -> str:
    """Return `text` with secrets hidden: the given `secrets`, user and password in URLs, values assigned to a name that
    sounds secret, or given to an option of such a name, words after "password" and the like that are no prose, AWS access keys, and
    private keys in PEM. File names and names of Kubernetes objects stay readable.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if secret:
            text = text.replace(secret, HIDDEN)
    text = _without_assigned(_without_userinfo(_without_private_keys(text)))
    text = _hidden(text, _OPTION, _takes_secret, _is_given)
    return _AWS_KEY.sub(HIDDEN, _hidden(text, _WORD, lambda _name: True, _is_told))


def shown_url(url: str) -> str:
    """Return the part of `url` that is safe to show, whatever its shape: no credentials and no parameters."""
    # The URL is not parsed: a malformed one, for example with an unescaped / or ? in its password, must not show the password either.
    scheme, colon, rest = url.partition(":")
    credentials, at, location = rest.rpartition("@")
    slashes = "//" if credentials.startswith("//") else ""
    shown = f"{scheme}{colon}{slashes}{HIDDEN}@{location}" if at else url
    return shown.partition("?")[0].partition("#")[0]


def _without_private_keys(text: str) -> str:
    """Hide the text between the lines that begin and end a key. Without an end line, hide all text after the first."""
    kept: list[str] = []
    done = 0
    while (begin := _PRIVATE_KEY.search(text, done)) is not None:
        end = _PRIVATE_KEY_END.search(text, begin.end())
        kept += [text[done : begin.end()], HIDDEN]
        done = len(text) if end is None else end.start()
    return "".join([*kept, text[done:]])


def _without_userinfo(text: str) -> str:
    """Hide everything before the last `@` of a URL: a password may itself contain `@` and slashes."""
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
    return _hidden(text, _NAMED, _is_secret, lambda _name, _value: True)


def _hidden(
    text: str, names: re.Pattern[str], is_named: Callable[[str], bool], is_secret: Callable[[str, str], bool]
) -> str:
    """Hide the value after each of `names` that `is_named`, if `is_secret` of name and value holds."""
    kept: list[str] = []
    done = 0
    for match in names.finditer(text):
        if match.start() < done or not is_named(match["name"]):
            continue
        value = _VALUE.match(text, match.end())
        if value is None or not is_secret(match["name"], value[0]):
            continue
        opening, closing = (end if end in _QUOTES else "" for end in (value[0][0], value[0][1:][-1:]))
        kept += [text[done : match.end()], opening, HIDDEN, closing]
        done = value.end()
    return "".join([*kept, text[done:]])


def _takes_secret(option: str) -> bool:
    """Whether the value of an option is a secret."""
    is_other = option.startswith(("--no-", "-no-")) or option.endswith(("stdin", "dir", "credentials"))
    return not is_other and _is_secret(option)


def _is_given(_option: str, value: str) -> bool:
    """Whether what follows an option is its value, and not prose about it."""
    return _PROSE.fullmatch(value) is None


def _is_told(name: str, value: str) -> bool:
    """Whether the word after another word such as `password` is a secret, and not prose about it."""
    word = value.strip("\"'`.:!?(<>")
    if not any(map(str.isalnum, word)) or _PLAIN_WORD.fullmatch(word):
        return False
    return name.lower() not in {"secret", "token"} or _OBJECT_NAME.fullmatch(word) is None


def _is_secret(name: str) -> bool:
    # SUBTLE: `password_file=/run/...` names a file and `secretName: ...` an object. The reader of the message needs both.
    return not name.lower().endswith(("file", "name", "_dir")) and _SECRET_NAME.search(name) is not None
