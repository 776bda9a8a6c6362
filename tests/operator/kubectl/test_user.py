"""The calls of a person: the access that kubectl would have, a watch that breaks, repetition."""

import contextlib
import socket
import threading

import pytest
import yaml
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_operator.cluster import user as user_module
from persist_operator.cluster.port import PERSIST_SHARD, ApiError
from persist_operator.cluster.user import UserCluster, load_access

pytestmark = pytest.mark.slow


@pytest.fixture
def user(kubeconfig):
    return UserCluster(load_access(None, None).client, SystemEnv())


def test_the_context_and_its_namespace(kubeconfig):
    document = yaml.safe_load(kubeconfig.read_text())
    document["contexts"].append({"name": "d", "context": {"cluster": "c", "user": "u", "namespace": "team"}})
    kubeconfig.write_text(yaml.safe_dump(document))
    assert load_access(None, None).namespace == "default"
    assert load_access(str(kubeconfig), "d").namespace == "team"
    with pytest.raises(InvalidUsage, match="no context 'e' in the kubeconfig; there are: c, d"):
        load_access(None, "e")
    kubeconfig.write_text("not: [a kubeconfig")
    with pytest.raises(InvalidUsage, match="no access to a cluster"):
        load_access(None, None)


def with_user(kubeconfig, **user):
    document = yaml.safe_load(kubeconfig.read_text())
    kubeconfig.write_text(yaml.safe_dump(document | {"users": [{"name": "u", "user": user}]}))


def plugin_of(program):
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", program]}
    return {"exec": plugin | {"interactiveMode": "Never"}}


@pytest.mark.parametrize(
    ("user", "text"),
    [
        (plugin_of("echo no session >&2; exit 3"), "cannot be used: .* failed: exec: process returned 3. no session"),
        (plugin_of("echo hello"), "cannot be used: .* failed: exec: failed to decode"),
        ({"token": "half\nhalf"}, "cannot be used: its token has a line end or another control character within"),
        ({"tokenFile": "/nowhere/token"}, "cannot be used: .*No such file or directory: '/nowhere/token'"),
    ],
)
def test_regression_credentials_that_cannot_be_used_are_refused_and_not_shown(kubeconfig, user, text):
    """A plugin that failed left requests without credentials. A token with a line end was in a traceback."""
    with_user(kubeconfig, **user)
    with pytest.raises(InvalidUsage, match=text) as refused:
        load_access(None, None)
    assert "half" not in str(refused.value)


def test_regression_the_line_end_of_a_file_is_no_part_of_the_token(kubeconfig, server, tmp_path):
    (tmp_path / "token").write_text("the-token\n")
    with_user(kubeconfig, tokenFile=str(tmp_path / "token"))
    user = UserCluster(load_access(None, None).client, SystemEnv())
    for _ in range(2):
        assert user.find(PERSIST_SHARD, "team") == []
    assert {headers["authorization"] for _, _, _, headers in server.requests} == {"Bearer the-token"}


def test_a_relative_path_is_relative_to_the_kubeconfig(kubeconfig, tmp_path):
    document = yaml.safe_load(kubeconfig.read_text())
    document["clusters"][0]["cluster"]["certificate-authority"] = "ca.crt"
    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    kubeconfig.write_text(yaml.safe_dump(document))
    (tmp_path / "ca.crt").write_text("")
    assert load_access(str(kubeconfig), None).client.configuration.ssl_ca_cert == str(kubeconfig.parent / "ca.crt")


def test_regression_a_context_that_is_named_needs_no_current_one(kubeconfig):
    """As for kubectl."""
    document = yaml.safe_load(kubeconfig.read_text())
    del document["current-context"]
    kubeconfig.write_text(yaml.safe_dump(document))
    assert load_access(None, "c").context == "c"
    with pytest.raises(InvalidUsage, match="no access to a cluster: .*current-context"):
        load_access(None, None)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"text", b"[1, 2]", b"contexts: 7", b"null"])
def test_regression_what_is_no_kubeconfig_is_refused(kubeconfig, content):
    kubeconfig.write_bytes(content)
    with pytest.raises(InvalidUsage, match="no access to a cluster"):
        load_access(None, None)


def test_a_watch_shows_each_change_of_one_resource_and_its_end(user, server, shard_resource):
    server.cluster.create(PERSIST_SHARD, shard_resource())
    server.cluster.create(PERSIST_SHARD, shard_resource(name="other", uid="uid-other"))
    env, found = SystemEnv(), []
    for state in user.follow(PERSIST_SHARD, "team", "flights", until_s=env.monotonic_s() + 30):
        found.append(state and state["metadata"].get("labels", {}).get("n"))
        if state is None:
            break
        if found[-1] == "2":
            server.cluster.delete(PERSIST_SHARD, "team", "flights")
            server.stopping.set()  # the watch breaks
            server.stopping.clear()
        else:
            following = str(int(found[-1] or 0) + 1)
            server.cluster.edit(
                PERSIST_SHARD, "team", "flights", lambda one, n=following: one["metadata"].update(labels={"n": n})
            )
    assert found[0] is None
    assert found[-1] is None
    assert [one for one in found if one] == sorted(one for one in found if one)
    assert "2" in found


def test_a_watch_ends_in_time(user, server, shard_resource):
    server.cluster.create(PERSIST_SHARD, shard_resource())
    env = SystemEnv()
    until_s = env.monotonic_s() + 0.3
    assert all(user.follow(PERSIST_SHARD, "team", "flights", until_s=until_s))  # it ends
    assert until_s <= env.monotonic_s()


def test_what_was_refused_for_good_is_not_repeated(user, server, shard_resource):
    server.cluster.create(PERSIST_SHARD, shard_resource())
    server.refuse_next = [ApiError("no such field", status=422), ApiError("again", status=422)]
    with pytest.raises(ApiError, match="no such field"):
        user.patch(PERSIST_SHARD, "team", "flights", {})
    assert len(server.refuse_next) == 1
    assert user.patch(PERSIST_SHARD, "team", "none", {}) is None


def test_a_server_that_does_not_answer_is_named_once(kubeconfig, monkeypatch):
    said = []
    monkeypatch.setattr(user_module, "QUIET_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        document = yaml.safe_load(kubeconfig.read_text())
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        document["clusters"][0]["cluster"] = {"server": address}
        kubeconfig.write_text(yaml.safe_dump(document))
        heard = threading.Event()
        silent_user = UserCluster(
            load_access(None, None).client, SystemEnv(), on_wait=lambda text: (said.append(text), heard.set())
        )

        def ask():
            with contextlib.suppress(ApiError):
                silent_user.find(PERSIST_SHARD, "team")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        assert heard.wait(60)
    asking.join(60)
    assert said == [f"waiting: no answer yet from the API server at {address}"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00 no text", b"hello", b""])
def test_a_certificate_that_is_none_is_refused_before_the_first_request(kubeconfig, tmp_path, content):
    """Of one that is no text, the request said that the plugin has a bug; of others, that the server could not be reached."""
    file = tmp_path / "pem"
    file.write_bytes(content)
    with_user(kubeconfig, **{"client-certificate": str(file), "client-key": str(file)})
    document = yaml.safe_load(kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    kubeconfig.write_text(yaml.safe_dump(document))
    with pytest.raises(InvalidUsage, match="the kubeconfig cannot be used: "):
        load_access(None, None)
