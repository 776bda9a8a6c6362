"""Every form of the DataFrame API, and several actions of one session, return from a shard what they return from Parquet (see test_queries.py).
In a form the name of a view of twins.VIEWS is its frame.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from query_modes import MODES, in_turn

pytestmark = pytest.mark.spark

FORMS = (
    "rows.where('id < 9').union(rows.where('id > 200'))",
    "rows.where('n = 1').select('id', 'b').unionByName(rows.where('n = 2').select('b', 'x'), allowMissingColumns=True)",
    "rows.where(rows.id < 9).unionAll(rows).where('n = 3')",
    "rows.transform(lambda frame: frame.where('n = 1').union(frame.where('n = 2')))",
    "reduce(DataFrame.union, [rows.where(f'n = {n}') for n in range(7)])",
    "rows.alias('a').join(rows.alias('b'), F.expr('a.id = b.id + 1')).where('a.n = 3 AND b.b').select('a.id', 'b.x')",
    "rows.where('n = 1').join(rows.where('b'), ['id', 'area'], 'left')",
    "rows.where('n = 1').join(rows.where('b').select('id', 'm'), 'id', 'right')",
    "rows.where('n = 1').select('id', 'x').join(rows.where('b').select('id', 'm'), 'id', 'outer')",
    "rows.where('id > 20').join(rows.where('n = 2'), 'id', 'left_semi')",
    "rows.where('id > 20').join(rows.where('n = 2'), 'id', 'left_anti')",
    "rows.where('id < 5').crossJoin(rows.where('id > 215').select('x'))",
    "rows.where('n = 1').alias('a').join(rows.where('b').alias('b'), F.col('a.x').eqNullSafe(F.col('b.x'))).select('a.id', 'b.id')",
    "rows.where('id < 90').join(F.broadcast(rows.where('n = 5')), 'id').select('id')",
    "rows.where('id < 90').join(rows.where('n = 5').hint('merge'), 'id').select('id')",
    "rows.where('id < 90').join(rows.where('n = 5').hint('shuffle_hash'), 'id').select('id')",
    "some.alias('a').join(few.where('x > 1').alias('b'), 'id').select('id', 'b.x').union(early.select('id', 'x').where('n = 1'))",
    "updates.where('diff > 1').select('key.*').join(given.where('n = 1'), ['id', 'area'], 'left_anti')",
    "rows.intersect(rows.where('n = 3'))",
    "rows.where('id < 150').intersectAll(rows.where('n = 3'))",
    "rows.exceptAll(rows.where('n = 3'))",
    "rows.where('id > 20').subtract(rows.where('b'))",
    "rows.where('n = 3').dropDuplicates()",
    "rows.dropDuplicates(['n', 'b']).select('n', 'b').union(rows.where('n = 3').select('n', 'b'))",
    "rows.distinct().where('x > 1')",
    "rows.where('n = 3').mapInArrow(lambda batches: (each for batch in batches for each in (batch, batch)), rows.schema).union(rows.where('n = 4'))",
    "rows.where(F.udf(lambda n: n == 3, 'boolean')('n')).union(rows.where('n = 4'))",
    "rows.groupBy('b').pivot('n', [1, 2, 3]).agg(F.sum('m').alias('m'), F.count('id').alias('c'))",
    "rows.where('id > 20').rollup('n', 'b').agg(F.max('m').alias('m'))",
    "rows.groupBy('n').agg(F.count_distinct('s').alias('s'), F.sum(F.when(F.col('b'), 1)).alias('b'))",
    "rows.select('id', F.explode(F.split('s', ' ')).alias('w')).where(F.col('w') > 'n')",
    "rows.withColumn('r', F.row_number().over(Window.partitionBy('n').orderBy('id', 'area'))).where('r = 1 AND n > 2')",
    "rows.where(F.col('m') > rows.where('n = 5').select(F.avg('m')).scalar()).where('n = 4')",
    "rows.alias('a').where(rows.where('n = 2').where(F.col('id') == F.col('a.id').outer() + 1).exists())",
    "rows.where('n = 1').na.fill({'s': 'none', 'x': -1.0}).union(rows.na.drop(subset=['x', 'n']).where('n = 2'))",
    "rows.sort('id', 'area').limit(9).union(rows.sort(F.desc('id'), 'area').limit(9))",
    "rows.repartition(3, 'n').where('n = 1').union(rows.coalesce(1).where('n = 2'))",
    "rows.where('n < 3').summary('count', 'min', 'max')",
    "spark.sql('SELECT a.id FROM {a} a JOIN {b} b ON a.id = b.id WHERE a.x > :x', {'x': 1}, a=rows.where('n < 4'), b=rows.where('b'))",
    # not frames
    "rows.where('n = 3').rdd.map(lambda row: (row.id, row.x)).collect()",
    "rows.where('n = 3').rdd.union(rows.where('n = 4').rdd).map(tuple).collect()",
    "list(rows.where('n = 3').union(rows.where('n = 4')).toLocalIterator(prefetchPartitions=True))",
    "[rows.where('n = 3').count(), rows.count(), rows.where('n = 4').count(), rows.where('n = 3').count(), rows.count()]",
    "[rows.where('n = 3').isEmpty(), rows.where('n = 99').isEmpty(), rows.isEmpty()]",
    "rows.where('b').sort('id', 'area').take(5) + rows.where('NOT b').sort('id', 'area').take(5)",
    "[rows.where('id = 7').first(), rows.where('id = 8').head(), rows.agg({'id': 'max'}).first()]",
    "[rows.where('n = 3').toArrow().num_rows, rows.where('n = 4').toArrow().num_rows]",
    "rows.where('n = 3').toPandas().sort_values(['id', 'area']).reset_index(drop=True).to_json()",
)  # fmt: skip


def outcome(twins, found: Any) -> Any:
    """The result of a form, in a comparable shape."""
    if isinstance(found, DataFrame):
        return twins.answer_of(found)
    return sorted(map(repr, found)) if isinstance(found, list) else repr(found)


@pytest.mark.parametrize(("form", "mode"), in_turn(FORMS))
def test_a_form_of_the_dataframe_api_returns_the_same_from_a_shard_as_from_parquet(twins, form, mode):
    names = {"F": F, "Window": Window, "DataFrame": DataFrame, "reduce": reduce}
    with twins.conf(MODES[mode]):
        found = {
            side: outcome(twins, eval(form, names | {"spark": twins.spark} | twins.frames(side)))
            for side in ("shard", "parquet")
        }
    assert found["shard"] == found["parquet"]


class Steps:
    """Several actions of one session on the frames `v` of one side. Each method returns the results of its actions."""

    def __init__(self, spark: SparkSession, v: SimpleNamespace, side: str, folder: str) -> None:
        self.spark, self.v, self.side, self.folder = spark, v, side, folder

    def cached_then_filtered_otherwise(self) -> list[Any]:
        held = self.v.rows.where("n < 4").cache()
        try:
            within = held.where("b").collect()
            without = self.v.rows.where("n = 5 AND b").collect()
            same = self.v.rows.where("n < 4").where("x > 1").union(self.v.rows.where("n = 6")).collect()
        finally:
            held.unpersist(blocking=True)
        return [within, without, same, self.v.rows.where("n < 4 AND NOT b").collect()]

    def cached_view_beside_its_frame(self) -> list[Any]:
        self.spark.catalog.cacheTable(f"{self.side}_third")
        try:
            cached = self.v.third.where("n = 2").union(self.v.rows.where("n = 2")).collect()
            joined = self.v.low.join(self.v.rows.where("b"), "id").select("id", "z", "m").collect()
        finally:
            self.spark.catalog.uncacheTable(f"{self.side}_third")
        return [cached, joined, self.v.third.where("n = 3").collect()]

    def whole_frame_cached(self) -> list[Any]:
        held = self.v.rows.cache()
        try:
            return [
                held.where("n = 3").collect(),
                self.v.rows.where("n = 4").collect(),
                self.v.given.where("n = 4").collect(),
            ]
        finally:
            held.unpersist(blocking=True)

    def checkpointed(self) -> list[Any]:
        self.spark.sparkContext.setCheckpointDir(self.folder)
        kept, local = self.v.rows.where("n = 3").checkpoint(), self.v.rows.where("n = 4").localCheckpoint()
        late = self.v.rows.where("n = 5").localCheckpoint(eager=False)
        return [
            kept.union(local).union(late).union(self.v.rows.where("n = 6")).collect(),
            kept.where("b").collect(),
            local.count(),
        ]

    def planned_first_and_run_in_another_order(self) -> list[Any]:
        frames = [self.v.rows.where(f"n = {n}") for n in range(4)] + [self.v.rows]
        for frame in frames:
            frame._jdf.queryExecution().executedPlan()
        return [frame.collect() for frame in reversed(frames)] + [frames[1].collect(), frames[0].count()]

    def queries_of_many_threads(self) -> list[Any]:
        conditions = ["n = 1", "n = 2", "b", "x > 1", "1 = 1"]
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda condition: self.v.rows.where(condition).collect(), conditions))

    def an_iterator_kept_open_during_another_query(self) -> list[Any]:
        rows = self.v.rows.where("n = 3").toLocalIterator()
        first = next(rows)
        between = self.v.rows.where("n = 4").collect()
        return [[first, *rows], between]

    def written_and_read_back(self) -> list[Any]:
        path = f"{self.folder}/{self.side}"
        self.v.rows.where("n = 3").union(self.v.rows.where("n = 4")).write.parquet(path)
        back = self.spark.read.parquet(path)
        return [back.collect(), back.exceptAll(self.v.rows.where("n = 3")).collect()]

    def a_frame_loaded_once_more(self) -> list[Any]:
        """The frame of a view, and frames that were not planned before."""
        self.spark.table(f"{self.side}_rows").createOrReplaceTempView("again")
        try:
            text = "SELECT id FROM again WHERE n = 1 UNION ALL SELECT id FROM again WHERE n = 2 AND id IN (SELECT id FROM again WHERE b)"
            return [self.spark.sql(text).collect(), self.v.rows.where("n = 1").count()]
        finally:
            self.spark.catalog.dropTempView("again")


STEPS = [name for name in vars(Steps) if not name.startswith("_")]


@pytest.mark.parametrize(
    ("steps", "mode"), list(zip(STEPS, itertools.cycle(("push-aqe", "push-static")), strict=False))
)
def test_actions_on_one_frame_do_not_affect_each_other(twins, steps, mode, tmp_path):
    found = {}
    with twins.conf(MODES[mode]):
        for side in ("shard", "parquet"):
            given = Steps(twins.spark, SimpleNamespace(**twins.frames(side)), side, str(tmp_path))
            found[side] = [
                sorted(map(repr, each)) if isinstance(each, list) else each for each in getattr(given, steps)()
            ]
    assert found["shard"] == found["parquet"]
