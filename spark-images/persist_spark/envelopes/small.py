"""The sketch and the corrections of a small Mirror, in the driver's memory. Executors read only the input.

The driver collects the hashes of the input, and reads the shard itself. Both sides then need no Python workers, and the shard's rows are
hashed once. Of the input's rows in differing buckets, the driver collects as many as it expects. If there are more, or longer ones,
or others than the sketch shows, executors make the corrections (`corrected.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from persist_engine.base.settings import MIB
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.columns import flat_columns, struct_column
from persist_spark.envelopes.mirror import hashed
from persist_spark.envelopes.persisted import Persisted
from persist_spark.envelopes.row_hash import can_hash
from persist_spark.envelopes.sketch import (
    BUCKETS_MIN,
    Differing,
    Sums,
    SumUp,
    hashes_of,
    is_differing,
    rows_within,
    selected,
)
from persist_spark.frames import DIFF, HASH, SMALL_BYTES, fields_of, planned_bytes, texts_of
from persist_spark.partitions import NetCounter, StageCorrections, StageTask
from persist_spark.session import planned_once

#: The most rows of a side. The driver keeps 8 bytes of each row of the shard, and gets 8 bytes of each row of the input.
ROWS_MAX = 1 << 21
#: The most bytes of the shard. One core decodes and hashes them in a second or two.
SHARD_BYTES_MAX = 16 * MIB
#: The most bytes of the rows in differing buckets, of each side, in memory. The driver sorts a copy of both, and stages another.
WITHIN_BYTES_MAX = 8 * MIB
#: The most buckets. The driver holds the sums of both sides.
_BUCKETS_MAX = 1 << 21
#: A side that had n rows may have this many times n now, and ROWS_MORE beside them.
_GROWTH, _ROWS_MORE = 2, 1 << 9
#: All partitions together give the driver at most this many times the rows that it takes. One partition may have all of them: a file with
#: one row group has rows in one of its partitions.
_SPREAD = 6
#: The bytes of the texts of the rows that the driver takes, if each row has the same share of them. A row may have more, if it is at most
#: this many times as long as an average row of the shard.
_TEXT_BYTES, _LONGER = 16 * MIB, 4
#: More bytes than one job gives the driver. Spark fails a job that gives more than the user allows.
_RESULT_BYTES = 128 * MIB
_PLACE = "place"


def is_small(desired: DataFrame, schema: Schema) -> bool:
    """Whether the driver may collect the hashes of `desired`, by Spark's estimate of its size, if the shard has few rows too."""
    size_bytes = planned_bytes(desired)
    return (
        size_bytes is not None and size_bytes < SMALL_BYTES and can_hash(schema) and _may_collect(desired.sparkSession)
    )


def _may_collect(spark: SparkSession) -> bool:
    conf = spark.sparkContext._jsc.sc().conf()
    allowed: int = conf.getSizeAsBytes("spark.driver.maxResultSize", "1g")  # 0: as many as there are
    return allowed == 0 or allowed >= _RESULT_BYTES


def partitions_of(frame: DataFrame) -> int:
    """The number of partitions of `frame`, whose plan has no joins. Runs no job."""
    return max(1, int(frame._jdf.queryExecution().toRdd().getNumPartitions()))


def first_rows(frame: DataFrame, most: int, each: int) -> pa.Table | None:
    """The rows of `frame`, which have HASH. Runs one job. None when there are more than `most`, or more than `each` in a partition. However
    many there are, the driver gets at most `each` rows of a partition, and one more. `DataFrame.limit` would run another stage.
    """
    place = F.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
    columns = (f"if({_PLACE} = {each}, null, {HASH}) AS {HASH}" if name == HASH else name for name in frame.columns)
    table = frame.withColumn(_PLACE, place).where(f"{_PLACE} <= {each}").selectExpr(*columns).toArrow()
    return None if table.num_rows > most or table.column(HASH).null_count else table


