"""A support bundle has no secret, and still what its reader needs."""

import re
import time
import zipfile

import pytest
import yaml
from persist_operator.cluster.port import CONFIG_MAP, EVENT, POD, ApiError
from persist_operator.kubectl.bundle import cleaned
from persist_operator.kubectl.masking import masked

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
        {"spec": {"spark": {"conf": {"spark.hadoop.fs.azure.account.key.a.dfs.core.windows.net": PLANTED}}}},
        {"spec": {"spark": {"conf": {"spark.hadoop.fs.s3a.encryption.key": PLANTED}}}},
        {"spec": {"spark": {"conf": {"spark.redis.auth": PLANTED}}}},
        {"spec": {"spark": {"conf": {"spark.driver.extraJavaOptions": f"-Ddb.pw={PLANTED}"}}}},
        {"spec": {"spark": {"conf": {"spark.sql.catalog.lake.x": PLANTED}}}},
        {"spec": {"input": {"format": {"options": {"http.header.Cookie": PLANTED}}}}},
        {"spec": {"input": {"format": {"options": {"webhook.url": f"https://hooks/{PLANTED}"}}}}},
        {"spec": {"input": {"format": {"options": {"url": f"jdbc:oracle:thin:u/{PLANTED}@//h:1521/s"}}}}},
        {"spec": {"input": {"format": {"options": {"path": f"https://a.blob/c?se=1&sig={PLANTED}"}}}}},
        {"spec": {"input": {"python": {"arguments": {"login": PLANTED}}}}},
        {"spec": {"input": {"format": {"sql": f"SELECT decrypt(x, '{PLANTED}') FROM input"}}}},
        {"metadata": {"annotations": {"team/config": PLANTED}}},
        {"spec": {"template": {"metadata": {"annotations": {"vault/template": PLANTED}}}}},
        {"spec": {"containers": [{"command": ["redis-cli", "-a", PLANTED, "ping"]}]}},
        {"spec": {"containers": [{"command": ["mysql", f"-p{PLANTED}"]}]}},
        {"spec": {"containers": [{"lifecycle": {"exec": {"command": ["sh", "-c", f"login {PLANTED}"]}}}]}},
        {"spec": {"volumes": [{"csi": {"volumeAttributes": {"share": PLANTED}}}]}},
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


@pytest.mark.parametrize(
    "line",
    [
        f'{{"password":"{PLANTED}"}}',
        f'{{"key":"db.password","value":"{PLANTED}"}}',
        f'{{"m":"{{\\"name\\":\\"token\\",\\"value\\":\\"{PLANTED}\\"}}"}}',
        f"db.password = {PLANTED}",
        f"db.password {PLANTED}",
        f"db.password=\\\n    {PLANTED}\n    {PLANTED}",
        f"password: |\n  {PLANTED}\n  {PLANTED}",
        f'KafkaClient {{ x.PlainLoginModule required username="u" password="{PLANTED}"; }};',
        f"<property><name>fs.s3a.secret.key</name><value>{PLANTED}</value></property>",
        f"<password>{PLANTED}</password>",
        f"(spark.hadoop.fs.s3a.secret.key,{PLANTED})",
        f"Map(a -> b, password -> {PLANTED})",
        f"java -x 1 --verbose --password {PLANTED}",
        f"jdbc:oracle:thin:scott/{PLANTED}@//db:1521/s",
        f"> bearer {PLANTED}",
        f"AUTH {PLANTED}",
        f"pushed with ghp_{PLANTED}hunter2 to it",
        f"saw eyJhbGciOiJI.eyJ{PLANTED}.s{PLANTED}",
        f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n{PLANTED}\n-----END PRIVATE KEY-----\ndone",
    ],
    ids=lambda line: line[:40],
)
def test_a_planted_secret_is_not_in_a_masked_log(line):
    shown = masked(f"before\n{line}\nafter")
    assert PLANTED not in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter")
    assert shown.count("\n") == 2 + line.count("\n")


@pytest.mark.parametrize(
    "line",
    [
        "the token expired after 3 seconds, and the password was not asked for",
        "Secret orders-db: mounted, secretName=orders-db, --token-file /run/token",
        "  at org.apache.spark.Auth.run(Auth.scala:3)\n    at x",
        "3 > 2 |",
    ],
)
def test_a_line_without_a_secret_stays(line):
    assert masked(line) == line


@pytest.mark.parametrize(
    "piece", ["--token ", "a.token,", "token->", "<token>", "<name>token", "jdbc:oracle:a:", "eyJ", '\\"key\\":']
)
def test_a_long_line_is_masked_in_a_time_like_its_length(piece):
    started_s = time.process_time()
    masked(piece * (200_000 // len(piece)))
    assert time.process_time() - started_s < 30, "linear it takes half a second, squared minutes"


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
    cluster.log_texts["team/load-1"] = (
        f"reading\npassword={PLANTED}\n{'x' * 3980} redis://u:{PLANTED}{'y' * 50}@h\ndone\n"
    )
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
    assert texts["logs/team/load-1.driver.log"] == f"reading\npassword=***\n{'x' * 3980} redis://***@h\ndone\n"
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
