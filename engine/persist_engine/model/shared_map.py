"""A persistent map that records its edits since a known ancestor, so that the cost of a diff is proportional to the edits.

It is built on rpds (hash array mapped trie, structural sharing). `sealed()` marks a state as committed and records later edits.
`changes_since(ancestor)` inspects only the edited keys if `ancestor` is the sealed map they started from; otherwise it compares
both maps entry by entry. `derived` caches a value computed from the whole map, and `least` maintains a minimum across edits, so
that a commit does not walk the entries it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rpds import HashTrieMap

K = TypeVar("K", bound=Any)
V = TypeVar("V")
R = TypeVar("R")

#: A map of at most this size is scanned instead of indexed.
_SMALL = 64
#: Editing a tree at one key costs as much as rebuilding it costs for this many keys (measured: 5 of a thousand, 43 of 100,000).
_EDIT_COST = 16


class SharedMap(Generic[K, V]):
    """Immutable mapping. Equality compares contents. Iteration is in key order (`items`), so encodings are stable."""

    __slots__ = ("_base", "_derived", "_edited", "_map", "_trees")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._map: HashTrieMap[K, V] = HashTrieMap(dict(items))
        self._base: object = None
        self._edited: frozenset[K] = frozenset()
        self._derived: dict[Callable[..., Any], Any] = {}
        self._trees: dict[Callable[[V], Any], tuple[MinTree[K], frozenset[K]]] = {}

    def _edit(self, new_map: HashTrieMap[K, V], keys: frozenset[K]) -> SharedMap[K, V]:
        out: SharedMap[K, V] = SharedMap.__new__(SharedMap)
        out._map = new_map
        out._base = self._base if self._edited else self._map
        out._edited = self._edited | keys
        out._derived = {}
        out._trees = {measure: (tree, late | keys) for measure, (tree, late) in self._trees.items()}
        return out

    def set(self, key: K, value: V) -> SharedMap[K, V]:
        """Return the map with `key` -> `value`; O(log n). Returns self if nothing changes."""
        if key in self._map and self._map[key] == value:
            return self
        return self._edit(self._map.insert(key, value), frozenset((key,)))

    def remove(self, key: K) -> SharedMap[K, V]:
        """Return the map without `key`; self if it is absent."""
        return self._edit(self._map.remove(key), frozenset((key,))) if key in self._map else self

    def edited(self, changes: Mapping[K, V | None]) -> SharedMap[K, V]:
        """Return the map with each key set to its value; a value of None removes the key. Equivalent to single sets and
        removes, but in O(changes * log n), because each single edit copies the record of the edits before it. Returns self if
        nothing changes.
        """
        new_map, keys = self._map, []
        for key, value in changes.items():
            if new_map.get(key) == value:
                continue
            keys.append(key)
            new_map = new_map.remove(key) if value is None else new_map.insert(key, value)
        return self._edit(new_map, frozenset(keys)) if keys else self

    def sealed(self) -> SharedMap[K, V]:
        """Return the same contents with an empty edit record; later edits are recorded relative to this map."""
        if not self._edited:
            return self
        out: SharedMap[K, V] = SharedMap.__new__(SharedMap)
        out._map, out._base, out._edited = self._map, None, frozenset()
        out._derived, out._trees = self._derived, self._trees
        return out

    def derived(self, compute: Callable[[SharedMap[K, V]], R]) -> R:
        """Return `compute(self)`, cached for these contents. `compute` must be a pure module-level function."""
        if compute not in self._derived:
            self._derived[compute] = compute(self)
        out: R = self._derived[compute]
        return out

    def least(self, measure: Callable[[V], Any]) -> Any:
        """Return the minimum of `measure` over all values; None for an empty map. The first call is O(n); after an edit the
        cost hardly depends on the size of the map. `measure` must be a pure module-level function.
        """
        if len(self._map) <= _SMALL:
            return min(map(measure, self._map.values()), default=None)
        return self._tree(measure).least

    def keys_below(self, measure: Callable[[V], Any], bound: Any) -> list[K]:
        """Return the keys whose value measures less than `bound`, sorted. Costs as much as `least`, plus the size of the result."""
        if len(self._map) <= _SMALL:
            return sorted(key for key, value in self._map.items() if measure(value) < bound)
        return sorted(self._tree(measure).below(bound, self._map))

    def _tree(self, measure: Callable[[V], Any]) -> MinTree[K]:
        known = self._trees.get(measure)
        if known is None or len(known[1]) * _EDIT_COST > len(self._map):
            tree = MinTree.of(self._map, measure)
        elif known[1]:
            tree = known[0].edited(known[1], self._map)
        else:
            return known[0]
        self._trees = {**self._trees, measure: (tree, frozenset())}
        return tree

    def changes_since(self, ancestor: SharedMap[K, V]) -> list[tuple[K, V | None, V | None]]:
        """Return (key, old, new) for every difference, sorted by key; None means absent. O(edits) for a sealed ancestor."""
        if self._map is ancestor._map:
            return []
        is_direct = bool(self._edited) and self._base is ancestor._map
        keys: Iterable[K] = self._edited if is_direct else set(self._map) | set(ancestor._map)
        rows = [(key, ancestor._map.get(key), self._map.get(key)) for key in sorted(keys)]
        return [row for row in rows if row[1] != row[2]]

    def get(self, key: K) -> V | None:
        """Return the value, or None."""
        return self._map.get(key)

    def items(self) -> list[tuple[K, V]]:
        """Return all entries, sorted by key."""
        return sorted(self._map.items(), key=lambda item: item[0])

    def values(self) -> Iterator[V]:
        """Return all values, in no particular order."""
        return iter(self._map.values())

    def __getitem__(self, key: K) -> V:
        return self._map[key]

    def __contains__(self, key: object) -> bool:
        return key in self._map

    def __iter__(self) -> Iterator[K]:
        return iter(sorted(self._map))

    def __len__(self) -> int:
        return len(self._map)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedMap) and (self._map is other._map or self._map == other._map)

    __hash__ = None  # type: ignore[assignment]  # contents may be unhashable

    def __repr__(self) -> str:
        return f"SharedMap({self.items()!r})"


#: Children per node. With two levels, a leaf holds about 25 of 100,000 keys, and an edit inspects about 150 values.
_WIDTH = 64

#: The least measure below the node (None: it is empty), and its children: keys in a leaf, nodes elsewhere.
_Node = tuple[Any, tuple[Any, ...]]
_EMPTY_LEAF: _Node = (None, ())


def _least(values: Iterable[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class MinTree(Generic[K]):
    """An index of the least measure. `measure` must be a pure function with comparable results."""

    measure: Callable[[Any], Any]
    root: _Node

    @classmethod
    def of(cls, values: Mapping[K, Any], measure: Callable[[Any], Any]) -> MinTree[K]:
        """Build the tree of all `values`; O(n)."""
        buckets: list[list[K]] = [[] for _ in range(_WIDTH * _WIDTH)]
        for key in values:
            buckets[hash(key) % len(buckets)].append(key)
        leaves = [_leaf(tuple(keys), values, measure) if keys else _EMPTY_LEAF for keys in buckets]
        nodes = [_node(tuple(leaves[at : at + _WIDTH])) for at in range(0, len(leaves), _WIDTH)]
        return cls(measure, _node(tuple(nodes)))

    @property
    def least(self) -> Any:
        """The least measure; None for an empty tree."""
        return self.root[0]

    def edited(self, keys: Iterable[K], values: Mapping[K, Any]) -> MinTree[K]:
        """Return the tree of `values`, which may differ from this tree's values in `keys` only."""
        root = self.root
        for key in keys:
            upper, lower = divmod(hash(key) % (_WIDTH * _WIDTH), _WIDTH)
            node = root[1][upper]
            others = tuple(other for other in node[1][lower][1] if other != key)
            leaf = _leaf((*others, key) if key in values else others, values, self.measure)
            root = _with_child(root, upper, _with_child(node, lower, leaf))
        return replace(self, root=root)

    def below(self, bound: Any, values: Mapping[K, Any]) -> Iterator[K]:
        """Yield the keys whose measure is less than `bound`, in no particular order. The cost is proportional to the result."""
        for node in _under(self.root, bound):
            for leaf in _under(node, bound):
                yield from (key for key in leaf[1] if self.measure(values[key]) < bound)


def _under(node: _Node, bound: Any) -> Iterator[_Node]:
    return (child for child in node[1] if child[0] is not None and child[0] < bound)


def _leaf(keys: tuple[Any, ...], values: Mapping[Any, Any], measure: Callable[[Any], Any]) -> _Node:
    return (_least(measure(values[key]) for key in keys), keys)


def _node(children: tuple[_Node, ...]) -> _Node:
    return (_least(child[0] for child in children), children)


def _with_child(node: _Node, at: int, child: _Node) -> _Node:
    return _node((*node[1][:at], child, *node[1][at + 1 :]))
