"""What a process called in its stores, in a report of bounded size."""

import json

from persist_engine.base.env import SeededEnv
from persist_engine.base.metrics import BUCKETS_S, PrometheusMetrics
from persist_engine.base.tally import StoreTally
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.storage.metered import MeteredBlob, MeteredConsensus
from prometheus_client import CollectorRegistry


def test_calls_are_counted_by_store_verb_and_outcome_and_passed_on():
    registry = CollectorRegistry()
    tally, env = StoreTally(), SeededEnv(1)
    metrics = tally.over(PrometheusMetrics(registry))
    blob, consensus = (
        MeteredBlob(MemBlob(), env=env, metrics=metrics),
        MeteredConsensus(MemConsensus(), env=env, metrics=metrics),
    )
    blob.set("a", b"12345")
    assert blob.get("a") == b"12345"
    entry = VersionedData(SeqNo(1), b"123")
    consensus.compare_and_set("k", None, entry)
    consensus.compare_and_set("k", None, entry)
    found = tally.to_json()
    assert found["blob"] == {"get": {"ok": 1, "bytes": 5}, "set": {"ok": 1, "bytes": 5}}
    assert found["consensus"] == {"compare_and_set": {"ok": 1, "mismatch": 1, "bytes": 3}}
    assert (sum(found["commits"]), len(found["commits"])) == (2, len(BUCKETS_S) + 1)
    assert registry.get_sample_value("persist_blob_calls_total", {"verb": "get", "outcome": "ok"}) == 1


def test_seconds_of_commits_fall_into_the_buckets_of_the_engine():
    tally = StoreTally()
    for seconds in (0.0001, 0.02, 0.02, 700.0):
        tally.observe_s("consensus", seconds, verb="compare_and_set")
    tally.observe_s("blob", 0.0004, verb="get")
    tally.observe_s("gc_step", 5, step="truncate")
    found = tally.to_json()
    assert found["consensus"]["compare_and_set"]["seconds"] == 700.04
    assert found["blob"] == {"get": {}}, "less than a millisecond"
    counts = dict(zip((*BUCKETS_S, None), found["commits"], strict=True))
    assert {bound for bound, count in counts.items() if count} == {0.0001, 0.025, None}
    assert counts[0.025] == 2


def test_classes_of_errors_are_one_outcome_and_the_text_stays_small():
    tally = StoreTally()
    verbs = {
        "blob": ("get", "get_range", "set", "delete", "list_prefix", "list_kept", "restore"),
        "consensus": ("head", "compare_and_set", "scan", "truncate", "replace", "list_keys"),
    }
    for store, known in verbs.items():
        for verb in known:
            for outcome in ("ok", "mismatch", "stopped", *(f"Error{number}" for number in range(50))):
                tally.count(f"{store}_calls", 12345, verb=verb, outcome=outcome)
            tally.count(f"{store}_bytes", 10**12, verb=verb)
            tally.observe_s(store, 1234.5678, verb=verb)
    tally.count("gc_deleted_blobs", kind="part")
    found = tally.to_json()
    assert found["blob"]["get"]["error"] == 50 * 12345
    assert set(found) == {"blob", "consensus", "commits"}
    assert len(json.dumps(found, separators=(",", ":"))) < 2048


def test_a_process_that_calls_nothing_reports_nothing():
    assert StoreTally().to_json() == {}


def test_a_report_that_would_be_too_long_goes_without():
    tally = StoreTally()
    tally.count("blob_calls", verb="get", outcome="ok")
    short, long = {"message": "done"}, {"message": "ä" * 2030}
    assert tally.added_to(short) == {**short, "stores": {"blob": {"get": {"ok": 1}}}}
    assert tally.added_to(long) == long
