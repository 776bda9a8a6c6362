"""Every query over `spark.read.format("persist")` returns the rows that it returns over Parquet.

One collection is in a shard and in Parquet (twins.py). Queries written by hand run on both in one session. Schemas must be equal, and
rows as multisets of exact values. Most queries scan one frame several times under different filters, because there Spark once mixed up
the pushed filters of the scans (docs/upstream). Queries take turns in settings with filter pushdown to Python sources and adaptive
execution on and off (query_modes.py). Those most likely to mix up scans run under three of the four combinations, one of them with compiled
code.

In a query `{name}` is a view of twins.VIEWS.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from query_modes import MODES, STATIC, in_turn, named

pytestmark = pytest.mark.spark


#: The modes of a query that may mix up scans. Filters are pushed in two of them, and in the third one Spark keeps them.
MIXING_MODES = (("push-compiled", "push-static", "keep-aqe"), ("push-compiled", "push-static", "keep-static"))

#: Scans of one frame under different filters, side by side and in subqueries.
MIXING = (
    # unions
    "SELECT id, x FROM {rows} WHERE id < 9 UNION ALL SELECT id, x FROM {rows} WHERE id > 200",
    "SELECT * FROM {rows} WHERE n = 1 UNION ALL SELECT * FROM {rows}",
    "SELECT count(*) AS c FROM {rows} WHERE n = 1 UNION ALL SELECT count(*) FROM {rows} UNION ALL "
    "SELECT count(*) FROM {rows} WHERE n = 99",
    # joins
    "SELECT a.id, a.x, b.s FROM {rows} a JOIN {rows} b ON a.id = b.id + 1 WHERE a.n = 3 AND b.b",
    "SELECT a.id, b.id AS other FROM (SELECT * FROM {rows} WHERE n = 3) a FULL JOIN (SELECT * FROM {rows} WHERE b) b "
    "ON a.id = b.id",
    "SELECT * FROM {rows} a LEFT ANTI JOIN {rows} b ON a.id = b.id AND b.x > 1",
    # subqueries
    "SELECT id, s FROM {rows} WHERE id < 150 AND id IN (SELECT id FROM {rows} WHERE id >= 100 AND n = 3)",
    "SELECT id, area FROM {rows} a WHERE NOT EXISTS (SELECT 1 FROM {rows} b WHERE b.id = a.id + 1 AND b.n = 2)",
    "SELECT id, m FROM {rows} WHERE n = 4 AND m > (SELECT avg(m) FROM {rows} WHERE n = 5)",
    # a name used more than once
    "WITH c AS (SELECT * FROM {rows} WHERE id > 50) SELECT a.id, b.n FROM c a JOIN c b ON a.id = b.id - 2 WHERE a.b AND b.n > 2",
    "SELECT a.id, a.other, b.z FROM {pairs} a LEFT JOIN {low} b ON a.id = b.id AND b.n = 3",
    # loads with and without options
    "SELECT a.id, b.id AS other FROM {some} a RIGHT JOIN {rows} b ON a.id = b.id AND a.n = 2 WHERE b.n IN (2, 3)",
)  # fmt: skip

QUERIES = (
    # unions and other set operations
    "SELECT id FROM {rows} WHERE n = 1 UNION SELECT id FROM {rows} WHERE n = 2",
    "SELECT * FROM {rows} WHERE x IS NULL UNION ALL SELECT * FROM {rows} WHERE x > 12 UNION ALL SELECT * FROM {rows} WHERE isnan(x)",
    "SELECT n, b FROM {rows} WHERE id < 120 INTERSECT SELECT n, b FROM {rows} WHERE id > 110",
    "SELECT n, b FROM {rows} WHERE id < 120 INTERSECT ALL SELECT n, b FROM {rows} WHERE id > 60",
    "SELECT n, b, x FROM {rows} EXCEPT SELECT n, b, x FROM {rows} WHERE id < 100",
    "SELECT n, b FROM {rows} EXCEPT ALL SELECT n, b FROM {rows} WHERE b",
    "SELECT x FROM {rows} WHERE id < 30 MINUS SELECT -x FROM {rows} WHERE id < 30",
    "(SELECT id FROM {rows} WHERE n = 1 UNION ALL SELECT id FROM {rows} WHERE n = 2) EXCEPT ALL "
    "(SELECT id FROM {rows} WHERE b INTERSECT SELECT id FROM {rows} WHERE n < 3)",
    "SELECT 'a' AS q, p FROM {rows} WHERE p.x = 7 UNION ALL SELECT 'b', p FROM {rows} WHERE p IS NULL",
    # joins
    "SELECT a.id, b.area FROM {rows} a LEFT JOIN {rows} b ON a.id = b.id AND b.n = 2 WHERE a.n IN (2, 3)",
    "SELECT a.id, b.area FROM (SELECT * FROM {rows} WHERE n = 2) a RIGHT JOIN (SELECT * FROM {rows} WHERE b) b ON a.id = b.id",
    "SELECT * FROM {rows} a LEFT SEMI JOIN {rows} b ON a.id = b.id + 1 AND b.n = 2",
    "SELECT a.id, b.id AS other FROM {rows} a CROSS JOIN {rows} b WHERE a.id < 5 AND b.id > 215",
    "SELECT a.id, b.id AS other, a.area FROM {rows} a JOIN {rows} b ON a.area <=> b.area AND a.x <=> b.x WHERE a.id < 20 AND b.n = 3",
    "SELECT a.id, b.id AS other FROM {rows} a JOIN {rows} b ON a.x = b.x AND a.id < b.id WHERE a.id < 15 AND b.id < 40",
    "SELECT a.id, b.id AS other FROM {rows} a JOIN {rows} b ON a.m < b.m AND a.d = b.d WHERE a.n = 1 AND b.n = 2",
    "SELECT id, count(*) AS c FROM {rows} JOIN {rows} USING (id, area) GROUP BY id",
    "SELECT a.id, b.id AS second, c.id AS third FROM {rows} a JOIN {rows} b ON a.id = b.id - 1 JOIN {rows} c ON b.id = c.id - 1 "
    "WHERE a.n = 0 AND b.b IS NOT NULL AND c.x > 0",
    "SELECT /*+ BROADCAST(b) */ a.id, b.s FROM {rows} a JOIN {rows} b ON a.id = b.id WHERE a.id < 90 AND b.n = 5",
    "SELECT /*+ MERGE(b) */ a.id, b.s FROM {rows} a JOIN {rows} b ON a.id = b.id WHERE a.id < 90 AND b.n = 5",
    "SELECT /*+ SHUFFLE_HASH(b) */ a.id, b.s FROM {rows} a LEFT JOIN {rows} b ON a.id = b.id AND b.n = 5 WHERE a.id < 90",
    "SELECT /*+ SHUFFLE_REPLICATE_NL(b) */ a.id, b.id AS other FROM {rows} a JOIN {rows} b WHERE a.id < 5 AND b.n = 5 AND b.id < 50",
    "SELECT /*+ BROADCAST(b) */ a.id, b.id AS other FROM (SELECT * FROM {rows} WHERE n = 3) a FULL JOIN "
    "(SELECT * FROM {rows} WHERE n = 4) b ON a.id = b.id - 1",
    "SELECT a.id, l.top FROM {rows} a, LATERAL (SELECT max(b.id) AS top FROM {rows} b WHERE b.n = a.n AND b.id < a.id) l WHERE a.b",
    "SELECT a.id, l.id AS other FROM {rows} a LEFT JOIN LATERAL (SELECT b.id FROM {rows} b WHERE b.id = a.id * 2 AND b.b) l WHERE a.n = 1",
    # subqueries
    "SELECT id FROM {rows} WHERE n NOT IN (SELECT n FROM {rows} WHERE id < 5)",
    "SELECT id FROM {rows} WHERE n NOT IN (SELECT n FROM {rows} WHERE id BETWEEN 5 AND 12)",
    "SELECT id FROM {rows} WHERE (n, b) IN (SELECT n, b FROM {rows} WHERE x = 12) OR id = 7",
    "SELECT id FROM {rows} a WHERE EXISTS (SELECT 1 FROM {rows} b WHERE b.id = a.id - 1 AND b.x IS NULL) AND a.n <> 2",
    "SELECT id FROM {rows} a WHERE EXISTS (SELECT 1 FROM {rows} WHERE id = 999) OR a.n = 2",
    "SELECT id, (SELECT max(m) FROM {rows} b WHERE b.n = a.n AND b.b) AS most FROM {rows} a WHERE a.id < 40",
    "SELECT id, (SELECT count(*) FROM {rows} WHERE n = 3) - (SELECT count(*) FROM {rows} WHERE n = 4) AS c FROM {rows} WHERE n = 5",
    "SELECT id FROM {rows} a WHERE m = (SELECT min(m) FROM {rows} b WHERE b.area <=> a.area AND b.n = 2)",
    "SELECT n, count(*) AS c FROM {rows} GROUP BY n HAVING count(*) > (SELECT count(*) FROM {rows} WHERE n = 6)",
    "SELECT id FROM {rows} WHERE d = (SELECT max(d) FROM {rows} WHERE n = 1) OR t = (SELECT min(t) FROM {rows} WHERE b)",
    "SELECT id FROM {rows} WHERE id IN (SELECT id FROM {rows} WHERE id IN (SELECT id FROM {rows} WHERE n = 1) AND b) AND id > 20",
    "SELECT CASE WHEN id IN (SELECT id FROM {rows} WHERE n = 1) THEN 'one' ELSE 'none' END AS k, id FROM {rows} WHERE b",
    # common table expressions and views
    "WITH a AS (SELECT * FROM {rows} WHERE n = 1), b AS (SELECT * FROM a WHERE b) SELECT id, 1 AS q FROM a UNION ALL SELECT id, 2 FROM b",
    "WITH c AS (SELECT n, sum(m) AS total FROM {rows} WHERE id > 9 GROUP BY n) SELECT * FROM c WHERE total > (SELECT avg(total) FROM c)",
    "WITH c AS (SELECT * FROM {rows} WHERE b), d AS (SELECT * FROM {rows} WHERE NOT b) "
    "SELECT n, count(*) AS c FROM (SELECT * FROM c UNION ALL SELECT * FROM d UNION ALL SELECT * FROM c WHERE n = 1) GROUP BY n",
    "WITH RECURSIVE r(id, depth) AS (SELECT id, 0 FROM {rows} WHERE id = 2 UNION ALL "
    "SELECT b.id, depth + 1 FROM r JOIN {rows} b ON b.id = r.id * 2 WHERE depth < 2) SELECT * FROM r",
    "SELECT * FROM {low} WHERE n = 2 UNION ALL SELECT * FROM {low} WHERE z = 0.5",
    "SELECT a.id FROM {third} a JOIN {low} b ON a.id = b.id WHERE a.n = 1 OR b.x > 3",
    "SELECT * FROM {third} WHERE id NOT IN (SELECT id FROM {low} WHERE x > 1)",
    # loads of one shard with other options, joined with each other
    "SELECT a.id, b.x FROM {some} a JOIN {few} b ON a.id = b.id WHERE b.x > 0",
    "SELECT id, 'now' AS k FROM {rows} WHERE n = 3 UNION ALL SELECT id, 'then' FROM {early} WHERE n = 3",
    "SELECT * FROM {early} EXCEPT ALL SELECT * FROM {rows}",
    "SELECT * FROM {rows} EXCEPT ALL SELECT * FROM {early}",
    "SELECT u.key.id, u.diff, r.s FROM {updates} u LEFT JOIN {rows} r ON u.key.id = r.id AND u.key.area <=> r.area WHERE u.diff > 1",
    "SELECT key.area, sum(diff) AS c, max(time) AS at FROM {updates} WHERE val.b GROUP BY key.area",
    "SELECT a.key.id FROM {updates} a JOIN {updates} b ON a.key.id = b.key.id AND a.key.area <> b.key.area WHERE a.val.n = 1",
    "SELECT id, s FROM {few} WHERE s LIKE 'n%' UNION ALL SELECT id, s FROM {some} WHERE s = 'z' UNION ALL SELECT id, s FROM {given} WHERE id < 3",
    "SELECT count(*) AS c FROM {some} WHERE id NOT IN (SELECT id FROM {some} WHERE n = 1)",
    "SELECT a.id, b.n FROM {given} a JOIN {given} b ON a.id = b.id WHERE a.n < 3 AND b.b",
    "SELECT (SELECT sum(diff) FROM {updates}) AS diffs, (SELECT count(*) FROM {rows}) AS c, (SELECT count(*) FROM {few} WHERE x > 1) AS f",
    # aggregates
    "SELECT count(*) AS c, count(n) AS n, count(DISTINCT n) AS d, sum(n) AS s, min(s) AS l, max(s) AS g, avg(m) AS a FROM {rows}",
    "SELECT n, b, count(*) AS c, sum(m) AS m FROM {rows} WHERE id > 3 GROUP BY n, b",
    "SELECT x, count(*) AS c FROM {rows} GROUP BY x",
    "SELECT p.x, p.q.z, count(*) AS c FROM {rows} GROUP BY p.x, p.q.z",
    "SELECT n, b, count(*) AS c FROM {rows} GROUP BY ROLLUP (n, b)",
    "SELECT n, b, max(d) AS d FROM {rows} WHERE n < 3 GROUP BY CUBE (n, b)",
    "SELECT n, area, b, count(*) AS c, grouping_id() AS g FROM {rows} GROUP BY GROUPING SETS ((n, b), (area), ())",
    "SELECT n, count(*) FILTER (WHERE b) AS t, count(*) FILTER (WHERE x > 1) AS m, sum(m) FILTER (WHERE NOT b) AS f FROM {rows} GROUP BY n",
    "SELECT area, count(DISTINCT n) AS c, count(DISTINCT s, b) AS d, sum(DISTINCT n) AS s FROM {rows} GROUP BY area HAVING count(DISTINCT n) > 2",
    "SELECT DISTINCT x, b FROM {rows} WHERE n < 5",
    "SELECT DISTINCT p FROM {rows} WHERE n = 2",
    "SELECT sort_array(collect_set(s)) AS s, sort_array(collect_list(id)) AS ids FROM {rows} WHERE n = 4 GROUP BY b",
    "SELECT bool_and(b) AS a, bool_or(b) AS o, min_by(s, id) AS l, max_by(s, id) AS g FROM {rows} WHERE area = 'north' GROUP BY n",
    "SELECT * FROM (SELECT n, b, m FROM {rows} WHERE id < 180) PIVOT (sum(m) AS m, count(*) AS c FOR b IN (true AS yes, false AS no))",
    "SELECT * FROM (SELECT id, area, n, CAST(b AS INT) AS b FROM {rows} WHERE id < 40) UNPIVOT INCLUDE NULLS (v FOR k IN (n, b))",
    # windows
    "SELECT id, area, row_number() OVER (PARTITION BY n ORDER BY id, area) AS r FROM {rows} WHERE n < 4",
    "SELECT id, rank() OVER (ORDER BY x) AS r, dense_rank() OVER (ORDER BY x DESC NULLS LAST) AS d FROM {rows} WHERE id > 60",
    "SELECT id, area, lag(m) OVER w AS before, lead(m, 2) OVER w AS after FROM (SELECT DISTINCT * FROM {rows} WHERE b) "
    "WINDOW w AS (PARTITION BY area ORDER BY id)",
    "SELECT id, sum(m) OVER (PARTITION BY n ORDER BY id RANGE BETWEEN 20 PRECEDING AND CURRENT ROW) AS s FROM {rows} WHERE n IN (1, 2)",
    "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY n ORDER BY id DESC, area) AS r FROM {rows}) WHERE r <= 2 AND n > 3",
    # generators, and one row among many
    "SELECT id, word FROM {rows} LATERAL VIEW explode(split(s, '[ ]')) AS word WHERE n = 3",
    "SELECT id, v.pos, v.col FROM {rows}, LATERAL posexplode(array(n, id, null)) v WHERE b AND v.col > 2",
    "SELECT id, word FROM {rows} LATERAL VIEW OUTER explode(split(s, ' ')) AS word WHERE word IS NULL OR word LIKE 'c%'",
    "SELECT inline(array(p, p)) FROM {rows} WHERE n = 1",
    # expressions over the row
    "SELECT id, -x AS x, x * 0 AS zero, p.q.z * -1 AS z, m * 2 AS m, m / 3 AS third FROM {rows} WHERE n = 1",
    "SELECT * EXCEPT (p, m), upper(s) AS u FROM {rows} WHERE s IS NOT NULL AND n = 1",
    "SELECT date_trunc('HOUR', t) AS h, w + INTERVAL 1 DAY AS w, d + 1 AS d, count(*) AS c FROM {rows} WHERE n = 2 GROUP BY ALL",
    "FROM {rows} |> WHERE n = 3 |> AGGREGATE count(*) AS c GROUP BY b |> UNION ALL (FROM {rows} |> WHERE n = 4 |> AGGREGATE count(*) AS c GROUP BY b)",
)  # fmt: skip

#: Queries whose rows have one possible order, apart from copies of a row.
ORDERED = (
    "SELECT * FROM {rows} WHERE n = 3 ORDER BY id, area",
    "SELECT id, area, x FROM {rows} ORDER BY x DESC NULLS FIRST, id, area LIMIT 60",
    "SELECT id, area FROM {rows} WHERE b ORDER BY s, id DESC, area LIMIT 20 OFFSET 15",
    "SELECT * FROM (SELECT id, area FROM {rows} WHERE n = 1 ORDER BY id, area LIMIT 5) UNION ALL "
    "(SELECT id, area FROM {rows} WHERE n = 2 ORDER BY id DESC, area LIMIT 5) ORDER BY id, area",
    "SELECT n, count(*) AS c FROM {rows} WHERE x > 0 GROUP BY n ORDER BY c DESC, n LIMIT 3",
    "SELECT id FROM {rows} WHERE id > (SELECT id FROM {rows} WHERE n = 5 ORDER BY id, area LIMIT 1) ORDER BY id LIMIT 7",
)  # fmt: skip


@pytest.fixture(scope="module")
def parquet_answers() -> dict[str, Any]:
    """The answers over Parquet by query. Each query runs on Parquet once."""
    return {}


def check(twins, answers: dict[str, Any], query: str, settings: dict[str, str], *, ordered: bool = False) -> None:
    if query not in answers:
        with twins.conf(STATIC):
            answers[query] = twins.answer_of(twins.sql(query, "parquet"), ordered=ordered)
    with twins.conf(settings):
        found = twins.answer_of(twins.sql(query, "shard"), ordered=ordered)
    assert found == answers[query]


@pytest.mark.parametrize(
    ("query", "mode"),
    [named(query, mode) for query, modes in zip(MIXING, itertools.cycle(MIXING_MODES), strict=False) for mode in modes],
)
def test_each_scan_of_a_frame_gets_its_own_filters(twins, parquet_answers, query, mode):
    check(twins, parquet_answers, query, MODES[mode])


@pytest.mark.parametrize("query", MIXING[::2])
def test_a_session_over_connect_returns_the_same_rows(connect_twins, parquet_answers, query):
    check(connect_twins, parquet_answers, query, MODES["push-static"])


@pytest.mark.parametrize(("query", "mode"), in_turn(QUERIES))
def test_a_query_returns_the_same_rows_from_a_shard_as_from_parquet(twins, parquet_answers, query, mode):
    check(twins, parquet_answers, query, MODES[mode])


@pytest.mark.parametrize(("query", "mode"), in_turn(ORDERED))
def test_an_ordered_query_returns_rows_in_order(twins, parquet_answers, query, mode):
    check(twins, parquet_answers, query, MODES[mode], ordered=True)


#: Every form of filter that Spark can push to a source, and many that it cannot.
FILTERS = (
    "id = 7", "id = 3", "id <=> 7", "NOT id = 7", "id <> 7", "id < 20", "id <= 20", "id > 200", "id >= 200", "id = -1",
    "id BETWEEN 30 AND 45", "id NOT BETWEEN 10 AND 210", "id IN (3, 5, 999)", "id NOT IN (3, 5)", "id = 7.5D", "id < 10.5",
    "area = 'öst'", "area = ''", "area <=> NULL", "NOT area <=> 'north'", "area IS NULL", "area IN ('north', '')",
    "n = 1", "n IN (1, NULL)", "n NOT IN (1, 2)", "n NOT IN (1, NULL)", "n IS NULL", "n IS NOT NULL", "n > NULL",
    "n = 1.0D", "n = '3'", "n IN (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)",
    "p IS NULL", "p IS NOT NULL", "p.q IS NULL", "p.q.z IS NOT NULL", "p.x = 7", "p.x > 20 AND p.s = 'o''hara'", "p.x IN (1, 2)",
    "p.q.z = 0.5", "p.q.z = -0.0D", "p.q.z <=> NULL", "NOT p.x <=> 7", "isnan(p.q.z)", "p.s LIKE '%本%'",
    "p = named_struct('x', 1, 's', '', 'q', named_struct('z', 0.5D))",
    "x = double('NaN')", "x <=> double('NaN')", "isnan(x)", "x <> double('NaN')", "x > 1e300D", "x >= double('Infinity')",
    "x < double('-Infinity')", "x = 0.0D", "x = -0.0D", "x >= -0.0D", "x < -0.0D", "x <> 0", "x IN (double('NaN'), 1.5D, -0.0D)",
    "NOT x > 1", "x <=> NULL", "x BETWEEN -3 AND 1.5", "x = 12",
    "m = 7.37", "m < -1", "m >= 0.00", "m IN (7.00, -30.00)", "m = 7.370", "m > 7.369999", "m <=> -30", "NOT m < 0", "m = 1e3D",
    "d = DATE '2013-01-10'", "d >= '2013-02-01'", "d < DATE '2013-01-05' OR d IS NULL", "d IN (DATE '2013-01-01', DATE '2099-01-01')",
    "t < TIMESTAMP '2013-01-01 00:00:00Z'", "t >= TIMESTAMP '2013-01-01 10:47:00.000002Z'", "t = TIMESTAMP '2013-01-01 10:40:00.000001Z'",
    "t > '2013-01-01 12:00:00+02:00'", "w > TIMESTAMP_NTZ '2013-01-01 10:00:00'", "w = TIMESTAMP_NTZ '2013-01-01 10:40:00.000001'",
    "date(t) = DATE '2012-12-31'", "w < DATE '2013-01-01'", "year(d) = 2013 AND month(d) = 1",
    "b", "NOT b", "b = false", "b IS NULL", "b <=> true", "NOT b <=> true", "b IN (true)", "b > false", "b IS NOT TRUE", "b OR n = 1",
    "s = 'o''hara'", "s = 'say \"hi\"'", "s = 'c:\\\\d'", "s = ''", "s = '𝄞 clef'", "s = 'NULL'", "s > 'n'", "s >= '日'", "s < ''",
    "s LIKE 'o%'", "s LIKE '%a'", "s LIKE '%本%'", "s LIKE 'a\\\\_b'", "s LIKE '100\\\\%'", "s NOT LIKE '%e%'", "s LIKE '_'", "s LIKE ''",
    "s LIKE ANY ('z%', '%\\'%')", "s ILIKE 'z%'", "s RLIKE '^[a-z]+$'", "startswith(s, 'na')", "endswith(s, '\"')", "contains(s, '\\'')",
    "NOT startswith(s, 'z')", "s IN ('z', 'Zoë', NULL)", "s <=> 'naïve'", "length(s) > 4", "substring(s, 1, 2) = 'na'",
    "n = 1 OR n = 3", "n = 1 OR (n = 3 AND b)", "NOT (n = 1 OR x > 1)", "NOT (n = 1 AND x > 1)", "n = 1 AND n = 2", "id = 7 AND id = 7",
    "(n = 1 OR b) AND (n = 1 OR id < 50)", "n = 1 AND s IS NOT NULL AND x >= 0 AND p.x < 40 AND area = 'north'",
    "id % 7 = 3", "n + 1 = 4", "n = p.x", "n = id", "n < p.x AND id > 30", "CAST(n AS STRING) = '3'", "coalesce(n, 0) = 0",
    "if(b, n, id) > 3", "CASE WHEN b THEN n = 1 ELSE n = 2 END", "1 = 1", "1 = 0", "CAST(NULL AS BOOLEAN)", "n = 1 IS NULL", "hash(n) % 2 = 0", "NULLIF(n, 3) IS NULL",
)  # fmt: skip
FILTERS_AT_ONCE = 16


def filtering(side_by_side: tuple[str, ...]) -> str:
    """One query with a scan for each of the filters, tagged with the filter's number."""
    scans = (f"SELECT {n} AS q, id, area FROM {{whole}} WHERE {filter_}" for n, filter_ in enumerate(side_by_side))
    return " UNION ALL ".join(scans)


