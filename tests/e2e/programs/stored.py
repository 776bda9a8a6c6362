"""Prints the inspection of a shard, and the numbers of its parts and rollups in S3.

Usage: BLOB CONSENSUS SHARD_ID.
"""

import json
import sys


def main(blob: str, consensus: str, shard: str) -> None:
    from persist_engine import Location, PersistClient, ShardId
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.codec.keys import parts_prefix, rollups_prefix
    from persist_engine.storage.open import open_blob

    shard_id = ShardId(shard)
    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        inspection = client.inspect(shard_id).to_json()
    store = open_blob(blob, env=SystemEnv(), metrics=NoMetrics())
    parts = [info.key for info in store.list_prefix(parts_prefix(shard_id))]
    rollups = [info.key for info in store.list_prefix(rollups_prefix(shard_id))]
    print(json.dumps({"inspection": inspection, "parts": len(parts), "rollups": len(rollups)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
