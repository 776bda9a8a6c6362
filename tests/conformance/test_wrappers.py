"""What wrappers add: counts, and faults on purpose. And which URL opens what."""

from __future__ import annotations

import traceback

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_engine.base.metrics import NoMetrics, PrometheusMetrics
from persist_engine.base.versioned import CasResult, SeqNo
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.storage.metered import MeteredBlob, MeteredConsensus
from persist_engine.storage.open import open_blob, open_consensus
from persist_engine.testing.conformance import entry
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from prometheus_client import CollectorRegistry


@pytest.mark.parametrize(
    ("happened", "answered", "error", "head"),
    [
        (True, False, Indeterminate, entry(1)),
        (False, False, Indeterminate, None),
        (False, True, Determinate, None),
    ],
)
def test_a_fault_decides_what_happens_and_what_is_answered(happened, answered, error, head):
    inner, faults = MemConsensus(), Faults()
    consensus = FaultyConsensus(inner, faults)
    faults.fail_next("compare_and_set", happened=happened, answered=answered)
    with pytest.raises(error, match="compare_and_set s1 at mem:"):
        consensus.compare_and_set("s1", None, entry(1))
    assert inner.head("s1") == head
    assert consensus.head("s1") == head
    assert consensus.compare_and_set("s2", None, entry(1)) is CasResult.COMMITTED
    assert faults.injected == 1


def test_scripted_faults_wait_for_their_verb_and_key():
    faults = Faults()
    blob = FaultyBlob(MemBlob(), faults)
    faults.fail_next("set", happened=False, matching="/v", times=2)
    blob.set("s1/n1/p1", b"x")
    for _ in range(2):
        with pytest.raises(Indeterminate):
            blob.set("s1/v1/r1", b"x")
    blob.set("s1/v1/r1", b"x")
    faults.fail_next("list_prefix", happened=False)
    with pytest.raises(Indeterminate):
        blob.list_prefix("")
    assert len(list(blob.list_prefix(""))) == 2


def test_the_same_seed_fails_the_same_calls():
    def trace(seed):
        faults = Faults(seed, happens=0.5, answers=0.5)
        consensus, seen = FaultyConsensus(MemConsensus(), faults), []
        for _ in range(50):
            try:
                seen.append(consensus.head("s1"))
            except PersistError as error:
                seen.append(type(error).__name__)
        return seen

    assert trace(7) == trace(7)
    assert set(trace(7)) == {None, "Determinate", "Indeterminate"}
    assert trace(7) != trace(8)


def test_faults_are_switched_while_in_use():
    faults = Faults()
    blob = FaultyBlob(MemBlob(), faults)
    faults.break_down()
    faults.fail_next("get", happened=False)
    with pytest.raises(Indeterminate):
        blob.set("a", b"x")
    faults.heal()
    assert blob.get("a") is None
    blob.set("a", b"x")
    assert blob.get("a") == b"x"


def test_metered_calls_are_counted_by_verb_and_outcome():
    """Spec 4.5."""
    registry = CollectorRegistry()
    metrics, faults = PrometheusMetrics(registry), Faults()
    blob = MeteredBlob(FaultyBlob(MemBlob(), faults), env=SystemEnv(), metrics=metrics)
    consensus = MeteredConsensus(MemConsensus(), env=SystemEnv(), metrics=metrics)
    blob.set("a", b"four")
    blob.set("b", b"four")
    blob.get("a")
    faults.fail_next("get", happened=True)
    with pytest.raises(Indeterminate):
        blob.get("a")
    next(listing := blob.list_prefix(""))
    listing.close()
    consensus.compare_and_set("s1", None, entry(1, b"12345"))
    consensus.compare_and_set("s1", None, entry(1, b"12345"))
    consensus.scan("s1", SeqNo(0), 9)

    def sample(name, **labels):
        return registry.get_sample_value(f"persist_{name}", labels)

    assert sample("blob_calls_total", verb="set", outcome="ok") == 2
    assert sample("blob_bytes_total", verb="set") == 8
    assert sample("blob_calls_total", verb="get", outcome="ok") == 1
    assert sample("blob_calls_total", verb="get", outcome="Indeterminate") == 1
    assert sample("blob_bytes_total", verb="get") == 4
    assert sample("blob_calls_total", verb="list_prefix", outcome="stopped") == 1
    assert sample("blob_seconds_count", verb="get") == 2
    assert sample("consensus_calls_total", verb="compare_and_set", outcome="ok") == 1
    assert sample("consensus_calls_total", verb="compare_and_set", outcome="mismatch") == 1
    assert sample("consensus_bytes_total", verb="compare_and_set") == 5
    assert sample("consensus_bytes_total", verb="scan") == 5


