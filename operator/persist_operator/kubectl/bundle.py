"""The form of a resource in a support bundle. User-chosen fields show only values that are known to be harmless, and all other fields are
shown without secrets. Pure.

Options, configuration, annotations and command lines have user-chosen fields: a value is shown only when its name shows that it is
harmless. A field with a secret-like name loses its whole value. All other texts are masked (`masking.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from persist_engine.base.secrets import HIDDEN, shown_url

from persist_operator.api import names
from persist_operator.kubectl.masking import is_name, is_secret, masked

#: Copies of data that are elsewhere in the resource.
_COPIES = {"managedFields", "kubectl.kubernetes.io/last-applied-configuration"}
#: Mappings from user-chosen names to values that may be anything.
_CHOSEN = {"options", "arguments", "conf", "hadoopConf", "volumeAttributes", "data", "stringData", "binaryData"}
_COMMANDS = {"args", "command"}
#: Options that only describe what was read, and how. They must match the whole name, because `http.header.Cookie` is not harmless.
_HARMLESS = re.compile(
    r"header|inferSchema|multiLine|mergeSchema|format|delimiter|sep|encoding|compression|dbtable|topic|subscribe|subscribePattern"
    r"|startingOffsets|endingOffsets|maxOffsetsPerTrigger|maxFilesPerTrigger|fetchsize|numPartitions|partitionColumn"
    r"|spark\.sql\.(?!catalog\.|hive\.)[\w.]+|spark\.(?:dynamicAllocation|memory|shuffle|speculation|task|locality|scheduler)\.[\w.]+"
    r"|spark\.(?:driver|executor)\.(?:cores|instances|memory|memoryOverhead|memoryOverheadFactor)|spark\.default\.parallelism",
    re.IGNORECASE,
)
_ADDRESSES = {"path", "url", "kafka.bootstrap.servers"}
#: A literal in an SQL statement.
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*+'?|\"(?:[^\"\\]|\\.)*+\"?", re.DOTALL)


def cleaned(value: Any, *, field: str = "", hide: bool = False) -> Any:
    """A copy of a resource without secrets. Below a field with a secret-like name, and with `hide`, only names of objects and
    files stay.
    """
    hide = not is_name(field) and (hide or is_secret(field))
    if isinstance(value, Mapping):
        if field in _CHOSEN:
            return {masked(str(key)): _chosen(str(key), one) for key, one in value.items()}
        if field == "annotations":
            return {masked(str(key)): _annotation(str(key), one) for key, one in value.items() if key not in _COPIES}
        return {
            masked(str(key)): _environment(value, one) if key == "value" else cleaned(one, field=str(key), hide=hide)
            for key, one in value.items()
            if key not in _COPIES
        }
    if isinstance(value, list | tuple):
        return _arguments(value) if field in _COMMANDS else [cleaned(one, field=field, hide=hide) for one in value]
    if hide and value is not None and not isinstance(value, bool):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return masked(_LITERAL.sub(f"'{HIDDEN}'", value) if field == "sql" else value)


def _chosen(name: str, value: Any) -> Any:
    if name.lower() in _ADDRESSES and isinstance(value, str):
        return masked(shown_url(value))
    return HIDDEN if is_secret(name) or not _HARMLESS.fullmatch(name) else cleaned(value)


def _annotation(name: str, value: Any) -> Any:
    return cleaned(value, field=name) if name.startswith(f"{names.GROUP}/") else HIDDEN


def _environment(entry: Mapping[str, Any], value: Any) -> Any:
    """Hides the `value` of an entry with a `name`, such as an environment variable, because a user may put anything there."""
    return HIDDEN if "name" in entry and value else cleaned(value, field="value")


def _arguments(values: Sequence[Any]) -> list[Any]:
    """A command line without scripts, without the values of options with secret-like names, and without the values of one-letter options,
    whose names do not describe the value.
    """
    before = ["", *map(str, values)]
    return [_argument(option, str(value)) for option, value in zip(before, values, strict=False)]


def _argument(option: str, value: str) -> str:
    if any(letter.isspace() for letter in value) or re.fullmatch(r"-\w", option):
        return HIDDEN
    if re.match(r"-\w.", value):
        return f"{value[:2]}{HIDDEN}"
    return str(cleaned(value, field=option.lstrip("-") if option.startswith("--") and "=" not in option else ""))
