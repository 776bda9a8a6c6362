"""Stores behind TLS with CAs of their own: a user of Redis, certificates of the clients, and nothing of the Secrets to be seen anywhere."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from shard_runs import IDLE, ask, succeeded
from sink_manifests import AIRLINES, airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

SYSTEM, NAMESPACE, STORES = "persist-system", "persist-e2e", "persist-stores"


def secret(name: str, content: dict[str, bytes]) -> dict[str, Any]:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


@dataclass(frozen=True)
class Credentials:
    """What the pods of the stores and those of their clients mount, and the texts among it that must be seen nowhere."""

    server: dict[str, bytes]
    client: dict[str, bytes]
    hidden: tuple[str, ...]


def made() -> Credentials:
    redis_ca, s3_ca = trustme.CA(), trustme.CA()
    redis = redis_ca.issue_cert(f"redis-tls.{STORES}.svc")
    s3 = s3_ca.issue_cert(f"s3-tls.{STORES}.svc")
    shown = redis_ca.issue_cert("client.e2e")
    password, secret_key = secrets.token_hex(16), secrets.token_hex(16)
    keys = f"[default]\naws_access_key_id = e2e\naws_secret_access_key = {secret_key}\n"
    server = {
        "redis.crt": redis.cert_chain_pems[0].bytes(),
        "redis.key": redis.private_key_pem.bytes(),
        "redis-ca.crt": redis_ca.cert_pem.bytes(),
        "s3.crt": s3.cert_chain_pems[0].bytes(),
        "s3.key": s3.private_key_pem.bytes(),
        "users.acl": f"user default off\nuser team on >{password} ~* &* +@all\n".encode(),
        "access-key": b"e2e",
        "secret-key": secret_key.encode(),
    }
    client = {
        "aws-credentials": keys.encode(),
        "s3-ca.crt": s3_ca.cert_pem.bytes(),
        "redis-ca.crt": redis_ca.cert_pem.bytes(),
        "redis-username": b"team",
        "redis-password": password.encode(),
        "redis-tls.crt": shown.cert_chain_pems[0].bytes(),
        "redis-tls.key": shown.private_key_pem.bytes(),
    }
    private = client["redis-tls.key"].decode().splitlines()[1]
    return Credentials(server, client, (password, secret_key, private))


@pytest.fixture(scope="module")
def credentials(cluster: Any) -> Iterator[Credentials]:
    """The stores run, and the operator has started with their Secrets."""
    found = made()
    wrong = {**found.client, "redis-ca.crt": found.client["s3-ca.crt"], "s3-ca.crt": found.client["redis-ca.crt"]}
    cluster.apply(secret("stores-tls", found.server), namespace=STORES)
    for namespace in (SYSTEM, NAMESPACE):
        cluster.apply(secret("persist-tls", found.client), secret("persist-tls-wrong", wrong), namespace=namespace)
    stores = Path(__file__).parent / "stores" / "tls.yaml"
    cluster.kubectl("apply", "-f", str(stores), namespace=STORES)
    for name in ("redis-tls", "s3-tls"):
        cluster.kubectl("rollout", "status", f"deployment/{name}", "--timeout=120s", namespace=STORES, timeout_s=130)
    cluster.scale_operator(0)
    cluster.scale_operator(1)
    yield found
    cluster.kubectl("delete", "-f", str(stores), "--ignore-not-found", namespace=STORES)
    cluster.delete("secret", "stores-tls", namespace=STORES)
    for namespace in (SYSTEM, NAMESPACE):
        cluster.delete("secret", "persist-tls", "persist-tls-wrong", namespace=namespace)


def everything_shown(cluster: Any) -> str:
    """All objects of the namespace but Secrets, and all logs, those of the operator too."""
    kinds = "persistshards,sparksinks,pods,jobs,configmaps,services,events"
    texts = [cluster.kubectl("get", kinds, "-o", "json")]
    for namespace, selector in ((NAMESPACE, ""), (SYSTEM, "app.kubernetes.io/component=operator")):
        for pod in cluster.items("pods", selector, namespace):
            name = pod["metadata"]["name"]
            texts.append(cluster.kubectl("logs", name, "--tail=-1", namespace=namespace, check=False))
    return "".join(texts)


def test_a_shard_a_sink_and_maintenance_on_stores_behind_tls(
    cluster: Any,
    programs: Any,
    credentials: Credentials,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    shard, shard_id = new_shard("tls", schema=AIRLINES, storageProfile="tls", **IDLE)
    sink = named("tls")
    cluster.apply(airlines_sink(sink, shard))
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=300)
    for action in ("verify", "rollup"):
        ask(cluster, action, shard)
    cluster.wait("maintenance", lambda: succeeded(cluster, shard) >= {"Verify", "Rollup"}, timeout_s=240)
    ask(cluster, "gc", shard)  # it needs a rollup behind which it can go
    cluster.wait("the collection", lambda: "GC" in succeeded(cluster, shard), timeout_s=120)
    assert programs.result("content", shard_id, profile="tls")["rows"] == 16
    shown = everything_shown(cluster)
    assert shard in shown
    for one in credentials.hidden:
        assert one not in shown


@pytest.mark.usefixtures("credentials")
def test_the_wrong_ca_is_a_condition_with_words_and_other_shards_go_on(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard = named("tls-wrong")
    head = {"apiVersion": "persistshard.io/v1alpha1", "kind": "PersistShard", "metadata": {"name": shard}}
    cluster.apply({**head, "spec": {"schema": AIRLINES, "storageProfile": "tls-wrong-ca"}})
    found = cluster.wait_condition("persistshard", shard, "StorageReachable", "False", timeout_s=90)
    assert "certificate verify failed" in found["message"]
    assert "-tls.persist-stores.svc" in found["message"]
    assert cluster.condition("persistshard", shard, "Ready")["status"] == "False"
    new_shard("tls-right", schema=AIRLINES, storageProfile="tls")


def test_a_redis_with_tls_and_a_user_refuses_who_has_neither(cluster: Any, credentials: Credentials) -> None:
    """The stores of this file really want what the profile gives them."""
    plain = cluster.kubectl(
        "exec", "deployment/redis-tls", "--", "timeout", "5", "redis-cli", "-p", "6379", "ping", namespace=STORES, check=False
    )  # fmt: skip
    assert "PONG" not in plain
    tls = ["--tls", "--cacert", "/tls/redis-ca.crt", "--cert", "/tls/redis.crt", "--key", "/tls/redis.key"]
    host = ["-h", "127.0.0.1", "--insecure"]
    unnamed = cluster.kubectl("exec", "deployment/redis-tls", "--", "redis-cli", *host, *tls, "ping", namespace=STORES)
    assert "NOAUTH" in unnamed, json.dumps(unnamed)
    assert credentials.client["redis-username"] == b"team"