@pytest.fixture(scope="module")
def filtered(twins) -> dict[str, dict[str, list[str]]]:
    """The rows of each filter by side. On the shard, one query runs many filters, as scans of one frame. On Parquet each filter is a
    column of one scan.
    """
    answers: dict[str, dict[str, list[str]]] = {filter_: {"shard": [], "parquet": []} for filter_ in FILTERS}
    with twins.conf(MODES["push-static"]):
        for group in (FILTERS[at : at + FILTERS_AT_ONCE] for at in range(0, len(FILTERS), FILTERS_AT_ONCE)):
            for q, *columns in twins.sql(filtering(group), "shard").collect():
                answers[group[q]]["shard"].append(repr(columns))
        truths = ", ".join(f"({filter_})" for filter_ in FILTERS)
        for *columns, passed in twins.sql(f"SELECT id, area, array({truths}) FROM {{whole}}", "parquet").collect():
            for filter_ in itertools.compress(FILTERS, passed):
                answers[filter_]["parquet"].append(repr(columns))
    return answers


@pytest.mark.parametrize("condition", [pytest.param(condition, id=condition) for condition in FILTERS])
def test_a_filter_passes_the_same_rows_of_a_shard_as_of_parquet(filtered, condition):
    assert sorted(filtered[condition]["shard"]) == sorted(filtered[condition]["parquet"])


