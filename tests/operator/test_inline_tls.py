"""Inline shards on stores behind TLS. Their pods mount keys of Secrets as files; the operator reads none. On real servers."""

import contextlib
import itertools
import json
import logging

import pytest
from inline_house import houses
from persist_engine.storage.addresses import RedisAddress, S3Address
from persist_kit.servers import redis_server, s3_server
from persist_operator.api import names
from persist_operator.api.schema_check import load_schemas
from persist_operator.cluster.port import EVENT, JOB, PERSIST_SHARD, POD
from persist_operator.manifests import pods
from persist_operator.plan.observed import DriverSource

USER, PASSWORD = "team", "hunter2 of the team"
ALLOWED = ("team-s3", "team-redis", "team-tls", "team-ca")

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def servers():
    with redis_server(tls=True, wants_certificate=True) as redis, s3_server(tls=True) as s3:
        redis.command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all")
        redis.command("ACL", "SETUSER", "default", "off")
        yield redis, s3


@pytest.fixture
def stores(servers, now, tmp_path):
    """(house, spec.storage, the texts that must be seen nowhere)."""
    redis, s3 = servers
    prefix = f"t{next(_NUMBERS)}"
    with houses(now, tmp_path) as build:
        made = build(allowed_endpoints=(s3.address,), allowed_consensus=(redis.address,), allowed_secrets=ALLOWED)
        keys = f"[default]\naws_access_key_id = {s3.access_key}\naws_secret_access_key = {s3.secret_key}\n"
        made.kubelet.mount("team", "team-s3", {"aws-credentials": keys, "unrelated": "hunter3"})
        made.kubelet.mount("team", "team-redis", {"redis-username": USER, "redis-password": PASSWORD})
        certificate = {"tls.crt": redis.cert_file.read_text(), "tls.key": redis.key_file.read_text()}
        made.kubelet.mount("team", "team-tls", {"ca.crt": redis.ca_file.read_text(), **certificate})
        made.kubelet.mount("team", "team-ca", {"bundle.pem": s3.ca_file.read_text()})
        storage = {
            "blob": {
                "bucket": s3.bucket,
                "prefix": prefix,
                "region": s3.region,
                "endpoint": f"https://{s3.address}",
                "pathStyle": True,
                "caSecretRef": {"name": "team-ca", "key": "bundle.pem"},
                "auth": {"type": "Secret", "secretName": "team-s3"},
            },
            "consensus": {
                "address": redis.address,
                "keyPrefix": prefix,
                "tls": True,
                "tlsSecretName": "team-tls",
                "authSecretName": "team-redis",
            },
        }
        yield made, storage, (s3.secret_key, PASSWORD, "hunter3", certificate["tls.key"].splitlines()[1])


def everything_shown(made, caplog):
    """All that the operator writes or logs, and the command lines of its pods."""
    kinds = (PERSIST_SHARD, JOB, POD, EVENT)
    objects = json.dumps([made.cluster.find(kind, None, {}) for kind in kinds])
    return objects + json.dumps(made.kubelet.arguments) + caplog.text


@pytest.mark.slow
def test_pods_use_certificates_users_and_authorities_of_mounted_secrets(stores, shard_resource, caplog):
    made, storage, hidden = stores
    caplog.set_level(logging.INFO)
    resource = shard_resource({"storage": storage})
    assert load_schemas().check(resource) == []
    made.cluster.create(PERSIST_SHARD, resource)
    made.settle()
    assert made.condition() == ("True", "Healthy"), made.status()
    word = {f"{names.REQUEST_PREFIX}verify": "1"}
    made.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(annotations=word))
    made.look()
    assert made.kubelet.run("verify") == 1
    made.settle(rounds=2)
    assert made.status()["maintenance"]["verify"]["lastResult"] == "Succeeded", made.status()
    shown = everything_shown(made, caplog)
    assert len(made.kubelet.arguments) >= 2
    for one in hidden:
        assert one not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secret", "key", "text", "words"),
    [
        ("team-redis", "redis-password", "hunter4", "invalid username-password pair"),
        ("team-redis", "redis-username", "stranger", "invalid username-password pair"),
        ("team-tls", "ca.crt", None, "certificate verify failed"),
        ("team-ca", "bundle.pem", "other", "certificate verify failed"),
    ],
)
def test_the_status_shows_the_words_of_the_store_and_no_secret(
    stores, servers, shard_resource, caplog, secret, key, text, words
):
    made, storage, hidden = stores
    redis, _ = servers
    file = made.kubelet.secrets["team", secret] / key
    right = file.read_text()
    # The CA of the other server is a CA, and not the one that is wanted.
    file.unlink() if text is None else file.write_text(redis.ca_file.read_text() if text == "other" else text)
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.settle(rounds=1)
    assert made.condition() == ("False", "StorageUnreachable")
    assert words in made.words()
    shown = everything_shown(made, caplog)
    for one in (*hidden, "hunter4"):
        assert one not in shown
    file.write_text(right)
    made.env.advance_ms(61_000)
    made.settle()
    assert made.condition() == ("True", "Healthy"), made.words()


