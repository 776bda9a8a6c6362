"""Deletes the oldest part of a shard from S3, as a wrong rule of a bucket would. Prints its key.

Usage: BLOB CONSENSUS SHARD_ID. The newest version of the shard names that part.
"""

import json
import sys


def main(blob: str, consensus: str, shard: str) -> None:
    from persist_engine import ShardId
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.codec.keys import parts_prefix
    from persist_engine.storage.open import open_blob

    store = open_blob(blob, env=SystemEnv(), metrics=NoMetrics())
    part = next(iter(store.list_prefix(parts_prefix(ShardId(shard)))))
    store.delete(part.key)
    print(json.dumps({"key": part.key}))


if __name__ == "__main__":
    main(*sys.argv[1:])
