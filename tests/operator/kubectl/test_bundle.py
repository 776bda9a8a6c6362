"""A support bundle has no secret, and still what its reader needs."""

import re
import zipfile

import pytest
import yaml
from persist_operator.cluster.port import CONFIG_MAP, EVENT, POD, ApiError
from persist_operator.kubectl.bundle import cleaned

PLANTED = "hunter2"


@pytest.mark.parametrize(
    "resource",
    [
        {"spec": {"input": {"format": {"options": {"password": PLANTED}}}}},
        {"spec": {"input": {"format": {"options": {"anything": PLANTED}}}}},
        {"spec": {"input": {"format": {"options": {"url": f"jdbc:pg://user:{PLANTED}@db/x"}}}}},
        {"spec": {"spark": {"conf": {"spark.hadoop.fs.s3a.secret.key": PLANTED}}}},
        {"spec": {"spark": {"conf": {"spark.executorEnv.DB": PLANTED}}}},
        {"spec": {"spark": {"hadoopConf": {"javax.jdo.option.Any": PLANTED}}}},
        {"spec": {"containers": [{"env": [{"name": "DB", "value": PLANTED}]}]}},
        {"spec": {"containers": [{"args": ["--password", PLANTED]}]}},
        {"spec": {"containers": [{"args": [f"--password={PLANTED}"]}]}},
        {"spec": {"containers": [{"command": ["sh", "-c", f"TOKEN={PLANTED} x"]}]}},
        {"metadata": {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": f"{{{PLANTED}}}"}}},
        {"metadata": {"annotations": {"team/api-key": PLANTED}}},
        {"metadata": {"managedFields": [{"x": PLANTED}]}},
        {"status": {"message": f"redis://:{PLANTED}@redis:6379/0 does not answer"}},
        {"status": {"message": f"Authorization: Bearer {PLANTED}"}},
        {"authToken": {"nested": PLANTED}},
        {"password": 1234, "x": PLANTED[:0]},
        {f"password={PLANTED}": "x"},
    ],
    ids=lambda resource: str(resource)[:60],
)
def test_a_planted_secret_is_not_in_a_cleaned_resource(resource):
    found = str(cleaned(resource))
    assert PLANTED not in found
    assert "1234" not in found


def test_what_a_reader_needs_stays():
    resource = {
        "kind": "SparkSink",
        "spec": {
            "input": {"format": {"optionsSecretName": "orders-db", "options": {"path": "/data", "header": "true"}}},
            "spark": {"conf": {"spark.sql.shuffle.partitions": "8"}},
            "volumes": [{"secret": {"secretName": "persist-store"}}],
            "containers": [{"image": "persist:1", "args": ["maintain", "gc", "--shard", "s1", "--give-up", "60"]}],
        },
        "status": {"attempt": 3, "ready": True, "keys": [{"key": "id BIGINT"}]},
    }
    assert cleaned(resource) == resource


@pytest.mark.slow
def test_a_report_holds_resources_events_and_logs_and_no_planted_secret(plugin, team, pod, server, tmp_path):
    cluster = team({"shardId": "s1", "store": {"blob": "s3://b", "consensus": f"redis://:{PLANTED}@r:1/0"}})
    spec = {"containers": [{"name": "driver", "env": [{"name": "A", "value": PLANTED}], "args": ["--token", PLANTED]}]}
    pod("load-1", sink="load", role="driver", spec=spec)
    operator = {
        "metadata": {"namespace": "ops", "name": "op-1", "labels": {"app.kubernetes.io/name": "persist-operator"}},
        "spec": {"containers": [{"name": "operator"}]},
        "status": {"containerStatuses": [{"name": "operator", "restartCount": 1}]},
    }
    cluster.create(POD, operator)
    cluster.log_texts["team/load-1"] = f"reading\npassword={PLANTED}\ndone\n"
    cluster.log_texts["ops/op-1"] = f"leading, secret: '{PLANTED}'\n"
    files = {
        "metadata": {
            "namespace": "team",
            "name": "load-1",
            "labels": {"app.kubernetes.io/managed-by": "persist-operator"},
        }
    }
    cluster.create(CONFIG_MAP, {**files, "data": {"sink.json": PLANTED}})
    for uid, name in (("uid-sink", "e1"), ("uid-of-another", "e2")):
        event = {
            "metadata": {"namespace": "team", "name": name},
            "involvedObject": {"uid": uid},
            "reason": "DriverFailed",
        }
        cluster.create(EVENT, {**event, "message": f"password={PLANTED}", "lastTimestamp": "2026-09-20T00:00:00Z"})
    target = tmp_path / "r.zip"
    code, out, err = plugin("report", "-n", "team", "--operator-namespace", "ops", "--file", target)
    assert (code, err) == (0, "")
    assert str(target) in out
    with zipfile.ZipFile(target) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert not [name for name, text in texts.items() if PLANTED in text]
    assert texts["logs/team/load-1.driver.log"] == "reading\npassword=***\ndone\n"
    assert "leading" in texts["operator/op-1.operator.log"]
    assert "operator/op-1.operator.previous.log" in texts
    assert texts["resources/configmaps.txt"] == "team/load-1: sink.json\n"
    (event,) = yaml.safe_load_all(texts["events.yaml"])
    assert event["reason"] == "DriverFailed"
    assert "PersistShard/flights" in texts["status.txt"]
    assert yaml.safe_load(texts["about.yaml"])["missing"] == []
    assert re.search(r"name: flights", texts["resources/persistshards.yaml"])
    again = plugin("report", "-n", "team", "--file", target)
    assert again[0] == 64
    assert "exists" in again[2]


@pytest.mark.slow
def test_a_report_without_all_rights_says_what_is_missing(plugin, team, server, tmp_path):
    cluster = team()
    cluster.deny["find", "Event"] = ApiError('events is forbidden: User "u" cannot list resource "events"', status=403)
    target = tmp_path / "r.zip"
    assert plugin("report", "-n", "team", "--file", target)[0] == 0
    with zipfile.ZipFile(target) as archive:
        missing = yaml.safe_load(archive.read("about.yaml"))["missing"]
    assert any("the right to list events in namespace team is missing" in line for line in missing)
    assert any("no pod of the operator in namespace persist-system" in line for line in missing)