@pytest.mark.slow
def test_a_server_that_does_not_encrypt_is_not_written(stores, shard_resource):
    made, storage, _ = stores
    storage["blob"]["encryption"] = {"type": "SSE-S3"}
    made.cluster.create(PERSIST_SHARD, shard_resource({"storage": storage}))
    made.settle(rounds=1)
    assert made.condition()[0] == "False"
    assert "does not say that it encrypts" in made.words()
    del storage["blob"]["encryption"]
    made.cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(storage=storage))
    made.settle()
    assert made.condition() == ("True", "Healthy"), made.words()


def located(make_shard, house, **changes):
    storage = {"blob": {"bucket": "bbb"} | changes.get("blob", {}), "consensus": {"address": "redis.example:6379"}}
    storage["consensus"] |= changes.get("consensus", {})
    return make_shard({"storage": storage}).location(house.settings)


@pytest.fixture
def any_house(now, tmp_path):
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(houses(now, tmp_path))(allowed_consensus=("redis.example",), allowed_secrets=ALLOWED)


def test_pods_mount_the_keys_that_are_named_and_no_others(make_shard, any_house):
    location = located(
        make_shard,
        any_house,
        blob={
            "auth": {"type": "Secret", "secretName": "team-s3"},
            "caSecretRef": {"name": "team-ca", "key": "bundle.pem"},
            "encryption": {"type": "SSE-KMS", "kmsKeyId": "alias/team"},
        },
        consensus={"tls": True, "tlsSecretName": "team-tls", "authSecretName": "team-redis"},
    )
    (volume,) = pods.credential_volumes(location)
    assert volume["projected"]["defaultMode"] == 0o440
    found = {
        item["path"]: (one["secret"]["name"], item["key"], one["secret"].get("optional", False))
        for one in volume["projected"]["sources"]
        for item in one["secret"]["items"]
    }
    assert found == {
        "aws-credentials": ("team-s3", "aws-credentials", False),
        "s3-ca.crt": ("team-ca", "bundle.pem", False),
        "redis-password": ("team-redis", "redis-password", False),
        "redis-username": ("team-redis", "redis-username", True),
        "redis-ca.crt": ("team-tls", "ca.crt", True),
        "redis-tls.crt": ("team-tls", "tls.crt", True),
        "redis-tls.key": ("team-tls", "tls.key", True),
    }
    blob, consensus = location.urls("/run/store")
    at, log = S3Address.parse(blob), RedisAddress.parse(consensus)
    assert (at.encryption, at.kms_key_id, at.credentials_dir) == ("SSE-KMS", "alias/team", "/run/store")
    assert (log.tls, log.credentials_dir, log.password) == (True, "/run/store", None)


def test_without_secrets_pods_mount_nothing_and_use_their_identity(make_shard, any_house):
    location = located(make_shard, any_house, blob={"auth": {"type": "WorkloadIdentity"}}, consensus={"tls": True})
    assert (pods.credential_volumes(location), pods.credential_mounts(location), pods.credential_env(location)) == (
        [],
        [],
        [],
    )
    blob, consensus = location.urls("/run/store")
    assert S3Address.parse(blob).credentials_dir is None
    assert consensus.startswith("rediss://")


def test_a_driver_shares_the_folder_of_its_input_only_with_the_same_files(make_shard, any_house):
    def of(**consensus):
        return located(make_shard, any_house, consensus=consensus)

    source = DriverSource(shard_id="s", location=of(authSecretName="team-redis"))
    assert pods.shares_secret(source, of(authSecretName="team-redis"))
    assert not pods.shares_secret(source, of(authSecretName="team-s3"))
    assert not pods.shares_secret(source, of())
    assert pods.shares_secret(DriverSource(shard_id="s", location=of()), of(authSecretName="team-redis"))
