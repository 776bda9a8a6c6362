"""Looks for MARK in every object of a shard in S3, as it is and, of parts, decoded, and in every entry of its log. Prints where it is.

Usage: BLOB CONSENSUS SHARD_ID MARK.
"""

import io
import json
import sys

import pyarrow.parquet as pq


def main(blob: str, consensus: str, shard: str, mark: str) -> None:
    from persist_engine.base.env import SystemEnv
    from persist_engine.base.metrics import NoMetrics
    from persist_engine.base.versioned import SeqNo
    from persist_engine.storage.open import open_blob, open_consensus

    wanted, found, keys = mark.encode(), [], []
    store = open_blob(blob, env=SystemEnv(), metrics=NoMetrics())
    for info in store.list_prefix(f"{shard}/"):
        data = store.get(info.key) or b""
        keys.append(info.key)
        decoded = str(pq.read_table(io.BytesIO(data)).to_pylist()).encode() if data[:4] == b"PAR1" else b""
        if wanted in data or wanted in decoded:
            found.append(info.key)
    log = open_consensus(consensus, env=SystemEnv(), metrics=NoMetrics())
    entries = log.scan(shard, SeqNo(0), limit=10_000)
    found += [f"v{entry.seqno}" for entry in entries if wanted in entry.data]
    print(json.dumps({"found": found, "objects": len(keys), "keys": keys[:10], "entries": len(entries)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
