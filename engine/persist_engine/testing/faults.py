"""Blob and Consensus that fail on purpose. Each call draws two independent decisions: whether it happens, and whether it is answered.

| happens | answered | the caller sees | the store |
|---|---|---|---|
| yes | yes | the answer | changed |
| yes | no | Indeterminate | changed |
| no | no | Indeterminate | unchanged |
| no | yes | Determinate | unchanged |

Decisions come from a seed, or from a script (`fail_next`), and a test can change them while in use. Misuse by the caller is always
answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import Determinate, Indeterminate, StorageError
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.blob import Blob, BlobInfo, KeptBlob
from persist_engine.storage.consensus import Consensus

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Scripted:
    happened: bool
    answered: bool
    matching: str


class Faults:
    """Decides about each call. One object may serve several wrappers. Thread-safe. Deterministic as far as the order of calls is."""

    def __init__(self, seed: int = 0, *, happens: float = 1.0, answers: float = 1.0) -> None:
        self._env = SeededEnv(seed)
        self._lock = threading.Lock()
        self._scripts: dict[str, deque[_Scripted]] = {}
        self._happens = happens
        self._answers = answers
        self._injected = 0

    @property
    def injected(self) -> int:
        """How many calls have failed on purpose so far."""
        with self._lock:
            return self._injected

    def set_rates(self, *, happens: float, answers: float) -> None:
        """Sets the probabilities with which each later call happens and is answered."""
        with self._lock:
            self._happens, self._answers = happens, answers

    def heal(self) -> None:
        """Ends all faults and drops the scripts."""
        with self._lock:
            self._happens = self._answers = 1.0
            self._scripts.clear()

    def break_down(self) -> None:
        """From now on no call happens and none is answered."""
        self.set_rates(happens=0.0, answers=0.0)

    def fail_next(
        self, verb: str, *, happened: bool, answered: bool = False, matching: str = "", times: int = 1
    ) -> None:
        """Makes the next `times` calls of `verb` whose key contains `matching` end this way, whatever the rates are."""
        with self._lock:
            scripts = self._scripts.setdefault(verb, deque())
            scripts.extend([_Scripted(happened=happened, answered=answered, matching=matching)] * times)

    def call(self, verb: str, key: str, address: str, run: Callable[[], T]) -> T:
        """Runs `run`, or does not, and returns its answer, or raises `failure`, as decided."""
        happens, answers = self._decide(verb, key)
        if happens:
            answer = run()
            if answers:
                return answer
        raise self.failure(verb, key, address, answers=answers)

    def failure(self, verb: str, key: str, address: str, *, answers: bool) -> StorageError:
        """The error that the caller of a failed call gets."""
        where = f"{verb} {key} at {address}"
        if answers:
            return Determinate(f"{where}: injected refusal", key=key)
        return Indeterminate(f"{where}: injected time-out", key=key)

    def _decide(self, verb: str, key: str) -> tuple[bool, bool]:
        with self._lock:
            for scripted in self._scripts.get(verb, ()):
                if scripted.matching in key:
                    self._scripts[verb].remove(scripted)
                    decision = scripted.happened, scripted.answered
                    break
            else:
                # Always draw both, so that a change of one rate does not shift the draws of the other.
                decision = self._env.uniform(0, 1) < self._happens, self._env.uniform(0, 1) < self._answers
            self._injected += decision != (True, True)
            return decision


class FaultyBlob:
    """Blob under `faults`. One decision covers a whole listing, and the listing is read at once."""

    def __init__(self, inner: Blob, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def get(self, key: str) -> bytes | None:
        """See Blob."""
        return self._faults.call("get", key, self.address(), lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """See Blob. Has the faults of `get`."""
        return self._faults.call("get", key, self.address(), lambda: self._inner.get_range(key, start, size_bytes))

    def set(self, key: str, value: bytes) -> None:
        """See Blob."""
        self._faults.call("set", key, self.address(), lambda: self._inner.set(key, value))

    def delete(self, key: str) -> int | None:
        """See Blob."""
        return self._faults.call("delete", key, self.address(), lambda: self._inner.delete(key))

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob."""
        return iter(
            self._faults.call("list_prefix", prefix, self.address(), lambda: list(self._inner.list_prefix(prefix)))
        )

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob."""
        return iter(self._faults.call("list_kept", prefix, self.address(), lambda: list(self._inner.list_kept(prefix))))

    def restore(self, key: str) -> None:
        """See Blob."""
        self._faults.call("restore", key, self.address(), lambda: self._inner.restore(key))

    def address(self) -> str:
        """See Blob."""
        return self._inner.address()

    def close(self) -> None:
        """See Blob."""
        self._inner.close()


class FaultyConsensus:
    """Consensus under `faults`. One decision covers a whole listing, and the listing is read at once."""

    def __init__(self, inner: Consensus, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        return self._faults.call("head", key, self.address(), lambda: self._inner.head(key))

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        return self._faults.call(
            "compare_and_set", key, self.address(), lambda: self._inner.compare_and_set(key, expected, new)
        )

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        return self._faults.call("scan", key, self.address(), lambda: self._inner.scan(key, from_seqno, limit))

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        return self._faults.call("truncate", key, self.address(), lambda: self._inner.truncate(key, before, known))

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        return self._faults.call("replace", key, self.address(), lambda: self._inner.replace(key, expected, new))

    def list_keys(self) -> Iterator[str]:
        """See Consensus."""
        return iter(self._faults.call("list_keys", "", self.address(), lambda: list(self._inner.list_keys())))

    def address(self) -> str:
        """See Consensus."""
        return self._inner.address()

    def close(self) -> None:
        """See Consensus."""
        self._inner.close()
