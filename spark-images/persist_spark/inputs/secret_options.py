"""Options of an input from a mounted Secret: a folder with one file for each option. Must not know: Spark, the other options' meaning.

Every refusal is InvalidUsage and names the Secret, the key and the remedy. No message shows a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from persist_engine.base.errors import InvalidUsage


def secret_options(field: str, name: str, folder: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """The options in the Secret `name`, which is mounted at `folder`. `field` is the path of the name in the resource. One line end at the
    end of a value is dropped, because editors and `echo` write it. Refuses a Secret without keys, and a key that is also among the options
    `given`. The comparison ignores case, as Spark does.
    """
    if folder is None or not folder.is_dir():
        where = f" at {folder}" if folder else ""
        raise InvalidUsage(
            f"{field}: Secret {name} is not mounted{where}; outside a cluster, make a folder {name} with a file for each option, and name "
            "its parent with --credentials"
        )
    taken = {one.lower() for one in given}
    found: dict[str, str] = {}
    # Kubernetes keeps the files in hidden folders, and links them.
    for file in sorted(one for one in folder.iterdir() if not one.name.startswith(".") and one.is_file()):
        if file.name.lower() in taken:
            raise InvalidUsage(
                f"{field}: Secret {name} has the key {file.name}, which is also an option of the input; remove the one or the other"
            )
        taken.add(file.name.lower())
        found[file.name] = _value(file, field, name)
    if not found:
        raise InvalidUsage(f"{field}: Secret {name} has no keys; add a key for each option, such as password")
    return found


def _value(file: Path, field: str, secret: str) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # Raised without its cause, because the cause holds the value.
        raise InvalidUsage(f"{field}: key {file.name} of Secret {secret} is not text in UTF-8") from None
    except OSError as error:
        raise InvalidUsage(f"{field}: key {file.name} of Secret {secret} cannot be read: {error.strerror}") from error
    return text.removesuffix("\n").removesuffix("\r")