#: Settings under which Spark derives filters from the other side of a join while the query runs.
RUNTIME = {
    "spark.sql.defaultSizeInBytes": "100000",  # the size that Spark assumes for a Python source
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.optimizer.dynamicPartitionPruning.reuseBroadcastOnly": "false",
    "spark.sql.optimizer.runtime.bloomFilter.applicationSideScanSizeThreshold": "0",
}
PRUNED = (
    "SELECT f.id, f.m FROM facts f JOIN {rows} r ON f.n = r.n AND f.id = r.id WHERE r.b AND r.id < 60",
    "SELECT f.n, count(*) AS c FROM facts f JOIN {rows} r ON f.n = r.n WHERE r.s = 'z' GROUP BY f.n",
    "SELECT f.id, r.s FROM facts f JOIN {rows} r ON f.n = r.n AND f.id = r.id WHERE r.x > 12 UNION ALL "
    "SELECT f.id, r.s FROM facts f JOIN {rows} r ON f.n = r.n AND f.id = r.id WHERE r.x < 1",
    "SELECT f.id FROM facts f LEFT SEMI JOIN {rows} r ON f.n = r.n AND r.area = 'north' AND r.n > 4",
)
BLOOMING = (
    "SELECT a.id, a.s FROM {rows} a JOIN {rows} b ON a.id = b.id WHERE b.n = 3 AND b.s > 'a'",
    "SELECT a.id FROM {rows} a LEFT SEMI JOIN {rows} b ON a.id = b.id AND b.n = 3 AND b.x > 1 WHERE a.n < 5",
    "SELECT a.id, count(*) AS c FROM {rows} a JOIN {few} b ON a.id = b.id WHERE b.s = 'z' GROUP BY a.id",
)


