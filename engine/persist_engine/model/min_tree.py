"""The least of what is measured of every value of a map, kept up to date at a cost that hardly grows with the map.

A persistent tree of fixed width over buckets of keys: an edit makes one leaf and the two nodes above it anew, all else
is shared. How keys fall into buckets decides speed only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

K = TypeVar("K")

#: Children of a node. Two levels of it: at 100,000 keys a leaf holds some 25, and an edit looks at about 150 values.
_WIDTH = 64

#: The least below (None: nothing there), and the children: keys in a leaf, nodes elsewhere.
_Node = tuple[Any, tuple[Any, ...]]
_EMPTY_LEAF: _Node = (None, ())


def _least(values: Iterable[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class MinTree(Generic[K]):
    """`measure` must be a pure function to values that compare."""

    measure: Callable[[Any], Any]
    root: _Node

    @classmethod
    def of(cls, values: Mapping[K, Any], measure: Callable[[Any], Any]) -> MinTree[K]:
        """Of all of `values`; O(n)."""
        buckets: list[list[K]] = [[] for _ in range(_WIDTH * _WIDTH)]
        for key in values:
            buckets[hash(key) % len(buckets)].append(key)
        leaves = [_leaf(tuple(keys), values, measure) if keys else _EMPTY_LEAF for keys in buckets]
        nodes = [_node(tuple(leaves[at : at + _WIDTH])) for at in range(0, len(leaves), _WIDTH)]
        return cls(measure, _node(tuple(nodes)))

    @property
    def least(self) -> Any:
        """The least measure; None when there is nothing."""
        return self.root[0]

    def edited(self, keys: Iterable[K], values: Mapping[K, Any]) -> MinTree[K]:
        """The tree of `values`, which differ from those it was made of in `keys` at most."""
        root = self.root
        for key in keys:
            upper, lower = divmod(hash(key) % (_WIDTH * _WIDTH), _WIDTH)
            node = root[1][upper]
            others = tuple(other for other in node[1][lower][1] if other != key)
            leaf = _leaf((*others, key) if key in values else others, values, self.measure)
            root = _with_child(root, upper, _with_child(node, lower, leaf))
        return replace(self, root=root)

    def below(self, bound: Any, values: Mapping[K, Any]) -> Iterator[K]:
        """The keys whose measure is less than `bound`, in no particular order; costs what it finds."""
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
