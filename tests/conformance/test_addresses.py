"""Typed addresses: what is printed is read back as the very same fields, whatever stands in them; the rest is refused."""

from __future__ import annotations

import configparser
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage, PersistError, StoreRefused
from persist_engine.base.metrics import NoMetrics
from persist_engine.client.location import Location
from persist_engine.storage.addresses import RedisAddress, S3Address, with_credentials
from persist_engine.storage.open import open_blob, open_consensus
from persist_kit.servers import RedisServer, S3Server

#: Any text, and what separates the fields of a URL more often than chance would have it.
TEXT = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from([*"/?#&=@:%+;\\ []{}.", "..", "unsafe=true", "password_file=/etc/passwd", "a"])).map(
        "".join
    ),
)
WORD = st.one_of(TEXT, st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True))
ENDPOINT = st.one_of(TEXT, WORD.map("http://{}".format), WORD.map("https://{}:9000".format), st.just("http://[::1]:80"))
PORT = st.integers(-1, 70_000)
OPTIONAL = st.one_of(st.none(), TEXT)
S3 = st.fixed_dictionaries(
    {"bucket": WORD},
    optional={
        "prefix": WORD,
        "region": st.one_of(st.none(), WORD),
        "endpoint": st.one_of(st.none(), ENDPOINT),
        "path_style": st.booleans(),
        "ca_file": OPTIONAL,
        "probe": st.booleans(),
        "credentials_dir": OPTIONAL,
        "encryption": st.sampled_from([None, "SSE-S3", "SSE-KMS", "None", "aws:kms"]),
        "kms_key_id": OPTIONAL,
    },
)
REDIS = st.fixed_dictionaries(
    {"host": st.one_of(WORD, st.just("[fd00::1]"))},
    optional={
        "port": PORT,
        "database": st.integers(-1, 99),
        "prefix": WORD,
        "tls": st.booleans(),
        "user": OPTIONAL,
        "password": OPTIONAL,
        "password_file": OPTIONAL,
        "credentials_dir": OPTIONAL,
        "ca_file": OPTIONAL,
        "cert_file": OPTIONAL,
        "key_file": OPTIONAL,
        "unsafe": st.booleans(),
        "push": st.booleans(),
    },
)


@pytest.mark.slow
@given(fields=S3)
def test_an_s3_address_is_read_back_as_it_was(fields: dict[str, Any]) -> None:
    try:
        address = S3Address(**fields)
    except InvalidUsage:
        return
    assert S3Address.parse(address.url) == address


@pytest.mark.slow
@given(fields=REDIS)
def test_a_redis_address_is_read_back_as_it_was(fields: dict[str, Any]) -> None:
    try:
        address = RedisAddress(**fields)
    except InvalidUsage:
        return
    assert RedisAddress.parse(address.url) == address
    assert not address.password or len(address.password) < 4 or address.password not in repr(address)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": ""}, {"bucket": "b?endpoint=http://evil"}, {"bucket": "b/c"}, {"bucket": "a..b"}, {"bucket": "b@c"},
        {"prefix": "/p"}, {"prefix": "p/"}, {"prefix": "p\n"}, {"prefix": "p\0"}, {"prefix": "\ud800"},
        {"region": ""}, {"region": "eu.evil.example/"}, {"endpoint": "http://u:p@h"}, {"endpoint": "http://h?x=1"},
        {"endpoint": "ftp://h"}, {"endpoint": "http://"}, {"endpoint": "http://h#f"}, {"endpoint": "http://h:0"},
        {"endpoint": "http://h:99999"}, {"endpoint": "http://h\\@evil"}, {"endpoint": "http://h\r\nX: y"},
        {"credentials_dir": ""}, {"ca_file": "\n"}, {"endpoint": "http://h", "ca_file": "/c"}, {"encryption": "None"}, {"encryption": ""}, {"kms_key_id": "k"},
        {"encryption": "SSE-S3", "kms_key_id": "k"}, {"encryption": "SSE-KMS", "kms_key_id": "k&unsafe"},
    ],
)  # fmt: skip
def test_fields_that_cannot_be_meant_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage):
        S3Address(**{"bucket": "b", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "evil:6379?password_file=/etc/passwd&prefix="}, {"host": "h/1"}, {"host": "u@h"}, {"host": ""},
        {"host": "[::1]:1"}, {"host": "::1"}, {"host": "h "}, {"port": 0}, {"port": 65536}, {"database": -1},
        {"prefix": "{p}"}, {"prefix": "p\r\nFLUSHALL"}, {"user": ""}, {"user": "\n"}, {"password": ""},
        {"password": "x", "password_file": "/f"}, {"credentials_dir": "/d", "password_file": "/f"}, {"ca_file": "/c"},
        {"cert_file": "/c", "key_file": "/k"}, {"tls": True, "cert_file": "/c"}, {"tls": True, "key_file": "/k"},
    ],
)  # fmt: skip
def test_redis_fields_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        RedisAddress(**{"host": "h", **wrong})


