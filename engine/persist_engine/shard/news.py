"""What was pushed about one shard and not looked at yet. Knows nothing of what entries mean.

Filled by whoever hears (never blocks, never decodes), emptied by whoever waits for a newer state.
"""

from __future__ import annotations

import threading

from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.shard.watch import StateWatch
from persist_engine.storage.notify import abridged

#: Entries kept; who is further behind fetches them at once. Times NEWS_BYTES_MAX it bounds the memory of a shard's news.
ENTRIES_MAX = 64


class News:
    """A mailbox of entries by seqno. Thread-safe. `watch` is rung for everything that comes."""

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
        """Whether there is nothing to look at."""
        return not (self._missed or self._newest)

    def take_after(self, seqno: SeqNo) -> list[VersionedData]:
        """The unbroken run of entries that follows `seqno`; forgets them and all older ones."""
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
        """What was told is not to be believed: there may be more to know."""
        with self._lock:
            self._missed = True

    def is_beyond(self, seqno: SeqNo) -> bool:
        """Whether something was told, or may have been missed, that a state at `seqno` does not know. Forgets it: the
        caller fetches.
        """
        with self._lock:
            beyond = self._missed or self._newest > seqno
            self._missed, self._newest = False, SeqNo(0)
            return beyond
