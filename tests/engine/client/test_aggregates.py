"""What state proves of the rows of a snapshot equals what a read of the rows gives, and it is proved for a compacted shard of inserts."""

import random
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow.compute as pc
import pytest
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.client.read.snapshot import Snapshot
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from persist_engine.work.repair.force import force_compaction
from persist_kit.depth import draws
from persist_kit.world import World

SCHEMA = Schema.from_ddl(
    "id BIGINT",
    "n SMALLINT, x DOUBLE, f FLOAT, m DECIMAL(9,2), day DATE, at TIMESTAMP, ok BOOLEAN, s STRING, raw BINARY, p STRUCT<a: INT>",
)
NAMES = ["key.id", *(f"val.{name}" for name in SCHEMA.val.names)]
KNOWN = {"key.id", "val.n", "val.m", "val.day", "val.at", "val.ok"}
WHERES = (None, "id < 20", "id >= 0", "n IS NOT NULL", "x > 1", "id < 10 OR n = 2", "id < -5")
at = Antichain.of


def world_of(inline: int, *, listed: bool = False) -> World:
    batch = BatchSettings(inline_part_bytes_max=inline, target_part_bytes=1024, run_parts_max=2 if listed else 1000)
    return World(settings=Settings(batch=batch, compaction=CompactionSettings(claim_ms=0)))


def values(rng: random.Random) -> tuple:
    if rng.random() < 0.1:
        return (None,) * 10
    floats = (0.0, -0.0, 1.5, -2.0, float("nan"), float("inf"), None)
    seconds = rng.randrange(-(10**9), 10**9)
    return (
        rng.choice([None, 1, 2, -3]), rng.choice(floats), rng.choice(floats[:3]), Decimal(rng.randrange(-999, 999)).scaleb(-2),
        date(1970 + rng.randrange(-50, 50), 1, 2), datetime.fromtimestamp(seconds, UTC), rng.choice([None, True, False]),
        rng.choice([None, "", "a", "z" * 70]), rng.choice([None, b"", b"\xff" * 70]), rng.choice([None, {"a": None}, {"a": 3}]),
    )  # fmt: skip


def fill(world: World, rng: random.Random, *, diffs: tuple[int, ...]) -> tuple[object, str, int]:
    """A shard of some appends, which begin and end where times do not. Returns its client, its id and its upper."""
    client, shard = world.process(), world.shard_id()
    client.initialise(shard, SCHEMA)
    upper, rows = 0, []
    with client.open_writer(shard, SCHEMA, purpose="test") as writer:
        for _ in range(rng.randrange(1, 5)):
            following = upper + rng.randrange(1, 4)
            updates = []
            for _ in range(rng.choice([0, 1, 30])):
                again = rows and rng.random() < 0.2
                row = rng.choice(rows) if again else ((rng.choice([None, *range(40)]),), values(rng))
                rows.append(row)
                updates.append((row, rng.randrange(upper, following), rng.choice(diffs)))
            writer.compare_and_append(updates, expected_upper=at(upper), new_upper=at(following))
            upper = following
    return client, shard, upper


def check(snapshot: Snapshot) -> bool:
    """Whether the aggregates are known. Compares them with the rows."""
    found = snapshot.aggregates(NAMES)
    if found is None:
        return False
    rows = snapshot.to_table()
    counts = rows.column("diff")
    assert found.rows == snapshot.count() == (pc.sum(counts).as_py() or 0)
    assert not rows.num_rows or pc.min(counts).as_py() > 0
    for name, field in found.fields.items():
        side, column = name.split(".")
        held = pc.struct_field(rows.column(side), [column])
        if field.nulls is not None:
            assert field.nulls == (pc.sum(pc.filter(counts, pc.is_null(held))).as_py() or 0), name
        bounds = None if name in ("val.p", "val.raw", "val.s") else pc.min_max(held)
        for of, value in (("min", field.least), ("max", field.greatest)):
            if value is None:
                continue
            assert value.type == held.type
            if bounds is None:
                assert not value.is_valid
                assert held.null_count == len(held)
            elif name in ("val.x", "val.f") and of == "max" and value.is_valid:
                assert not pc.any(pc.is_nan(held)).as_py(), "NaN is greater than every number"
                assert repr(value.as_py()) == repr(bounds[of].as_py())
            else:
                assert repr(value.as_py()) == repr(bounds[of].as_py()), name
    assert {
        name for name, field in found.fields.items() if None not in (field.nulls, field.least, field.greatest)
    } >= KNOWN
    return True


@pytest.mark.parametrize("inline", [0, 4096], ids=["in blobs", "in state"])
@pytest.mark.parametrize("diffs", [(1,), (1, 1, 1, 1, -1, 2)], ids=["inserts", "all diffs"])
def test_what_state_proves_is_what_a_read_gives(inline, diffs):
    known = 0
    for seed in range(draws(6)):
        rng = random.Random(seed)
        world = world_of(inline, listed=seed % 3 == 0)
        client, shard, upper = fill(world, rng, diffs=diffs)
        with client.open_leased_reader(shard, purpose="test") as reader:
            for compacted in (False, True):
                if compacted:
                    since = rng.randrange(upper)
                    reader.downgrade_since(at(since))
                    force_compaction(client.machine(shard), full=True)
                for as_of in range(since if compacted else 0, upper):
                    for where in WHERES:
                        with reader.snapshot(as_of, where=where) as snapshot:
                            known += check(snapshot)
    assert known > 8


def test_inserts_are_known_compacted_or_not_and_only_while_each_row_counts_once():
    world = world_of(0)
    client, shard = world.process(), world.shard_id()
    rng = random.Random(0)
    rows = [((n,), values(rng)) for n in range(100)]
    with client.open_writer(shard, SCHEMA, purpose="test") as writer:
        writer.compare_and_append(
            [(row, n % 3, 1) for n, row in enumerate(rows)], expected_upper=at(0), new_upper=at(3)
        )
        writer.compare_and_append([(row, 3, 1) for row in rows[:10]], expected_upper=at(3), new_upper=at(4))
    with client.open_leased_reader(shard, purpose="test") as reader:

        def rows_at(as_of: int, **options) -> int | None:
            with reader.snapshot(as_of, **options) as snapshot:
                found = snapshot.aggregates()
                return None if found is None else found.rows

        assert rows_at(3) == 110
        assert rows_at(2) == 100
        assert rows_at(1) is None, "a part has rows after as_of"
        assert rows_at(3, where="id >= 0") == 110
        assert rows_at(3, where="id < 0") == 0
        assert rows_at(3, where="id < 5") is None, "a part has rows of both kinds"
        force_compaction(client.machine(shard), full=True)
        assert rows_at(3) == 110
        reader.downgrade_since(at(3))
        force_compaction(client.machine(shard), full=True)
        assert rows_at(3) is None, "copies are one row with diff 2"
        with client.open_writer(shard, SCHEMA, purpose="test") as writer:
            writer.compare_and_append([(row, 4, -1) for row in rows[:10]], expected_upper=at(4), new_upper=at(5))
        assert rows_at(4) is None
        reader.downgrade_since(at(4))
        force_compaction(client.machine(shard), full=True)
        assert rows_at(4) == 100
