"""Copies a part of a shard to two keys that no version names: as one that was staged DAYS days ago, and as one that was staged now.

Usage: BLOB CONSENSUS SHARD_ID DAYS. Prints the keys of both copies, and the size of each in bytes.
"""

import json
import os
import sys
import time


def main(blob: str, consensus: str, shard: str, days: str) -> None:
    from persist_engine import ShardId
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.base.version import APPLIER_VERSION
    from persist_engine.codec.keys import blob_key, part_key, parts_prefix
    from persist_engine.model.ids import PartId
    from persist_engine.storage.open import open_blob

    shard_id = ShardId(shard)
    store = open_blob(blob, env=SystemEnv(), metrics=NoMetrics())
    part = next(iter(store.list_prefix(parts_prefix(shard_id))))
    data = store.get(part.key)
    now_ms, keys = round(time.time() * 1000), []
    for at_ms in (now_ms - int(days) * 86_400_000, now_ms):
        keys.append(blob_key(shard_id, part_key(APPLIER_VERSION, PartId.staged_at(at_ms, os.urandom(10)))))
        store.set(keys[-1], data)
    print(json.dumps({"old": keys[0], "young": keys[1], "bytes": len(data)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
