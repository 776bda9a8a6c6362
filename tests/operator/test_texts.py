"""Settings, probes, redaction, logs and quantities."""

import http.client
import json
import socket
import threading

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_operator.api import quantity
from persist_operator.api.redact import clip, redact
from persist_operator.handlers.logs import JsonFormatter
from persist_operator.handlers.probes import ProbeServer
from persist_operator.settings import OperatorSettings
from prometheus_client import CollectorRegistry, Gauge


def test_settings_are_read_and_unknown_or_mistyped_fields_are_refused():
    text = """
    defaultProfile: hot
    storageProfiles: {hot: {blob: "s3://b", consensus: "redis://r:6379/0", secretName: s, takeOver: Unowned}}
    operatorId: eu-1/main
    namespaces: [a, b]
    images: {engine: "e:1", pullSecrets: [x]}
    loop: {inspectSeconds: 3}
    leader: {enabled: false}
    """
    settings = OperatorSettings.parse(text)
    assert settings.storage_profiles["hot"].secret_name == "s"
    assert (settings.namespaces, settings.images.pull_secrets) == (("a", "b"), ("x",))
    assert settings.loop.inspect_seconds == 3
    assert (settings.operator_id, settings.storage_profiles["hot"].take_over) == ("eu-1/main", "Unowned")
    assert OperatorSettings.parse("") == OperatorSettings()
    wrong = ["storageProfile: {}", "images: {engin: e}", "loop: 3", "a: [", "storageProfiles: {a: {blob: x}}", "- 1"]
    wrong += ["storageProfiles: {a: {blob: 's3://b', consensus: 'redis://r'}}", "leader: {leaseSeconds: 2}"]
    wrong += ["operatorId: ''", "operatorId: 7", f"operatorId: {'x' * 129}", "operatorId: 'a b'"]
    wrong += ["storageProfiles: {default: {blob: 's3://b', consensus: 'redis://r', takeOver: All}}"]
    for one in wrong:
        with pytest.raises(InvalidUsage):
            OperatorSettings.parse(one)


@pytest.mark.slow
def test_probes_answer_with_the_reason_while_unhealthy_or_not_ready():
    healthy, registry = threading.Event(), CollectorRegistry()
    Gauge("persist_one", "one", registry=registry).set(1)
    Gauge("persist_other", "another", registry=registry).set(2)
    server = ProbeServer(
        0,
        registry=registry,
        sick_of=lambda: None if healthy.is_set() else "a cold",
        waits_for=lambda: None if healthy.is_set() else "the doctor",
        refresh=lambda: None,
        host="127.0.0.1",
    )
    server.start()

    def answer(path):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        found = response.status, response.read()
        connection.close()
        return found

    try:
        assert [answer(path)[0] for path in ("/healthz", "/readyz", "/metrics", "/other")] == [503, 503, 200, 404]
        assert [line for line in answer("/metrics")[1].splitlines() if line[0] != ord("#")] == [
            b"persist_one 1.0",
            b"persist_other 2.0",
        ]
        assert answer("/metrics?name[]=persist_other")[1].splitlines()[2:] == [b"persist_other 2.0"]
        assert answer("/metrics?name[]=missing") == (200, b"")
        assert (answer("/healthz")[1], answer("/readyz")[1]) == (b"a cold\n", b"waiting for the doctor\n")
        healthy.set()
        assert [answer(path) for path in ("/healthz", "/readyz")] == 2 * [(200, b"ok\n")]
    finally:
        server.stop()


@pytest.mark.slow
def test_a_client_of_the_probes_that_sends_nothing_loses_its_connection_and_its_thread():
    """Each connection has a thread, which waited for ever: any pod of the cluster could take all the memory of the operator."""
    server = ProbeServer(
        0,
        registry=CollectorRegistry(),
        sick_of=lambda: None,
        waits_for=lambda: None,
        refresh=lambda: None,
        host="127.0.0.1",
        patience_s=0.1,
    )
    server.start()
    try:
        for half in (b"", b"GET /healthz HT"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow:
                slow.sendall(half)
                assert slow.recv(4096) == b""
    finally:
        server.stop()


@pytest.mark.parametrize(
    "text",
    [
        "redis://user:hunter2@host:6379/0", "password=hunter2", '"aws_secret_access_key": "hunter2"',
        "fs.s3a.secret.key=hunter2", "X-Token: hunter2", "redis://:at@hunter2@host:6379", 'password="a;b c,d)hunter2e"',
        "{'apiKey': 'a&hunter2', 'n': 1}",
    ],
)  # fmt: skip
def test_redaction_removes_secrets(text):
    assert "hunter2" not in redact(f"before {text} after")
    assert redact(f"before {text} after").startswith("before")


def test_redaction_leaves_nothing_that_a_terminal_obeys():
    assert redact("a\x1b[2Jb\x9b1mc\r\x00\n\td é") == "a [2Jb 1mc  \n\td é"


def test_redaction_leaves_nothing_that_utf_8_has_not():
    """A report may hold it: the API server would store another text, and each plan would write the status again."""
    assert redact(json.loads('"a\\ud800b\\udfff \\ud83d\\ude80"')) == "a b  🚀"


def test_redaction_keeps_names_of_files():
    for url in ("redis://r:6379/0?password_file=/run/x", "s3://b?credentials_dir=/run/x"):
        assert redact(url) == url


@pytest.mark.slow
def test_redaction_takes_time_linear_in_the_length_of_a_log():
    for text in ("k" * 200_000, "token-" * 40_000, "a://" * 50_000):
        assert redact(text) == text  # quadratic work would take minutes


def test_clipping_keeps_beginning_and_end():
    text = clip("a" * 500 + "z" * 500, 100)
    assert len(text) == 100
    assert (text[0], text[-1]) == ("a", "z")


def test_logs_are_one_json_object_per_line():
    import logging

    record = logging.makeLogRecord({"msg": "a\nb", "levelname": "INFO", "name": "n", "key": "PersistShard/a/b"})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["key"] == "PersistShard/a/b"


@pytest.mark.parametrize(("text", "mib"), [("1Gi", 1024), ("1G", 954), ("512Mi", 512), ("1.5Gi", 1536), (1, 1)])
def test_quantities_are_read_as_mebibytes(text, mib):
    assert quantity.to_mebibytes(text) == mib


def test_text_that_is_no_quantity_is_refused():
    with pytest.raises(InvalidUsage):
        quantity.to_bytes("lots")
