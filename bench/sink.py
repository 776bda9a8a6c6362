"""Desired minus persisted: the correction buffer against a plain Arrow group_by, and a whole sink against one append."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.dataflow.open import open_sink
from persist_engine.dataflow.sink.spill import ArrowLaws
from persist_engine.flow.correction import BufferPolicy, CorrectionBuffer
from persist_engine.model.frontier import EMPTY

from bench.data import SCHEMA, flat, updates
from bench.measure import Row, median, timings_s

#: The rows of one batch from a reader.
PIECE_ROWS = 65_536


def run(folder: Path, quick: bool) -> list[Row]:
    """Both sides use the same rows. A tenth of the persisted rows differs from the desired ones."""
    rows, repeat = (50_000, 3) if quick else (1_000_000, 5)
    desired = updates(rows, time=0, seed=1)
    persisted = pa.concat_tables(
        [desired.slice(rows // 10), updates(rows // 10, time=0, seed=2, first=rows)]
    ).combine_chunks()
    return [_buffer(desired, persisted, rows, repeat), _sink(folder, desired, rows, repeat)]


def _buffer(desired: pa.Table, persisted: pa.Table, rows: int, repeat: int) -> Row:
    policy = BufferPolicy(memory_bytes=1 << 30)
    expected = 2 * (rows // 10)

    def ours(_: int) -> None:
        buffer = CorrectionBuffer(ArrowLaws(), policy=policy)
        for insert, table in ((buffer.insert, desired), (buffer.insert_negated, persisted)):
            for start in range(0, rows, PIECE_ROWS):
                insert(table.slice(start, PIECE_ROWS))
        assert sum(table.num_rows for table in buffer.updates_before(EMPTY)) == expected

    plain_desired, plain_persisted = flat(desired), flat(persisted)

    def bare(_: int) -> None:
        negated = plain_persisted.set_column(3, "diff", pc.negate(plain_persisted["diff"]))
        both = pa.concat_tables([plain_desired, negated]).group_by(["id", "name"]).aggregate([("diff", "sum")])
        assert both.filter(pc.not_equal(both["diff_sum"], 0)).num_rows == expected

    measured, base = median(timings_s(ours, repeat=repeat)), median(timings_s(bare, repeat=repeat))
    what = f"correct {rows:,} rows against {rows:,}, in pieces and sorted, one core"
    return Row(what, _rate(2 * rows, measured), f"{_rate(2 * rows, base)} by group_by", measured / base, "lower")


def _sink(folder: Path, desired: pa.Table, rows: int, repeat: int) -> Row:
    location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
    with PersistClient.open(location) as client:

        def ours(_: int) -> None:
            with open_sink(client, ShardId.from_bytes(uuid.uuid4().bytes), SCHEMA, workers=2) as sink:
                for start in range(0, rows, PIECE_ROWS):
                    sink.inputs[0].insert(desired.slice(start, PIECE_ROWS))
                for an_input in sink.inputs:
                    an_input.advance(Antichain.of(1))
                assert sink.wait_for_upper(Antichain.of(1), timeout_s=600)

        def bare(_: int) -> None:
            with client.open_writer(ShardId.from_bytes(uuid.uuid4().bytes), SCHEMA, purpose="bench") as writer:
                writer.compare_and_append(desired, expected_upper=Antichain.of(0), new_upper=Antichain.of(1))

        measured, base = median(timings_s(ours, repeat=repeat)), median(timings_s(bare, repeat=repeat))
    what = f"a sink's first {rows:,} rows, two workers (file, sqlite)"
    return Row(what, _rate(rows, measured), f"{_rate(rows, base)} by one append", measured / base, "lower")


def _rate(rows: int, seconds: float) -> str:
    return f"{rows / seconds / 1e6:.2f} M rows/s"
