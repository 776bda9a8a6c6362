"""Appends one row to a shard as code of another version, with everything else of this one.

Usage: BLOB CONSENSUS SHARD_ID VERSION. Prints the version that the state then names. Every module takes the version from one place as it
is imported, so it is changed before the first of them.
"""

import json
import sys


def main(blob: str, consensus: str, shard: str, version: str) -> None:
    import persist_engine.base.version

    persist_engine.base.version.APPLIER_VERSION = version
    for name in [
        one for one in sys.modules if one.startswith("persist_engine") and one != "persist_engine.base.version"
    ]:
        del sys.modules[name]
    from persist_engine import Appended, Location, PersistClient, ShardId

    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        shard_id = ShardId(shard)
        with client.open_writer(shard_id, client.schema(shard_id), purpose="e2e") as writer:
            at = writer.upper.time
            row = (({"id": 1}, {"text": f"written by {version}"}), at, 1)
            assert isinstance(writer.compare_and_append([row], expected_upper=at, new_upper=at + 1), Appended)
        print(json.dumps({"version": client.inspect(shard_id).applier_version}))


if __name__ == "__main__":
    main(*sys.argv[1:])