def open_both(url):
    for opener in (open_blob, open_consensus):
        with pytest.raises(InvalidUsage) as caught:
            opener(url, env=SystemEnv(), metrics=NoMetrics())
        yield caught.value


@pytest.mark.parametrize(
    "url",
    [
        "",
        "blobs",
        "/var/blobs",
        "ftp://host/x",
        "file:relative",
        "file://host/dir",
        "sqlite://file.db",
        "file:///x?y=1",
        "file:///x#y",
        "mem:x?y=1",
        "redis://",
        "redis://host/notanumber",
        "redis://host:port/0",
        "redis://[::1/0",
        "redis://host:0/0",
        "file:///a%00b",
        "sqlite:///a%00b",
    ],
)
def test_a_url_that_is_no_store_is_misuse(url):
    assert len(list(open_both(url))) == 2


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:SECRET@host/x",
        "redis://:SECRET@host/0?nosuch=1",
        "redis://:pa/SECRET@host/0",
        "redis://:SECRET/pa@host/0",
        "redis://:12/SECRET@host/0",
        "redis://:SEC#SECRET@host/0",
        "redis://:SECRET#pa@host/0",
        "redis://:SECRET?pa@host/0",
        "redis://:SECRET@host:99999/0",
        "ftp://a:SECRET@host/",
        "s3://a:SECRET@bucket/x",
        "redis://:SECRET@host/0?password_file=/p",
    ],
)
def test_no_message_shows_a_password(url):
    for error in open_both(url):
        shown = "".join(traceback.format_exception(error))
        assert "InvalidUsage" in shown
        assert "SECRET" not in shown


def test_memory_stores_are_shared_by_name_only(fresh_name):
    def blob(url):
        return open_blob(url, env=SystemEnv(), metrics=NoMetrics())

    def consensus(url):
        return open_consensus(url, env=SystemEnv(), metrics=NoMetrics())

    blob(f"mem:{fresh_name}").set("a", b"x")
    consensus(f"mem:{fresh_name}").compare_and_set("s1", None, entry(1))
    assert blob(f"mem:{fresh_name}").get("a") == b"x"
    assert consensus(f"mem:{fresh_name}").head("s1") == entry(1)
    assert blob(f"mem:{fresh_name}-2").get("a") is None
    assert blob("mem:").get("a") is None
    blob("mem:").set("a", b"y")
    assert blob("mem:").get("a") is None
    assert consensus("mem:").head("s1") is None


def test_a_fourth_slash_is_the_same_path(tmp_path):
    """As people write `sqlite:////file`: SQLite takes what follows two slashes for a host, and never opened."""
    with_three = open_consensus(f"sqlite://{tmp_path}/c.db", env=SystemEnv(), metrics=NoMetrics())
    with_three.compare_and_set("s1", None, entry(0))
    with_four = open_consensus(f"sqlite:///{tmp_path}/c.db", env=SystemEnv(), metrics=NoMetrics())
    assert with_four.head("s1") == entry(0)
    open_blob(f"file:///{tmp_path}/blobs", env=SystemEnv(), metrics=NoMetrics()).set("k", b"x")
    assert (tmp_path / "blobs" / "k").read_bytes() == b"x"


def test_paths_are_percent_decoded(tmp_path):
    open_blob(f"file://{tmp_path}/a%20b", env=SystemEnv(), metrics=NoMetrics()).set("k", b"x")
    open_consensus(f"sqlite://{tmp_path}/a%20b/c.db", env=SystemEnv(), metrics=NoMetrics()).close()
    assert (tmp_path / "a b" / "k").read_bytes() == b"x"
    assert (tmp_path / "a b" / "c.db").exists()
