"""Profiles: names for pairs of stores, which Python and the command line read from one file, and whose values no error shows."""

from __future__ import annotations

import json

import pytest
from persist_engine import connect
from persist_engine.base.errors import InvalidUsage
from persist_engine.client.location import location_of
from persist_engine.client.profiles import profiles_path

SECRET = "hunter2"
FILE = f"""
plain = "no table"
[folder]
blob = "file:///tmp/shop"
[pair]
blob = "s3://shop/tables"
consensus = "redis://:${{PASSWORD}}@redis:6379/0"
[logless]
blob = "s3://shop/tables"
[typo]
blob = "mem:"
consensu = "redis://:{SECRET}@redis:6379/0"
[number]
blob = 5
[none]
consensus = "mem:"
[other]
blob = "profile:pair"
"""


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "profiles.toml").write_text(FILE)
    return {"PERSIST_PROFILES": str(tmp_path / "profiles.toml"), "PASSWORD": SECRET}


def test_a_profile_is_a_pair_of_stores(environ):
    pair = location_of("profile:pair", None, environ)
    assert (pair.blob, pair.consensus) == ("s3://shop/tables", f"redis://:{SECRET}@redis:6379/0")
    assert SECRET not in repr(pair)
    folder = location_of("profile:folder", None, environ)
    assert folder == location_of("file:///tmp/shop", None, {})
    assert folder == location_of(None, None, environ | {"PERSIST_PROFILE": "folder"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "has no profile 'nothing'; it has folder, logless, none, "),
        ("plain", r"profile plain of .* is no table of TOML: write \[plain\]"),
        ("typo", "profile typo of .* has consensu; a profile has blob and consensus"),
        ("number", "blob in profile number of .* must be a URL in quotes"),
        ("none", "profile none of .* has no blob"),
        ("other", "no other profile"),
        ("logless", "s3://shop/tables has no log: give the second URL"),
    ],
)
def test_what_is_wrong_is_named_and_no_value_is_shown(environ, name, why):
    with pytest.raises(InvalidUsage, match=why) as error:
        location_of(f"profile:{name}", None, environ)
    assert SECRET not in str(error.value)


def test_variables_and_files_that_are_missing(environ, tmp_path):
    with pytest.raises(InvalidUsage, match="consensus in profile pair of .* needs the variable PASSWORD"):
        location_of("profile:pair", None, {"PERSIST_PROFILES": environ["PERSIST_PROFILES"]})
    with pytest.raises(
        InvalidUsage, match="there is no file of profiles .*none.toml; write it, or set PERSIST_PROFILES"
    ):
        location_of("profile:pair", None, {"PERSIST_PROFILES": str(tmp_path / "none.toml")})
    with pytest.raises(InvalidUsage, match="cannot be read: Is a directory"):
        location_of("profile:pair", None, {"PERSIST_PROFILES": str(tmp_path)})
    (tmp_path / "bad.toml").write_text(f"[pair]\nblob = {SECRET}\n")
    with pytest.raises(InvalidUsage, match="is no TOML at line 2, column") as error:
        location_of("profile:pair", None, {"PERSIST_PROFILES": str(tmp_path / "bad.toml")})
    assert SECRET not in str(error.value)


def test_stores_that_are_said_twice(environ):
    with pytest.raises(InvalidUsage, match="names both stores"):
        location_of("profile:pair", "mem:", environ)
    with pytest.raises(InvalidUsage, match="both PERSIST_BLOB and PERSIST_PROFILE are set"):
        location_of(None, None, environ | {"PERSIST_PROFILE": "pair", "PERSIST_BLOB": "mem:"})


def test_where_the_file_is(tmp_path):
    assert profiles_path({"HOME": "/h"}).as_posix() == "/h/.config/persist/profiles.toml"
    assert profiles_path({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}).as_posix() == "/x/persist/profiles.toml"


def test_python_and_commands_open_the_same_stores(persist, tmp_path, monkeypatch):
    path = tmp_path / "profiles.toml"
    path.write_text(f'[shop]\nblob = "{(tmp_path / "shop").as_uri()}"\n')
    monkeypatch.setenv("PERSIST_PROFILES", str(path))
    for name in ("PERSIST_BLOB", "PERSIST_CONSENSUS", "PERSIST_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with connect("profile:shop", maintain=False) as db:
        db.create("orders", key="id BIGINT").append([{"id": 1}])
    assert persist("--profile", "shop", "ls")[1].split()[2] == "orders"
    monkeypatch.setenv("PERSIST_PROFILE", "shop")
    assert json.loads(persist("read", "orders", "--count", "--json")[1]) == {"rows": 1}
    code, _, err = persist("ls", "--blob", "mem:")
    assert (code, "give one of the two" in err) == (64, True)
