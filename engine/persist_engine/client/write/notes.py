"""The notes of what the write tasks of a run staged, for another driver of the same run (spec 10.12).

A driver that was killed leaves its staged batches behind. From their notes, the next driver of the run finds them, appends those that are
still correct, and stages the rest. A note alone decides nothing: the driver compares it with the input. If a note is lost, its rows are
staged again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage
from persist_engine.codec.keys import PartKey, blob_key, parse_blob_key, staging_note_key, staging_notes_prefix
from persist_engine.codec.staging_note import StagingNote, decode_staging_note, encode_staging_note
from persist_engine.model.ids import PartId
from persist_engine.parts.listings import RunWriter

#: The number of notes read or deleted at once. They are small, so waiting for the store dominates.
THREADS = 16
#: The number of bytes of a note's id that its run determines. They follow the six bytes of the time.
_RUN_BYTES = 4

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StagingNotes:
    """The notes of one run of one sink. Its methods retry storage errors, and raise Unavailable as the store's settings say."""

    store: RunWriter
    """The store of the shard's blobs: a machine, or the store that an executor has."""
    sink_id: str
    run: bytes
    """The name of the run, as in its token."""

    def put(self, note: StagingNote) -> None:
        """Stores a note of this run. It is durable when this returns. A repetition stores another note."""
        env = self.store.env
        note_id = PartId.staged_at(env.now_ms(), self._mark + env.random_bytes(10 - _RUN_BYTES))
        key = blob_key(self.store.shard_id, staging_note_key(note_id))
        data = encode_staging_note(note)
        self._external("set staging note", partial(self.store.blob.set, key, data))

    def read(self) -> list[StagingNote]:
        """The notes of this run that are in the store, in the order in which they were stored by the clocks of the tasks. A note that
        cannot be read is logged and left out, so its rows are staged again.
        """
        keys = self._keys()
        with ThreadPoolExecutor(min(THREADS, max(1, len(keys))), thread_name_prefix="persist-notes") as pool:
            return [note for note in pool.map(self._note, keys) if note is not None]

    def forget(self) -> int:
        """Deletes the notes of this run, and returns their number. The staged batches stay. Idempotent."""
        notes = self._keys()
        delete = lambda key: self._external("delete staging note", partial(self.store.blob.delete, key))  # noqa: E731
        with ThreadPoolExecutor(min(THREADS, max(1, len(notes))), thread_name_prefix="persist-notes") as pool:
            return sum(1 for _ in pool.map(delete, notes))

    @property
    def _mark(self) -> bytes:
        text = f"{self.sink_id}\n".encode() + self.run
        return hashlib.blake2b(text, digest_size=_RUN_BYTES).digest()

    def _keys(self) -> list[str]:
        prefix = staging_notes_prefix(self.store.shard_id)
        list_all = lambda: [info.key for info in self.store.blob.list_prefix(prefix)]  # noqa: E731
        return sorted(self._of_this_run(self._external("list staging notes", list_all)))

    def _of_this_run(self, keys: list[str]) -> Iterator[str]:
        """The keys that belong to this run. SUBTLE: four bytes of a hash decide. So a note of another run may be among them. `_note` leaves
        it out. `forget` may delete it, and then its rows are staged again.
        """
        for key in keys:
            parsed = _parsed(key)
            if parsed is not None and parsed.part_id.to_bytes()[6 : 6 + _RUN_BYTES] == self._mark:
                yield key

    def _note(self, key: str) -> StagingNote | None:
        data = self._external("get staging note", partial(self.store.blob.get, key))
        if data is None:  # another driver of this run landed its batch and deleted the note
            return None
        try:
            note = decode_staging_note(bytes(data), key=key, shard_id=self.store.shard_id)
        except (CorruptData, Incompatible) as error:
            _log.warning("staging note is left out: %s", error, extra={"shard": self.store.shard_id})
            return None
        return note if (note.sink_id, note.run) == (self.sink_id, self.run) else None

    def _external(self, what: str, call: Callable[[], T]) -> T:
        return self.store.retry.external(what, call, shard=self.store.shard_id)


def _parsed(key: str) -> PartKey | None:
    try:
        parsed = parse_blob_key(key)
    except InvalidUsage:  # a key of another application, for example a folder that an S3 console makes
        return None
    return parsed if isinstance(parsed, PartKey) else None
