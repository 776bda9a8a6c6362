"""Hollow batches of a spine batch that are stored but not yet decoded.

With them, opening a shard with ten thousand live batches does not create ten thousand objects: most users of a state look at a
few levels only, and diffs that merge spine batches move their hollow batches undecoded. Both classes behave like the tuple that
they represent. Access to an item decodes all of them. Decoding is a pure function of bytes that were verified before. It may
still raise an error, which names what does not decode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

if TYPE_CHECKING:
    from persist_engine.model.frontier import Description
    from persist_engine.model.spine.flat import SpineId
    from persist_engine.model.spine.spine import IdBatch, Parts

#: Ids and descriptions of hollow batches, as the stored form of their spine batch has them.
Outline = tuple[tuple["SpineId", ...], tuple["Description", ...]]


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """Hollow batches as rollups store them. `data` is compressed unless `unpacked_bytes`, its uncompressed size, is 0."""

    data: bytes
    unpacked_bytes: int = 0


class DeferredParts(ABC):
    """Items that are decoded on first access. Thread-safe: if two threads both decode them, they get equal items."""

    __slots__ = ("_count", "_loaded")

    def __init__(self, count: int) -> None:
        self._count = count
        self._loaded: tuple[IdBatch, ...] | None = None

    def loaded(self) -> tuple[IdBatch, ...]:
        """Return the items, decoding them if necessary."""
        items = self._loaded
        if items is None:
            items = self._loaded = self._load()
        return items

    def outline(self) -> Outline:
        """Return ids and descriptions, at a fraction of the cost of the items."""
        items = self._loaded
        return self._outline() if items is None else outline_of(items)

    @abstractmethod
    def _load(self) -> tuple[IdBatch, ...]: ...

    @abstractmethod
    def _outline(self) -> Outline: ...

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

    def __add__(self, other: tuple[IdBatch, ...] | DeferredParts) -> tuple[IdBatch, ...]:
        return (*self.loaded(), *other)

    def __radd__(self, other: tuple[IdBatch, ...]) -> tuple[IdBatch, ...]:
        return (*other, *self.loaded())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeferredParts):
            return self is other or self.loaded() == other.loaded()
        return self.loaded() == other

    def __hash__(self) -> int:
        return hash(self.loaded())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._count})"


class LazyParts(DeferredParts):
    """`count` items stored as `source`. `load` decodes them; `outline` decodes only their outline."""

    __slots__ = ("_loader", "_outliner", "source")

    def __init__(
        self,
        count: int,
        source: EncodedParts,
        load: Callable[[EncodedParts], tuple[IdBatch, ...]],
        outline: Callable[[EncodedParts], Outline],
    ) -> None:
        super().__init__(count)
        self.source = source
        self._loader, self._outliner = load, outline

    def _load(self) -> tuple[IdBatch, ...]:
        return self._loader(self.source)

    def _outline(self) -> Outline:
        return self._outliner(self.source)


class JoinedParts(DeferredParts):
    """The items of several sequences, concatenated. `pieces` holds stored sequences and, between them, tuples."""

    __slots__ = ("pieces",)
    pieces: tuple[Parts, ...]

    def __init__(self, several: Sequence[Parts]) -> None:
        super().__init__(sum(map(len, several)))
        pieces: list[Parts] = []
        for parts in several:
            held = parts.pieces if isinstance(parts, JoinedParts) else (parts,)
            for piece in held:
                last = pieces[-1] if pieces else None
                if isinstance(last, tuple) and isinstance(piece, tuple):
                    pieces[-1] = last + piece
                else:
                    pieces.append(piece)
        self.pieces = tuple(pieces)

    def _load(self) -> tuple[IdBatch, ...]:
        return tuple(item for piece in self.pieces for item in piece)

    def _outline(self) -> Outline:
        ids: list[SpineId] = []
        descs: list[Description] = []
        for piece in self.pieces:
            some_ids, some_descs = outline_of(piece)
            ids += some_ids
            descs += some_descs
        return tuple(ids), tuple(descs)


def joined(several: Sequence[Parts]) -> Parts:
    """Return all items in order, without decoding any."""
    if any(isinstance(parts, DeferredParts) for parts in several):
        return several[0] if len(several) == 1 else JoinedParts(several)
    return tuple(item for parts in several for item in parts)


def outline_of(parts: Parts) -> Outline:
    """Return ids and descriptions of `parts`, decoding as little as possible."""
    if isinstance(parts, DeferredParts):
        return parts.outline()
    return tuple(part_id for part_id, _ in parts), tuple(batch.desc for _, batch in parts)
