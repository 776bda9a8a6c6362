"""The stock of a shop, kept up to date by a program: tables by name, with types that mypy and pyright check.

    uv run python examples/tables/stock.py [FOLDER]

Shows what a job usually does: a table that is created once, changes that are written exactly once, an answer for people, and what changed
since the last run. It never waits for maintenance, which goes on behind it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from persist_engine import Change, Database, Table, Written, connect


@dataclass(frozen=True)
class Delivery:
    """Pieces of one article that came or went. `number` rises from delivery to delivery."""

    number: int
    article: str
    pieces: int


DELIVERIES = (Delivery(1, "nail", 500), Delivery(2, "screw", 200), Delivery(3, "nail", -120))


def opened(db: Database) -> Table:
    """The table, created with the first run."""
    return db.create("stock", key="article STRING NOT NULL", value="pieces BIGINT", retain="30 days", exist_ok=True)


def book(stock: Table, delivery: Delivery) -> Written:
    """Books a delivery once, however often it is handed in. For one program: two would add to the same count that they read."""
    found = stock.scan([("article", "=", delivery.article)]).to_pylist()
    pieces: int = found[0]["pieces"] if found else 0
    row = {"article": delivery.article, "pieces": pieces + delivery.pieces}
    return stock.upsert([row], txn=("deliveries", delivery.number))


def scarce(stock: Table, least: int) -> list[str]:
    """The articles of which fewer than `least` pieces are left."""
    names: pa.ChunkedArray = stock.scan(f"pieces < {least}", ["article"]).to_arrow().column("article")
    return [str(name) for name in names.to_pylist()]


def in_words(change: Change) -> str:
    """A change in words."""
    before = 0 if change.before is None else change.before["pieces"]
    after = 0 if change.after is None else change.after["pieces"]
    article = (change.after or change.before or {})["article"]
    return f"{article}: {before} -> {after}"


@contextmanager
def folder(arguments: list[str]) -> Iterator[str]:
    """The folder that was named, or one that is removed afterwards."""
    if arguments:
        yield arguments[0]
        return
    with tempfile.TemporaryDirectory() as made:
        yield made


def main() -> None:
    """Books the deliveries twice, which is the same as once, and prints what there is."""
    with folder(sys.argv[1:]) as place, connect(f"file://{place}") as db:
        stock = opened(db)
        before = stock.last_time
        for delivery in (*DELIVERIES, *DELIVERIES):
            book(stock, delivery)
        changes = stock.changes(since="start" if before is None else before)
        sys.stdout.write("".join(f"{in_words(change)}\n" for change in changes))
        sys.stdout.write(f"scarce: {', '.join(scarce(stock, 300))}\n")
        db.drain()


if __name__ == "__main__":
    main()
