"""The hollow batches of a spine batch that are stored and that nobody has looked at yet.

A shard of ten thousand live batches is opened without making ten thousand objects: most readers of a state look at a
few levels only. Behaves as the tuple it stands for; looking at an item loads all. Loading is a pure function of bytes
that were verified before; it may still raise, then naming what does not decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, SupportsIndex, overload

if TYPE_CHECKING:
    from persist_engine.model.spine import IdBatch


class LazyParts:
    """`count` items, made by `load` when first asked for. `source` is what they are stored as. Thread-safe: two threads
    may both load, and get equal items.
    """

    __slots__ = ("_count", "_load", "_loaded", "source")

    def __init__(self, count: int, source: bytes, load: Callable[[bytes], tuple[IdBatch, ...]]) -> None:
        self._count = count
        self._load = load
        self._loaded: tuple[IdBatch, ...] | None = None
        self.source = source

    def loaded(self) -> tuple[IdBatch, ...]:
        """The items."""
        items = self._loaded
        if items is None:
            items = self._loaded = self._load(self.source)
        return items

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[IdBatch]:
        return iter(self.loaded())

    @overload
    def __getitem__(self, index: SupportsIndex) -> IdBatch: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[IdBatch, ...]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> IdBatch | tuple[IdBatch, ...]:
        return self.loaded()[index]

    def __add__(self, other: tuple[IdBatch, ...] | LazyParts) -> tuple[IdBatch, ...]:
        return (*self.loaded(), *other)

    def __radd__(self, other: tuple[IdBatch, ...]) -> tuple[IdBatch, ...]:
        return (*other, *self.loaded())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyParts):
            return self is other or self.loaded() == other.loaded()
        return self.loaded() == other

    def __hash__(self) -> int:
        return hash(self.loaded())

    def __repr__(self) -> str:
        return f"LazyParts({self._count})"