@pytest.mark.parametrize(
    ("url", "passed"),
    [
        ("s3://b/p?region=eu", "s3://b/p?region=eu&credentials_dir=/run/c"),
        ("redis://u@h/3?prefix=a:b", "redis://u@h:6379/3?prefix=a:b&credentials_dir=/run/c"),
        ("file:///d", "file:///d"),
        ("sqlite:///d", "sqlite:///d"),
    ],
)
def test_credentials_are_passed_by_reference(url: str, passed: str) -> None:
    assert with_credentials(url, "/run/c") == passed
    assert with_credentials(url, None) == url


@pytest.mark.parametrize(
    "url", ["s3://b?credentials_dir=/x", "redis://h?password_file=/x", "redis://:pw@h", "redis://h?credentials_dir=/x"]
)
def test_a_url_that_says_where_its_credentials_are_gets_no_others(url: str) -> None:
    with pytest.raises(InvalidUsage, match="name a Secret"):
        with_credentials(url, "/run/c")


def test_files_of_tls_and_encryption_are_restored() -> None:
    redis = RedisAddress(host="h", tls=True, ca_file="/a b", cert_file="/c", key_file="/k", credentials_dir="/d")
    s3 = S3Address(bucket="b", encryption="SSE-KMS", kms_key_id="arn:aws:kms:eu:1:key/2", ca_file="/c")
    assert (RedisAddress.parse(redis.url), S3Address.parse(s3.url)) == (redis, s3)


@pytest.mark.parametrize(
    "url", ["redis://u:hunter2@h:1/0", "redis:/u:hunter2@h", "redis://:a@hunter2@h", "redis://u:h/hunter2@h"]
)
def test_no_repr_of_a_location_shows_a_password(url: str) -> None:
    location = Location(blob="file:///d", consensus=url)
    assert "hunter2" not in repr(location) + str(location) + f"{location}"
    assert "file:///d" in repr(location)
    assert dataclasses.replace(location, blob="mem:").consensus == url


def _write_keys(server: S3Server, file: Path, **changes: str) -> None:
    parser = configparser.ConfigParser()
    keys = {"aws_access_key_id": server.environment["AWS_ACCESS_KEY_ID"]}
    keys["aws_secret_access_key"] = server.environment["AWS_SECRET_ACCESS_KEY"]
    parser["default"] = {**keys, **changes}
    with file.open("w") as stream:
        parser.write(stream)


@pytest.mark.slow
def test_two_locations_of_one_process_have_credentials_of_their_own(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's would be good: a location with a file of its own must not fall back to them, nor to the other's."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    _write_keys(s3, mine / "aws-credentials")
    _write_keys(s3, other / "aws-credentials", aws_secret_access_key="wrong")
    bare = s3.location("profiles")
    env, metrics = SystemEnv(), NoMetrics()
    with pytest.raises(PersistError, match="SignatureDoesNotMatch|InvalidAccessKeyId|403"):
        open_blob(with_credentials(bare, str(other)), env=env, metrics=metrics)
    (other / "aws-credentials").write_text("")
    with pytest.raises(StoreRefused, match="redentials"):
        open_blob(with_credentials(bare, str(other)), env=env, metrics=metrics)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    blob = open_blob(with_credentials(bare, str(mine)), env=env, metrics=metrics)
    blob.set("a", b"x")
    assert blob.get("a") == b"x"
    blob.close()


@pytest.mark.redis
def test_the_redis_password_of_a_folder_is_used_where_it_is_there(redis: RedisServer, tmp_path: Path) -> None:
    env, metrics = SystemEnv(), NoMetrics()
    url = with_credentials(redis.url, str(tmp_path))
    open_consensus(url, env=env, metrics=metrics).close()
    (tmp_path / "redis-password").write_text("never-set\n")
    with pytest.raises(PersistError, match="(?i)auth|password"):
        open_consensus(url, env=env, metrics=metrics)