@pytest.fixture(scope="module")
def facts(twins, tmp_path_factory) -> None:
    """A partitioned table beside both sides, for joins that prune its partitions."""
    folder = str(tmp_path_factory.mktemp("facts") / "facts")
    twins.spark.table("parquet_rows").select("id", "m", "n").write.partitionBy("n").parquet(folder)
    twins.spark.read.parquet(folder).createOrReplaceTempView("facts")


@pytest.mark.parametrize(
    ("query", "mode", "filter_"),
    [*in_turn(PRUNED, "dynamicpruning"), *in_turn(BLOOMING, "might_contain")],
)
def test_runtime_filters_reach_the_right_scan(twins, facts, parquet_answers, query, mode, filter_):
    settings = RUNTIME | MODES[mode]
    with twins.conf(settings):
        plan = twins.sql(query, "shard")._jdf.queryExecution().optimizedPlan().toString()
    assert filter_ in plan
    check(twins, parquet_answers, query, settings)


def test_the_rows_of_the_twins_can_show_mixed_up_scans(twins):
    """The frames have several partitions, copies of rows, and every kind of null. Without these the tests above would prove little."""
    rows = twins.spark.table("shard_rows")
    assert rows.rdd.getNumPartitions() == 2
    assert len({*MIXING, *QUERIES, *ORDERED, *PRUNED, *BLOOMING}) >= 70
    kinds = rows.selectExpr(
        "count(*) > count(DISTINCT struct(*)) AS copies", "count_if(isnan(x)) > 0", "count_if(x IS NULL) > 0", "count_if(p IS NULL) > 0",
        "count_if(p IS NOT NULL AND p.q IS NULL) > 0", "count_if(p.q IS NOT NULL AND p.q.z IS NULL) > 0", "count_if(area IS NULL) > 0",
    ).first()  # fmt: skip
    assert all(kinds)
