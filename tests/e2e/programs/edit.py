"""Changes a shard of airlines outside its sink: removes one row, and adds two that the input does not contain.

Usage: BLOB CONSENSUS SHARD_ID. Prints the number of rows afterwards.
"""

import json
import sys
import time


def main(blob: str, consensus: str, shard: str) -> None:
    from persist_engine import Antichain, Location, PersistClient, ShardId

    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        shard_id = ShardId(shard)
        schema = client.schema(shard_id)
        with client.open_writer(shard_id, schema, purpose="e2e edit") as writer:
            while True:
                upper = writer.fetch_recent_upper().time
                at = max(upper, int(time.time() * 1000))
                with client.open_leased_reader(shard_id, schema, purpose="e2e edit") as reader:
                    rows = reader.snapshot(Antichain.of(upper - 1), timeout_s=60).to_table().to_pylist()
                changes = [((rows[0]["key"], rows[0]["val"]), at, -1)]
                changes += [(({"carrier": carrier}, {"name": "Unlisted Airline"}), at, 1) for carrier in ("ZZ", "Z0")]
                answer = writer.compare_and_append(
                    changes, expected_upper=Antichain.of(upper), new_upper=Antichain.of(at + 1)
                )
                if type(answer).__name__ == "Appended":
                    break
    print(json.dumps({"rows": len(rows) + 1, "upper": at + 1}))


if __name__ == "__main__":
    main(*sys.argv[1:])
