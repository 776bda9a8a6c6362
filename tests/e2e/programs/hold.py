"""Registers a reader that holds since where it is, for good, and says what for. Prints the id of the reader.

Usage: BLOB CONSENSUS SHARD_ID PURPOSE.
"""

import json
import sys


def main(blob: str, consensus: str, shard: str, purpose: str) -> None:
    from persist_engine import Location, PersistClient, ShardId
    from persist_engine.model.ids import CriticalReaderId

    reader = CriticalReaderId.new()
    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        client.open_critical_since(ShardId(shard), reader, opaque=b"e2e", purpose=purpose)
    print(json.dumps({"reader": str(reader)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
