"""Prints the contents of a shard at AS_OF, or at its newest readable time: number of rows, order-free content hash, frontiers.

Usage: BLOB CONSENSUS SHARD_ID [AS_OF]. The hash covers the diffs, so a duplicate row changes it. The test also imports this file, and hashes the source with the same function.
"""

import hashlib
import json
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv


class _Hashing:
    """A file that keeps only the hash of the bytes written to it."""

    closed = False

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha.update(data)
        return len(data)

    def flush(self) -> None:
        pass


def content_hash(table: pa.Table) -> str:
    """A hash that does not depend on the order of the rows: they are sorted by all columns and written as text."""
    table = table.sort_by([(name, "ascending") for name in table.column_names]).combine_chunks()
    sink = _Hashing()
    csv.write_csv(table, pa.PythonFile(sink, mode="w"))
    return sink.sha.hexdigest()


def flat(table: pa.Table) -> pa.Table:
    """The fields of key and value, and the diff. The time is always the as_of, and is omitted."""
    columns: dict[str, pa.ChunkedArray] = {}
    for side in ("key", "val"):
        for position, field in enumerate(table.schema.field(side).type):
            columns[field.name] = pa.chunked_array(
                [pc.struct_field(chunk, position) for chunk in table[side].chunks], field.type
            )
    return pa.table({**columns, "diff": table["diff"]})


def main(blob: str, consensus: str, shard: str, at: str = "") -> None:
    from persist_engine import Antichain, Location, PersistClient, ShardId

    with PersistClient.open(Location(blob=blob, consensus=consensus)) as client:
        shard_id = ShardId(shard)
        upper = client.recent_upper(shard_id)
        with client.open_leased_reader(shard_id, purpose="e2e content") as reader:
            as_of = int(at) if at else upper.time - 1
            table = flat(reader.snapshot(Antichain.of(as_of), timeout_s=60).to_table())
            since = reader.since.time
    print(
        json.dumps(
            {"rows": table.num_rows, "hash": content_hash(table), "as_of": as_of, "upper": upper.time, "since": since}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
