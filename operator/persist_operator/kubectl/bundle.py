"""What goes into a support bundle, and what does not: no value that sounds secret, no environment value, no Secret. Pure.

Two rules hide a value. A field whose name sounds secret loses its whole value, whatever it holds. And every text goes through the redaction
that statuses and logs have: credentials in URLs, values assigned to a name that sounds secret, keys of AWS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from persist_engine.base.secrets import HIDDEN

from persist_operator.api.redact import redact

_SECRET_FIELD = re.compile(
    r"passw(?:or)?d|secret|token|credential|access.?key|api.?key|private.?key|authorization|jaas", re.IGNORECASE
)
#: Fields that name an object or a file. The reader of the bundle needs them.
_NAMES = re.compile(r"(?:name|names|ref|file|dir|path|version)$", re.IGNORECASE)
#: Copies of what stands elsewhere.
_COPIES = {"managedFields", "kubectl.kubernetes.io/last-applied-configuration"}
#: Mappings from names that users chose to values that may hold anything: each value is hidden unless it is known to be harmless.
_OPTIONS = {"options", "conf", "hadoopConf"}
_COMMANDS = {"args", "command"}
#: Options with values that say what was read, and no more.
_HARMLESS = re.compile(
    r"path|header|inferschema|multiline|format|delimiter|sep|dbtable|topic|subscribe|url|startingoffsets|spark\.",
    re.IGNORECASE,
)


def cleaned(value: Any, *, field: str = "", hide: bool = False) -> Any:
    """A copy of a resource without secrets. Below a field whose name sounds secret, and with `hide`, only names of objects and files
    stay.
    """
    hide = not _NAMES.search(field) and (hide or _SECRET_FIELD.search(field) is not None)
    if isinstance(value, Mapping):
        if field in _OPTIONS:
            return {key: _option(str(key), one) for key, one in value.items()}
        return {
            redact(str(key)): _environment(value, one) if key == "value" else cleaned(one, field=str(key), hide=hide)
            for key, one in value.items()
            if key not in _COPIES
        }
    if isinstance(value, list | tuple):
        return _arguments(value) if field in _COMMANDS else [cleaned(one, field=field, hide=hide) for one in value]
    if hide and value is not None and not isinstance(value, bool):
        return HIDDEN
    return redact(value) if isinstance(value, str) else value


def _option(name: str, value: Any) -> Any:
    if _SECRET_FIELD.search(name) or "env." in name.lower() or not _HARMLESS.search(name):
        return HIDDEN
    return cleaned(value)


def _environment(entry: Mapping[str, Any], value: Any) -> Any:
    """The `value` of an entry with a `name`, such as an environment variable, is hidden: a user may put anything there."""
    return HIDDEN if "name" in entry and value else cleaned(value, field="value")


def _arguments(values: Sequence[Any]) -> list[Any]:
    """A command line, without what follows an option whose name sounds secret."""
    before = ["", *map(str, values)]
    return [
        cleaned(value, field=option.lstrip("-") if option.startswith("-") and "=" not in option else "")
        for option, value in zip(before, values, strict=False)
    ]


def cleaned_log(text: str) -> str:
    """A log without secrets, line by line."""
    return "\n".join(redact(line) for line in text.split("\n"))
