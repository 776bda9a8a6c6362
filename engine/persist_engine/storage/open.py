"""URL -> adapter -> wrappers, in the one written order. Knows all adapters; drivers load when a URL asks for them."""

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
#: What people try, and why not. Their failover promotes a replica that lacks the newest commits: safe only once commits are
#: acknowledged by S3 (`ack=s3`).
_FAILING_OVER = ("redis+sentinel:", "rediss+sentinel:", "redis+cluster:", "rediss+cluster:")


def open_blob(url: str, *, env: Env, metrics: Metrics, create: bool = True) -> Blob:
    """Open `mem:[name]`, `file:///dir` or `s3://bucket/prefix?region=&endpoint=&path_style=&ca_file=&probe=&credentials_dir=`,
    metered.

    S3 with a credentials_dir takes them from the file `aws-credentials` in there where it is there; otherwise, and without one,
    from the process's surroundings (environment, workload identity), as boto3 does.

    InvalidUsage on a URL that is none of these, or whose driver is not installed; UnsafeStore when the store does not keep its
    promises, Determinate or Indeterminate when it cannot be reached. Errors name the address, never a credential. A
    directory that is not there is made, or without `create` InvalidUsage.
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

    All take push=off: tell nobody of commits, and hear of nobody's (see storage.notify).
    Redis takes the parameters prefix, password_file, credentials_dir (the password stands in its file `redis-password`
    where it is there), ca_file, unsafe (true accepts settings that can lose commits) and ack (redis: acknowledged when Redis
    has it). It must be one primary on its own: UnsafeStore for replicas, nodes of
    clusters and what fails over.
    Errors as of open_blob.
    """
    if url.startswith(_FAILING_OVER):
        raise UnsafeStore(
            f"{url.partition(':')[0]}: a failover forgets commits that Redis has acknowledged; "
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

            consensus = open_redis_consensus(RedisAddress.of(parsed))
    return MeteredConsensus(consensus, env=env, metrics=metrics)


def open_push(url: str, *, env: Env, metrics: Metrics) -> Push:
    """What carries news of commits to the store at `url`, as of open_consensus; connects when somebody listens.
    InvalidUsage as of open_consensus.
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
