"""Mutations that keep the protobuf framing valid, so that fuzzing gets past the parser to the checks behind it.

This module knows the wire format: fields of varints, fixed bytes and length-delimited bytes, which may contain messages. It knows no
schema, and guesses which bytes are messages; a wrong guess is only another mutation.
"""

from __future__ import annotations

import random
from collections.abc import Callable

#: (field number, wire type, value): an int for varints, bytes otherwise.
Field = tuple[int, int, int | bytes]
#: One change in a state diff: (field, type of change, slices).
_Change = tuple[int, int, list[bytes]]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EDGES = (0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_DEPTH_MAX = 8


def parsed(data: bytes) -> list[Field] | None:
    """The fields of `data`, or None when it is not a message. `written(parsed(data))` decodes to the same message as `data`."""
    fields: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if at < 0 or not number:
            return None
        if kind == _VARINT:
            value, at = _varint(data, at)
            if at < 0:
                return None
            fields.append((number, kind, value))
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind, -1)
        if kind == _BYTES:
            size, at = _varint(data, at)
        if size < 0 or at < 0 or at + size > len(data):
            return None
        fields.append((number, kind, data[at : at + size]))
        at += size
    return fields


def written(fields: list[Field]) -> bytes:
    """The bytes of `fields`."""
    out = bytearray()
    for number, kind, value in fields:
        _put_varint(out, number << 3 | kind)
        if isinstance(value, int):
            _put_varint(out, value)
            continue
        if kind == _BYTES:
            _put_varint(out, len(value))
        out += value
    return bytes(out)


def mutated(data: bytes, rng: random.Random, scramble: Callable[[bytes], bytes], depth: int = 0) -> bytes:
    """`data` with one change somewhere inside: a field is dropped, duplicated, moved, renumbered or set to an edge value, or `scramble`
    changes its bytes.
    """
    fields = parsed(data)
    if not fields:
        return scramble(data)
    index = rng.randrange(len(fields))
    number, kind, value = fields[index]
    match rng.randrange(10):
        case 0:
            del fields[index]
        case 1:
            fields.insert(rng.randrange(len(fields) + 1), fields[index])
        case 2:
            other = rng.randrange(len(fields))
            fields[index], fields[other] = fields[other], fields[index]
        case 3:
            fields[index] = (rng.randint(1, 16), kind, value)
        case 4:
            fields.insert(index, (rng.randint(1, 16), _VARINT, rng.choice(_EDGES)))
        case _:
            fields[index] = (number, kind, _mutated_value(value, rng, scramble, depth))
    return written(fields)


def _mutated_value(
    value: int | bytes, rng: random.Random, scramble: Callable[[bytes], bytes], depth: int
) -> int | bytes:
    if isinstance(value, int):
        nearby = (value + rng.choice((-1, 1))) % 2**64
        return rng.choice((rng.choice(_EDGES), nearby, rng.getrandbits(rng.randint(1, 64))))
    if depth < _DEPTH_MAX and rng.random() < 0.8 and parsed(value):
        return mutated(value, rng, scramble, depth + 1)
    return scramble(value)


def mutated_slices(data: bytes, rng: random.Random, scramble: Callable[[bytes], bytes]) -> bytes:
    """Like `mutated`, for a state diff: changes one of its slices or columns, and keeps the lengths consistent."""
    fields = parsed(data) or []
    index = next((index for index, (number, _, _) in enumerate(fields) if number == 5), None)
    columns = None if index is None else parsed(bytes(fields[index][2])) if fields[index][1] == _BYTES else None
    if index is None or not columns or rng.random() < 0.2:
        return mutated(data, rng, scramble)
    packed = {number: value for number, kind, value in columns if kind == _BYTES and isinstance(value, bytes)}
    kinds, types, lens = (_unpacked(packed.get(number, b"")) for number in (1, 2, 3))
    changes = _changes(kinds, types, lens, packed.get(4, b""))
    if not changes:
        return mutated(data, rng, scramble)
    _change_one(changes, rng, scramble)
    slices = [piece for _, _, pieces in changes for piece in pieces]
    fields[index] = (
        5,
        _BYTES,
        written(
            [
                (1, _BYTES, _packed([kind for kind, _, _ in changes])),
                (2, _BYTES, _packed([change for _, change, _ in changes])),
                (3, _BYTES, _packed([len(piece) for piece in slices])),
                (4, _BYTES, b"".join(slices)),
            ]
        ),
    )
    return written(fields)


def _change_one(changes: list[_Change], rng: random.Random, scramble: Callable[[bytes], bytes]) -> None:
    at, other = rng.randrange(len(changes)), rng.randrange(len(changes))
    kind, change, pieces = changes[at]
    match rng.randrange(8):
        case 0:
            del changes[at]
        case 1:
            changes.insert(other, changes[at])
        case 2:
            changes[at] = (rng.randint(0, 17), change, pieces)
        case 3:
            changes[at] = (kind, rng.choice((0, 2, 2, 3)), pieces)
        case 4:
            changes[at], changes[other] = changes[other], changes[at]
        case _:
            piece = rng.randrange(len(pieces))
            pieces = [*pieces[:piece], mutated(pieces[piece], rng, scramble), *pieces[piece + 1 :]]
            changes[at] = (kind, change, pieces)


def _changes(kinds: list[int], types: list[int], lens: list[int], data: bytes) -> list[_Change]:
    """The field, type and slices of each change. Empty when the columns are inconsistent."""
    changes: list[_Change] = []
    sizes, at = iter(lens), 0
    if len(kinds) != len(types):
        return []
    for kind, change in zip(kinds, types, strict=True):
        slices = []
        for _ in range(3 if change == 1 else 2):
            size = next(sizes, None)
            if size is None:
                return []
            slices.append(data[at : at + size])
            at += size
        changes.append((kind, change, slices))
    return changes


def _unpacked(data: bytes) -> list[int]:
    out, at = [], 0
    while 0 <= at < len(data):
        value, at = _varint(data, at)
        out.append(value)
    return out


def _packed(values: list[int]) -> bytes:
    out = bytearray()
    for value in values:
        _put_varint(out, value)
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, offset of the next item). An offset of -1: there is no valid varint."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value % 2**64, at
        shift += 7
    return 0, -1


def _put_varint(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
