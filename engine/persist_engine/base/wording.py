"""Counts and sizes as text for messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 blob`, `2 blobs`, `1,024 batches`. Plurals end in `es` after s, x, ch, sh, in `ies` after a consonant and y, else in `s`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{count:,} {noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}s"


def sized(byte_count: int) -> str:
    """`17 B`, `1.2 kB`, `3.4 GB`: powers of ten, the units in which stores bill."""
    size = float(byte_count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
