"""Appends BATCHES batches of ROWS rows, one after the other, and prints each acknowledged batch.

Usage: BLOB CONSENSUS SHARD_ID BATCHES ROWS [PAUSE_MS]. Row i of batch b is (id = b * ROWS + i, text = 'row <id>').
A run continues where an earlier one stopped: each batch takes one time unit, so the upper is the number of batches.
"""

import json
import sys
import time

import pyarrow as pa
import pyarrow.compute as pc


def batch(number: int, rows: int) -> pa.Table:
    ids = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
    text = pc.binary_join_element_wise("row", pc.cast(ids, pa.string()), " ")
    return pa.table(
        {
            "key": pa.StructArray.from_arrays([ids], names=["id"]),
            "val": pa.StructArray.from_arrays([text], names=["text"]),
            "time": pa.repeat(pa.scalar(number, pa.int64()), rows),
            "diff": pa.repeat(pa.scalar(1, pa.int64()), rows),
        }
    )


def main(blob: str, consensus: str, shard: str, batches: str, rows: str, pause_ms: str = "0") -> None:
    from persist_engine import Antichain, Location, PersistClient, ShardId

    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        shard_id = ShardId(shard)
        with client.open_writer(shard_id, client.schema(shard_id), purpose="e2e writer") as writer:
            first = writer.fetch_recent_upper().time
            for number in range(first, first + int(batches)):
                answer = writer.compare_and_append(
                    batch(number, int(rows)), expected_upper=Antichain.of(number), new_upper=Antichain.of(number + 1)
                )
                if type(answer).__name__ != "Appended":
                    sys.exit(f"batch {number} was refused: {answer}")
                print(json.dumps({"acknowledged": number + 1, "rows": (number + 1) * int(rows)}), flush=True)
                time.sleep(int(pause_ms) / 1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
