"""Profiles: names for pairs of stores, in a TOML file of the user's own.

    [prod]
    blob = "s3://shop/tables"
    consensus = "redis://:${REDIS_PASSWORD}@redis:6379/0"

`connect("profile:prod")` and `persist --profile prod ls` use the same file. Without `consensus`, the profile means what `connect(blob)`
means. `${NAME}` is a variable of the environment, so that the file need not contain a password. No error shows a value of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from persist_engine.base.errors import InvalidUsage

#: The prefix that marks the name of a profile in place of a URL.
PREFIX = "profile:"
#: The variable with the path of the file, if it is not in the user's folder of settings.
FILE_VARIABLE = "PERSIST_PROFILES"
#: The variable with the profile for processes that name no stores.
PROFILE_VARIABLE = "PERSIST_PROFILE"

_KEYS = ("blob", "consensus")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}", re.ASCII)


def profiles_path(environ: Mapping[str, str]) -> Path:
    """The path of the file: $PERSIST_PROFILES, else persist/profiles.toml in $XDG_CONFIG_HOME (default ~/.config). It need not exist."""
    if given := environ.get(FILE_VARIABLE):
        return Path(given).expanduser()
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    return Path(home) / "persist" / "profiles.toml"


def profile_urls(name: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The blob and the consensus URL of a profile. Raises InvalidUsage, which names the file, the profile and the wrong key in it."""
    path = profiles_path(environ)
    profiles = _read(path)
    profile = profiles.get(name)
    if profile is None:
        known = ", ".join(sorted(profiles)) or "none"
        raise InvalidUsage(f"{path} has no profile {name!r}; it has {known}")
    where = f"profile {name} of {path}"
    if not isinstance(profile, dict):
        raise InvalidUsage(f"{where} is no table of TOML: write [{name}], and below it blob and consensus")
    unknown = sorted(profile.keys() - set(_KEYS))
    if unknown:
        raise InvalidUsage(f"{where} has {', '.join(unknown)}; a profile has blob and consensus")
    blob, consensus = (_text(profile.get(key), f"{key} in {where}", environ) for key in _KEYS)
    if blob is None:
        raise InvalidUsage(f"{where} has no blob, the URL of a blob store")
    return blob, consensus


def _read(path: Path) -> dict[str, object]:
    import tomllib  # few processes have a profile

    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise InvalidUsage(
            f"there is no file of profiles {path}; write it, or set {FILE_VARIABLE} to another path"
        ) from error
    except OSError as error:
        raise InvalidUsage(f"the file of profiles {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        place = re.search(r"at line \d+, column \d+", str(error))  # the rest of the text may show contents of the file
        raise InvalidUsage(f"the file of profiles {path} is no TOML{f' {place[0]}' if place else ''}") from None


def _text(value: object, what: str, environ: Mapping[str, str]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidUsage(f"{what} must be a URL in quotes")
    missing = [name for name in _VARIABLE.findall(value) if name not in environ]
    if missing:
        raise InvalidUsage(f"{what} needs the variable {missing[0]} of the environment, which is not set")
    return _VARIABLE.sub(lambda found: environ[found[1]], value)
