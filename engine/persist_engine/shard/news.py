"""Pushed news of one shard that is not yet processed. This module does not interpret entries.

The listener's thread adds entries; it never blocks or decodes. A waiter for a newer state removes them.
"""

from __future__ import annotations

import threading

from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.shard.watch import StateWatch
from persist_engine.storage.notify import abridged

#: The number of entries kept. A process that is further behind fetches all of them at once. The product with NEWS_BYTES_MAX bounds the
#: memory for one shard's news.
ENTRIES_MAX = 64


class News:
    """A mailbox of entries by seqno. Thread-safe. Every entry notifies `watch`."""

    def __init__(self, watch: StateWatch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._entries: dict[SeqNo, bytes] = {}
        self._newest = SeqNo(0)
        self._missed = False

    def hear(self, news: VersionedData | None) -> None:
        """See `storage.notify.Listener`."""
        with self._lock:
            if news is None:
                self._missed = True
            else:
                self._newest = max(self._newest, news.seqno)
                if data := abridged(news).data:
                    self._entries[news.seqno] = data
                    if len(self._entries) > ENTRIES_MAX:
                        del self._entries[min(self._entries)]
        self._watch.notify()

    def is_empty(self) -> bool:
        """Whether there is no news to process."""
        return not (self._missed or self._newest)

    def take_after(self, seqno: SeqNo) -> list[VersionedData]:
        """The unbroken run of entries that follows `seqno`. Forgets these and all older entries."""
        with self._lock:
            out: list[VersionedData] = []
            while (following := SeqNo(seqno + len(out) + 1)) in self._entries:
                out.append(VersionedData(following, self._entries[following]))
            known = seqno + len(out)
            self._entries = {at: data for at, data in self._entries.items() if at > known}
            if self._newest <= known:
                self._newest = SeqNo(0)
            return out

    def doubt(self) -> None:
        """Records that pushed entries were not usable, so there may be more to fetch."""
        with self._lock:
            self._missed = True

    def is_beyond(self, seqno: SeqNo) -> bool:
        """Whether news past `seqno` was received, or news may have been missed. Forgets this news, because the caller then fetches."""
        with self._lock:
            beyond = self._missed or self._newest > seqno
            self._missed, self._newest = False, SeqNo(0)
            return beyond
