"""A table under an event loop: tasks that share it, that are cancelled at any moment, and that follow it. Nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import doctest
import random
from pathlib import Path

import pytest
from persist_engine import Database, Table
from persist_engine.base.errors import PersistError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "async.md"
WRITES = 24
PATIENCE_S = 120


@pytest.fixture
def notes(db: Database) -> Table:
    return db.create("notes", key="id BIGINT", value="text STRING")


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert "file:///tmp/shop" in text
    page = doctest.DocTestParser().get_doctest(
        text.replace("file:///tmp/shop", f"file://{tmp_path}"), {}, "page", None, 0
    )
    report: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(page, out=report.append, clear_globs=False)
    page.globs["db"].close()
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("seed", range(3))
def test_writes_that_are_cancelled_and_repeated_happen_once(notes: Table, seed: int) -> None:
    """Each is cancelled at a moment of its own, or never, and then repeated until one call returns."""
    rng = random.Random(seed)
    heard: list[bool] = []
    heard_of_first: list[bool] = []

    async def write(number: int) -> None:
        rows, txn = [{"id": number, "text": f"t{number}"}], (f"app{number}", 1)
        call = notes.append if number % 2 else notes.upsert
        while True:
            task = asyncio.create_task(asyncio.to_thread(call, rows, txn=txn))
            if number == 0 and not heard_of_first:  # the answer to this one is lost for sure, and its write is not
                while not await asyncio.to_thread(notes.scan("id = 0").count):
                    pass
                heard_of_first.append(task.cancel())
                continue
            done, _ = await asyncio.wait([task], timeout=rng.choice([0, 0.001, 0.02, None]))
            if done:
                heard.append((await task).is_repeat)
                return
            task.cancel()
            await asyncio.wait([task])

    async def main() -> None:
        await asyncio.gather(*(write(number) for number in range(WRITES)))

    run(main())
    assert notes.to_pylist() == [{"id": number, "text": f"t{number}"} for number in range(WRITES)]
    assert len(heard) == WRITES
    assert any(heard), "a write was repeated after it had committed"
    assert not notes.verify().is_corrupt


def test_a_reader_that_is_cancelled_holds_nothing(notes: Table) -> None:
    """Its thread ends with the call, and the table goes on."""
    notes.append([{"id": number, "text": "x"} for number in range(1000)])

    async def main() -> None:
        tasks = [asyncio.create_task(asyncio.to_thread(notes.to_arrow)) for _ in range(8)]
        await asyncio.sleep(0.005)
        for task in tasks[::2]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each.num_rows for each in ended[1::2]] == [1000] * 4
        await asyncio.to_thread(notes.delete, "id >= 10")

    run(main())
    notes.close()
    assert notes.count() == 10
    notes.close()
    assert set(notes.holds().column("kind").to_pylist()) <= {"retention", "writer"}


def test_a_follower_that_is_cancelled_goes_on_where_it_was(notes: Table) -> None:
    """Beside a writer. Every change is handled, whenever the follower is cancelled; what it had handled does not come again."""
    handled: list[int] = []
    since: list[int | str] = ["start"]

    async def follow() -> None:
        feed = notes.changes(since[-1], follow=True)
        batches = feed.to_batches()
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                handled.extend(batch.column("id").to_pylist())
                since.append(batch.column("_time")[-1].as_py())
        finally:
            feed.close()

    async def main() -> None:
        async def write() -> None:
            for number in range(WRITES):
                await asyncio.to_thread(notes.append, [{"id": number, "text": "x"}])

        writer, patience_s = asyncio.create_task(write()), 0.3
        while len(handled) < WRITES:
            follower = asyncio.create_task(follow())
            await asyncio.wait([follower], timeout=patience_s)
            patience_s *= 1.5  # on a busy machine the first followers may not get as far as a batch
            follower.cancel()
            done = await asyncio.gather(follower, return_exceptions=True)
            assert not isinstance(done[0], PersistError), done
        await writer

    run(main())
    assert handled == list(range(WRITES))
    assert set(notes.holds().column("kind").to_pylist()) <= {"retention", "writer"}
