"""Options of an input from a Secret: how they are read, and that no output shows them."""

import json
import subprocess
import sys
import traceback

import pytest
from persist_spark.progress.hidden_output import forms, hide
from persist_spark.spec import ConfigurationError, SinkSpec

DOCUMENT = {
    "sink_id": "ns/orders",
    "run_id": "u1-1",
    "shard_id": "s00000000-0000-0000-0000-000000000001",
    "schema": {"key": "id BIGINT"},
    "location": {"blob": "file:///b", "consensus": "sqlite:///c"},
    "input": {
        "type": "Format",
        "format": {"name": "jdbc", "options": {"url": "jdbc:x", "dbtable": "t"}, "optionsSecretName": "orders-db"},
    },
    "envelope": {"type": "Append"},
}


@pytest.fixture
def folder(tmp_path):
    """As Kubernetes mounts a Secret: links to files in a hidden folder."""

    def make(**keys):
        hidden = tmp_path / "mounted" / "..data"
        hidden.mkdir(parents=True)
        for name, value in keys.items():
            (hidden / name).write_bytes(value if isinstance(value, bytes) else value.encode())
            (tmp_path / "mounted" / name).symlink_to(hidden / name)
        return tmp_path / "mounted"

    return make


def test_the_keys_become_options_beside_the_others(folder):
    spec = SinkSpec.parse(DOCUMENT, folder(user="sa", password="hunter2\n"))
    assert spec.input.options == {"url": "jdbc:x", "dbtable": "t", "user": "sa", "password": "hunter2"}
    assert "hunter2" not in repr(spec)


@pytest.mark.parametrize(
    ("keys", "hidden", "shown"),
    [
        ({"note": "hunter2"}, {"hunter2"}, set()),
        ({"user": "sa", "ssl": "true", "password": "pw"}, {"pw"}, {"sa", "true"}),
        ({"kafka.sasl.jaas.config": 'X required password="hunter2";'}, {'X required password="hunter2";', "hunter2"}, set()),
        ({"pem": "-----BEGIN\nMIIabcdef\n--\n"}, {"-----BEGIN\nMIIabcdef\n--", "MIIabcdef"}, {"--"}),
    ],
)  # fmt: skip
def test_every_value_and_its_parts_are_secrets(folder, keys, hidden, shown):
    secrets = set(SinkSpec.parse(DOCUMENT, folder(**keys)).secrets())
    assert secrets >= hidden
    assert not secrets & shown


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "Secret orders-db has no keys; add a key for each option"),
        (
            {"DbTable": "u"},
            "Secret orders-db has the key DbTable, which is also an option of the input; remove the one",
        ),
        ({"password": b"hunter2\xff"}, "key password of Secret orders-db is not text in UTF-8"),
    ],
)
def test_a_refusal_names_the_secret_and_shows_no_value(folder, keys, message):
    with pytest.raises(ConfigurationError, match=f"^input.format.optionsSecretName: .*{message}") as refused:
        SinkSpec.parse(DOCUMENT, folder(**keys))
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_a_secret_that_is_not_mounted_says_what_to_do(tmp_path):
    for options in (None, tmp_path / "none"):
        with pytest.raises(ConfigurationError, match="Secret orders-db is not mounted.*--credentials"):
            SinkSpec.parse(DOCUMENT, options)


def test_a_secret_option_cannot_pass_over_lost_rows_either(folder):
    document = {**DOCUMENT, "stream": {}}
    with pytest.raises(ConfigurationError, match="failOnDataLoss: must not be false"):
        SinkSpec.parse(document, folder(failOnDataLoss="false"))


def test_secrets_are_found_as_json_writes_them_and_the_longest_first():
    secrets = forms(["pass", 'pass"word', "größe"])
    text = json.dumps({"a": 'pass"word', "b": "größe"}) + 'pass"word größe pass'
    assert hide(text.encode(), secrets) == b'{"a": "***", "b": "***"}*** *** ***'


_CHILD = "import os, sys; print('child hunter2', flush=True); os.write(int(sys.argv[1]), b'.'); input(); print('late line-one')"
#: Each writes when the other waits, so that the order of the output is known.
_WRITER = f"""
import os, subprocess, sys
from persist_spark.progress.hidden_output import hidden_output
ready, done = os.pipe()
with hidden_output(["hunter2", "line-one"]):
    print("python hunter2", flush=True)
    os.write(2, b"in two hun")
    os.write(2, b"ter2 pieces\\n")
    child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}, str(done)], stdin=subprocess.PIPE, text=True, pass_fds=[done])
    os.read(ready, 1)
    os.write(1, b"x" * (2 << 20) + b"hunter2 without an end ")
print("after, unfiltered: hunter2", flush=True)
child.communicate("\\n")
"""


def test_whatever_the_process_and_its_children_write_is_filtered():
    ended = subprocess.run([sys.executable, "-c", _WRITER], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == "in two *** pieces\n"
    within, _, after = ended.stdout.partition("after, unfiltered: hunter2\n")
    assert within.startswith("python ***\nchild ***\nxxx")
    assert within.endswith("xxx*** without an end ")
    assert after == "late ***\n"