def collected_sums(hashes: DataFrame, held_rows: int, partitions: int) -> Sums | None:
    """The sums of `hashes` (`sketch.desired_hashes`), added up by the driver. Runs one job. Returns None when the shard has too many rows
    (about `held_rows`), when there are far more hashes, and when there are very many in one of `partitions`.

    There is a bucket for each row. No task returns their sums, so there may be more than in `sketch.buckets_of`, and fewer equal rows share
    a bucket with a changed one.
    """
    if held_rows > ROWS_MAX:
        return None
    most = min(ROWS_MAX, _GROWTH * held_rows + _ROWS_MORE)
    table = first_rows(hashes, most, min(most, _SPREAD * ROWS_MAX // partitions))
    buckets = min(_BUCKETS_MAX, max(BUCKETS_MIN, 1 << held_rows.bit_length()))
    return None if table is None else SumUp(buckets).sums(table.to_batches())


class SmallShard:
    """The contents of a small shard, read in this process. Its only state is the hashes of their rows."""

    def __init__(self, contents: Persisted) -> None:
        self._contents = contents
        self._hashes: list[pa.Array] = []
        self._size_bytes = 0
        """The bytes of the rows in memory."""

    @classmethod
    def of(cls, contents: Persisted) -> SmallShard | None:
        """None when the contents are not small."""
        fits = contents.rows_estimate <= ROWS_MAX and contents.size_bytes <= SHARD_BYTES_MAX
        return cls(contents) if fits and can_hash(contents.schema) and _may_collect(contents.spark) else None

    @property
    def _row_bytes(self) -> float:
        return self._size_bytes / max(1, sum(map(len, self._hashes)))

    def sums(self, buckets: int) -> Sums | None:
        """See `sketch.persisted_sums`. Reads the shard. Keeps 8 bytes of each row."""
        self._hashes, self._size_bytes = [], 0
        return SumUp(buckets).sums(self._hashed())

    def _hashed(self) -> Iterator[pa.RecordBatch]:
        for rows in self._rows():
            hashes = hashes_of(rows)
            self._hashes.append(hashes.column(HASH))
            self._size_bytes += rows.nbytes
            yield hashes

    def corrected(self, desired: DataFrame, found: Differing, task: StageTask) -> list[dict[str, Any]] | None:
        """Stages the corrections of the rows in the differing buckets. Needs the hashes of `sums`, reads the shard again, and runs one job
        over `desired`. Returns rows of STAGED_SCHEMA, whose counts are those of StageCorrections with `is_net`. Returns None, and stages
        nothing, when these rows might need too much memory, and when they are not those of the sums.
        """
        share = len(found.numbers) / found.of
        # Each differing bucket has a changed row of one side, and its share of the others.
        most = int(_GROWTH * share * found.desired.rows) + len(found.numbers) + _ROWS_MORE
        if max(most, share * sum(map(len, self._hashes))) * self._row_bytes > WITHIN_BYTES_MAX:
            return None
        theirs = self._within(found)
        ours = None if theirs is None else self._desired(desired, found, most)
        if theirs is None or ours is None:
            return None
        both = pa.Table.from_batches([*ours, *theirs])
        counter = NetCounter()
        for batch in both.to_batches():
            counter.counted(batch)
        if (counter.rows, *counter.sums) != found.net:
            return None
        rows: list[dict[str, Any]] = [
            row
            for out in StageCorrections(task, is_net=True)(iter(both.sort_by(HASH).to_batches()))
            for row in out.to_pylist()
        ]
        return rows

    def _rows(self) -> Generator[pa.RecordBatch, None, None]:
        parts = self._contents.parts
        yield from parts(iter([pa.record_batch({"id": pa.array(range(len(parts.groups)), pa.int64())})]))

    def _within(self, found: Differing) -> list[pa.RecordBatch] | None:
        """The rows of the shard, flat, with the negated DIFF and with HASH. None when they are longer than the average row, and so exceed
        WITHIN_BYTES_MAX.
        """
        differs, within, size_bytes = is_differing(found), [], 0
        with closing(self._rows()) as read:
            for rows, hashes in zip(read, self._hashes, strict=True):
                # The parts yield the same rows in the same order each time. New hashes of these few rows let the net sums prove it.
                chosen = selected(rows, hashes, differs)
                within.append(chosen.append_column(HASH, hashes_of(chosen).column(HASH)))
                size_bytes += within[-1].nbytes
                if size_bytes > WITHIN_BYTES_MAX:
                    return None
        return within

    def _desired(self, desired: DataFrame, found: Differing, most: int) -> Sequence[pa.RecordBatch] | None:
        """The rows of the input, as those of `_within`. None when there are more than `most`, or very many in one partition.
        Leaves out rows with long texts.
        """
        schema = self._contents.schema
        fields = fields_of(schema)
        texts = [f"coalesce(octet_length({text}), 0)" for f in fields for text in texts_of(f.column, f.type)]
        # SUBTLE: Arrow's cast in `toArrow` refuses a null struct whose fields are NOT NULL.
        columns = [
            F.col(f.column).cast(f.type._as_nullable()).alias(f.column)
            if isinstance(f.type, T.StructType)
            else f.column
            for f in fields
        ]
        rows = hashed(desired.select(*columns), schema)
        if texts:
            longest = max(_TEXT_BYTES // most, int(_LONGER * self._row_bytes))
            rows = rows.where(f"{' + '.join(texts)} <= {longest}")
        each = min(most, _SPREAD * most // partitions_of(desired))
        with planned_once(desired.sparkSession):
            found_rows = first_rows(rows_within(rows, found), most, each)
        if found_rows is None:
            return None
        key, val = struct_column(found_rows, "k", schema.key_type), struct_column(found_rows, "v", schema.val_type)
        flat = flat_columns(key, val)
        flat[DIFF] = pa.repeat(pa.scalar(1, pa.int64()), found_rows.num_rows)
        flat[HASH] = found_rows.column(HASH).combine_chunks()
        return [pa.RecordBatch.from_pydict(flat)]
