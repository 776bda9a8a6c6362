"""Waits until S3 holds COUNT parts of a shard, and prints a message. Usage: BLOB CONSENSUS SHARD_ID COUNT."""

import json
import sys
import time


def main(blob: str, _consensus: str, shard: str, count: str) -> None:
    from persist_engine import ShardId
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.codec.keys import parts_prefix
    from persist_engine.storage.open import open_blob

    store = open_blob(blob, env=SystemEnv(), metrics=NoMetrics())
    print(json.dumps({"parts": 0}), flush=True)
    while True:
        parts = sum(1 for _ in store.list_prefix(parts_prefix(ShardId(shard))))
        if parts >= int(count):
            break
        time.sleep(0.05)
    print(json.dumps({"parts": parts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
