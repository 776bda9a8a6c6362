"""Repairs a pair of stores when one of them lost the identity of the pair: writes it again, from the other store, on demand.

An identity in a store is never overwritten, so stores of two pairs are never joined. This does not restore the logs of shards:
`work.repair.recover` does, shard by shard, once the pair can be opened.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from persist_engine.base.errors import InvalidUsage, StoreMismatch
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.registry import IDENTITY_KEY, Identity, decode_identity, encode_identity
from persist_engine.model.ids import ShardId
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus


@dataclass(frozen=True, slots=True)
class Rejoined:
    """The plan, or the result, of a rejoining. `forgot` is the store that lost the identity, `blob` or `consensus` (None: both have it).
    Shards are counted in each store; those that consensus lacks need recovery.
    """

    store_id: str
    forgot: str | None
    shards_in_consensus: int
    shards_without_log: tuple[str, ...]
    committed: bool

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return asdict(self)


def rejoin(blob: Blob, consensus: Consensus, *, commit: bool) -> Rejoined:
    """Reports which store lost the identity and, with `commit`, writes it there. Raises StoreMismatch for stores of two pairs, and
    InvalidUsage for stores of none. Idempotent. Lists both stores. Retries nothing.
    """
    data, head = blob.get(IDENTITY_KEY), consensus.head(IDENTITY_KEY)
    in_blob = None if data is None else decode_identity(data, key=IDENTITY_KEY).store_id
    known = None if head is None else decode_identity(head.data, key=IDENTITY_KEY).store_id
    where = f"consensus {consensus.address()} and blob {blob.address()}"
    if in_blob is not None and known is not None and in_blob != known:
        raise StoreMismatch(f"{where} belong to two pairs, {known} and {in_blob}: an address is wrong")
    store_id = known or in_blob
    if store_id is None:
        raise InvalidUsage(f"{where} belong to no pair: there is nothing to recover")
    forgot = "consensus" if known is None else "blob" if in_blob is None else None
    logs = _shards(consensus.list_keys())
    blobs = _shards(info.key.partition("/")[0] for info in blob.list_prefix(""))
    if commit and forgot == "consensus":
        # A concurrent repair writes the same identity, so a lost race is as good.
        consensus.compare_and_set(IDENTITY_KEY, None, VersionedData(SeqNo(1), encode_identity(Identity(store_id))))
    if commit and forgot == "blob":
        blob.set(IDENTITY_KEY, encode_identity(Identity(store_id)))
    return Rejoined(str(store_id), forgot, len(logs), tuple(sorted(blobs - logs)), commit and forgot is not None)


def _shards(keys: Any) -> set[str]:
    found = set()
    for key in keys:
        with contextlib.suppress(InvalidUsage):
            found.add(str(ShardId(key)))
    return found
