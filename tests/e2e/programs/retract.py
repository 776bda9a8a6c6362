"""Writes ROWS rows of which one has MARK in its text, then retracts that one. Prints the time of the clock at which it was retracted.

Usage: BLOB CONSENSUS SHARD_ID MARK ROWS. The texts are long, so that the rows become a part in S3.
"""

import json
import sys
import time


def main(blob: str, consensus: str, shard: str, mark: str, rows: str) -> None:
    from persist_engine import Antichain, Location, PersistClient, ShardId

    marked = (({"id": -1}, {"text": mark}), 1)
    written = [(({"id": number}, {"text": f"row {number} " * 20}), 1) for number in range(int(rows))]
    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        shard_id = ShardId(shard)
        with client.open_writer(shard_id, client.schema(shard_id), purpose="e2e retract") as writer:
            for updates in ([marked, *written], [(marked[0], -1)]):
                upper = writer.fetch_recent_upper()
                at = max(upper.time, int(time.time() * 1000))
                rows_at = [(row, at, diff) for row, diff in updates]
                answer = writer.compare_and_append(rows_at, expected_upper=upper, new_upper=Antichain.of(at + 1))
                if type(answer).__name__ != "Appended":
                    sys.exit(f"refused: {answer}")
    print(json.dumps({"retracted_ms": int(time.time() * 1000)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
