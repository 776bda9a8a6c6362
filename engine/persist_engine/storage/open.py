"""Opens a store from its URL: chooses the adapter and wraps it. Knows all adapters, but imports a driver only when a URL needs it."""

from __future__ import annotations

from pathlib import Path

from persist_engine.base.env import Env
from persist_engine.base.errors import UnsafeStore
from persist_engine.base.extras import needs_extra
from persist_engine.base.metrics import Metrics
from persist_engine.storage.addresses import REDIS_PARAMS, S3_PARAMS, RedisAddress, S3Address
from persist_engine.storage.blob import Blob
from persist_engine.storage.blob_file import FileBlob
from persist_engine.storage.blob_mem import shared_mem_blob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.consensus_mem import shared_mem_consensus
from persist_engine.storage.consensus_sqlite import SqliteConsensus
from persist_engine.storage.metered import MeteredBlob, MeteredConsensus
from persist_engine.storage.notify import LocalPush, NoPush, Push, shared_local_push
from persist_engine.storage.urls import absolute_path, parse_url, pushes

_BLOB_URLS = {
    "mem": frozenset[str](),
    "file": frozenset[str](),
    "s3": S3_PARAMS,
}
_CONSENSUS_URLS = {
    "mem": frozenset({"push"}),
    "sqlite": frozenset({"push"}),
    "redis": REDIS_PARAMS,
    "rediss": REDIS_PARAMS,
}
#: Refused schemes. Their failover promotes a replica that lacks the newest commits. This would be safe only if S3 acknowledged
#: commits (`ack=s3`).
_FAILING_OVER = ("redis+sentinel:", "rediss+sentinel:", "redis+cluster:", "rediss+cluster:")


def open_blob(url: str, *, env: Env, metrics: Metrics, create: bool = True) -> Blob:
    """Open `mem:[name]`, `file:///dir` or `s3://bucket/prefix`, metered. Parameters of S3: region, endpoint, path_style, ca_file,
    encryption (SSE-S3 or SSE-KMS, requested from the server with every put), kms_key_id, probe, credentials_dir.

    S3 credentials come from the file `aws-credentials` in credentials_dir if both exist, otherwise from the process's environment
    or workload identity, as in boto3. The CAs are those of ca_file, else of `s3-ca.crt` in credentials_dir, else of boto3.

    Creates a missing directory; without `create`, raises NoStore instead. Raises InvalidUsage for any other URL, and for one
    whose driver is not installed. Raises UnsafeStore if the store lacks a required guarantee, and Determinate or Indeterminate if
    it cannot be reached. Errors name the address, never a credential.
    """
    parsed = parse_url(url, allowed=_BLOB_URLS)
    blob: Blob
    match parsed.scheme:
        case "mem":
            blob = shared_mem_blob(parsed.path)
        case "file":
            blob = FileBlob(Path(absolute_path(parsed)), env=env, create=create)
        case _:
            with needs_extra("s3", "a blob store on S3"):
                from persist_engine.storage.s3.blob import open_s3_blob

            blob = open_s3_blob(S3Address.of(parsed), env=env, metrics=metrics)
    return MeteredBlob(blob, env=env, metrics=metrics)


def open_consensus(url: str, *, env: Env, metrics: Metrics, create: bool = True) -> Consensus:
    """Open `mem:[name]`, `sqlite:///file` or `redis[s]://[user[:password]@]host[:port][/db]`, metered.

    All accept push=off, which disables sending and receiving news of commits (see storage.notify). Redis accepts the parameters
    prefix, password_file, credentials_dir (its files that exist are used: `redis-username`, `redis-password`, and with TLS
    `redis-ca.crt`, `redis-tls.crt`, `redis-tls.key`), ca_file, cert_file and key_file (of this client), unsafe (true accepts
    settings that can lose commits) and ack (redis: a commit is acknowledged when Redis has it). It must be a single
    primary: replicas, cluster nodes and every form of failover raise UnsafeStore. Other errors are those of open_blob.
    """
    if url.startswith(_FAILING_OVER):
        raise UnsafeStore(
            f"{url.partition(':')[0]}: a failover loses commits that Redis has acknowledged; "
            "use redis:// or rediss:// with the address of one primary that is restarted in its place"
        )
    parsed = parse_url(url, allowed=_CONSENSUS_URLS)
    consensus: Consensus
    match parsed.scheme:
        case "mem":
            consensus = shared_mem_consensus(parsed.path)
        case "sqlite":
            consensus = SqliteConsensus(Path(absolute_path(parsed)), create=create)
        case _:
            with needs_extra("redis", "a log in Redis"):
                from persist_engine.storage.redis.consensus import open_redis_consensus

            consensus = open_redis_consensus(RedisAddress.of(parsed), env=env)
    return MeteredConsensus(consensus, env=env, metrics=metrics)


def open_push(url: str, *, env: Env, metrics: Metrics) -> Push:
    """Return the carrier of commit news for the store at `url` (as for open_consensus). It connects on the first subscription.
    Raises InvalidUsage as open_consensus does.
    """
    parsed = parse_url(url, allowed=_CONSENSUS_URLS)
    if not pushes(parsed):
        return NoPush()
    match parsed.scheme:
        case "mem":
            return shared_local_push(parsed.shown) if parsed.path else LocalPush()
        case "sqlite":
            return shared_local_push(absolute_path(parsed))
        case _:
            with needs_extra("redis", "a log in Redis"):
                from persist_engine.storage.redis.consensus import redis_pool
                from persist_engine.storage.redis.notify import RedisPush

            address = RedisAddress.of(parsed)
            pool = redis_pool(address)
            return RedisPush(pool, prefix=address.prefix, address=address.shown, env=env, metrics=metrics)
