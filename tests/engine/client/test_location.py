"""Logs and tracebacks show a location without the credentials of its stores."""

from __future__ import annotations

import pytest
from persist_engine import Location


@pytest.mark.parametrize(
    "url",
    [
        "redis://:SECRET@host:6379/0?prefix=p",
        "rediss://user:SECRET@host/0",
        "redis://user:a/SECRET?b#c@host/0",
        "redis://user:a@SECRET@host/0",
        "redis:/user:SECRET@host/0",
        "redis:SECRET@host",
        "redis://host:1/0?password=SECRET",
        "redis://host:1/0#SECRET",
        "s3://bucket/p?endpoint=http%3A%2F%2Fuser%3ASECRET%40host",
        "s3://bucket/p?endpoint=http://user:SECRET@host",
        "s3://key:SECRET@bucket/p",
    ],
)
def test_regression_a_location_shows_no_password(url):
    location = Location(blob=url, consensus=url)
    assert "SECRET" not in f"{location!r} {location} {[location]}"
    assert location.blob == location.consensus == url


def test_a_location_shows_where_it_is():
    """Spec B.1."""
    shown = "Location(blob='s3://bucket/prefix', consensus='redis://***@host:6379/0')"
    location = Location(blob="s3://bucket/prefix?region=eu", consensus="redis://:secret@host:6379/0?prefix=p")
    assert repr(location) == str(location) == shown
    assert (
        repr(Location(blob="file:///d/blobs", consensus="mem:")) == "Location(blob='file:///d/blobs', consensus='mem:')"
    )
