"""The newest answer of the stores about each shard, and whether there were commits to the shard since.

Stores push news of commits (bridge). While they push and bring no news of a shard, its last answer is current, so a routine plan needs no
request. News may be lost, so an answer expires. A remembered answer may only lead to a plan without effect: a plan that writes or acts is
made from a live answer. Thread-safe.

News of the commit that an answer already shows does not count, because the operator also receives news of its own commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from persist_engine.base.env import Env
from persist_engine.base.versioned import VersionedData
from persist_engine.model.inspection import Inspection

from persist_operator.api.shard import StoreLocation
from persist_operator.plan.observed import Claim, Seen
from persist_operator.settings import LoopSettings

#: The number of shards that are looked at in a second when news of all may have been lost, for example after the loss of a connection.
_LOOKS_PER_S = 50
#: (namespace, name) of a PersistShard.
Name = tuple[str, str]
#: Called with the name of a shard that has news, and the seconds after which to look at it.
OnNews = Callable[[Name, float], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """The stores' answer to a claim."""

    location: StoreLocation
    claim: Claim
    seen: Seen
    at_s: float


class Ear:
    """Receives the news of one shard, in the threads of the stores."""

    __slots__ = ("__weakref__", "_answers", "name")

    def __init__(self, answers: Answers, name: Name) -> None:
        self._answers, self.name = answers, name

    def ask(self) -> None:
        """See Answers.begin."""
        self._answers.begin(self.name)

    def hear(self, news: object | None) -> None:
        """See the engine's `PersistClient.on_commit`."""
        self._answers.heard(self.name, news)


@dataclass(slots=True)
class _Kept:
    ear: Ear
    answer: Answer | None = None
    begun_s: float = field(default=float("-inf"))
    has_news: bool = False
    is_asked: bool = False
    waiting: list[object | None] = field(default_factory=list)
    """News that came while the stores were asked."""


class Answers:
    """The answers by shard."""

    def __init__(self, env: Env, settings: LoopSettings) -> None:
        self._env, self._settings = env, settings
        self._lock = threading.Lock()
        self._kept: dict[Name, _Kept] = {}
        self.on_news: OnNews = lambda name, after_s: None

    def begin(self, name: Name) -> Ear:
        """The caller must call this before it asks the stores, because news from now on is newer than the answer may be. Returns the
        listener.
        """
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                kept = self._kept[name] = _Kept(Ear(self, name))
            kept.has_news, kept.begun_s, kept.answer = False, self._env.monotonic_s(), None
            kept.is_asked, kept.waiting = True, []
            return kept.ear

    def keep(self, name: Name, location: StoreLocation, claim: Claim, seen: Seen) -> None:
        """Keep the answer to the last question. Only an inspected shard can be remembered. News that came since the question counts now,
        unless it is about the commit that the answer shows.
        """
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                return
            if isinstance(seen.inspected, Inspection):
                kept.answer = Answer(location, claim, seen, kept.begun_s)
            kept.is_asked, waiting, kept.waiting = False, kept.waiting, []
        for news in waiting:
            self.heard(name, news)

    def current(self, name: Name, location: StoreLocation, claim: Claim) -> Seen | None:
        """The remembered answer to this exact claim, if there was no news since and it is younger than `poll_seconds`."""
        answer = self.last(name, location, claim)
        with self._lock:
            kept = self._kept.get(name)
            if answer is None or kept is None or kept.has_news:
                return None
        is_young = self._env.monotonic_s() - answer.at_s < self._settings.poll_seconds
        return answer.seen if is_young else None

    def last(self, name: Name, location: StoreLocation, claim: Claim) -> Answer | None:
        """The last answer about this location and owner, at any age. None when it does not answer the claim."""
        with self._lock:
            kept = self._kept.get(name)
        answer = None if kept is None else kept.answer
        if answer is None or answer.location != location or not isinstance(answer.seen.inspected, Inspection):
            return None
        was, seqno = answer.claim, answer.seen.inspected.seqno
        same = (was.owner, was.wanted) == (claim.owner, claim.wanted) and not claim.take_over
        if same and claim.known_seqno == was.known_seqno:
            return answer
        if not same or claim.known_seqno != seqno:
            return None
        # The status may have the version of the answer by now.
        inspection = replace(answer.seen.inspected, known_tag=answer.seen.inspected.tag)
        return replace(answer, claim=claim, seen=replace(answer.seen, inspected=inspection))

    def heard(self, name: Name, news: object | None) -> None:
        """Record news of the shard, and request a look, not sooner than `inspect_seconds` after its last look. News that comes while the
        stores are asked waits for their answer. None: news may have been lost, for many shards at once, so their looks are spread.
        """
        with self._lock:
            spread_s = self._env.uniform(0.0, self._spread_s()) if news is None else 0.0
            kept = self._kept.get(name)
            if kept is None or kept.has_news or _is_shown(news, kept.answer):
                return
            if kept.is_asked:
                # The answer shows at most one of two different news, so no third is needed.
                if len(kept.waiting) < 2 and news not in kept.waiting:
                    kept.waiting.append(news)
                return
            kept.has_news = True
            after_s = kept.begun_s + self._settings.inspect_seconds - self._env.monotonic_s()
        self.on_news(name, max(spread_s, after_s))

    def _spread_s(self) -> float:
        """The time for the looks of all shards, when news of all may have been lost."""
        return min(max(self._settings.inspect_seconds, len(self._kept) / _LOOKS_PER_S), self._settings.poll_seconds)

    def forget(self, name: Name) -> None:
        """Forget a shard that is gone, and stop listening."""
        with self._lock:
            self._kept.pop(name, None)


def _is_shown(news: object | None, answer: Answer | None) -> bool:
    """Whether the answer shows the commit that the news is about. News of a large commit has no bytes, and so another tag."""
    was = None if answer is None else answer.seen.inspected
    if not isinstance(news, VersionedData) or not isinstance(was, Inspection):
        return False
    return (int(news.seqno), news.tip.tag.hex()) == (was.seqno, was.tag)
