"""Generated queries return the same rows from a shard as from Parquet (see test_queries.py).

A small grammar draws a query from each seed; the same seed always gives the same query. Most queries scan one frame several times. The
queries of several seeds run as one action on each side, with the seed in each row. So Spark plans many scans of one frame at once, which
is the hardest case. Each seed is a test of its own, which names its query. `make generated` runs 1,000 of them. Answers depend on the
rows alone: limits have a total order, and sums are exact. A table of the SQL catalog, and a session over Spark Connect, give the same
rows as a frame of a classic session.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from persist_engine import Location, PersistClient, ShardId
from persist_engine.model.ownership import Owner
from persist_kit.depth import draws, generator
from persist_spark import catalog_settings
from twins import OVER

pytestmark = pytest.mark.spark

#: The number of queries, and of those in one action. Without DEPTH one action for each of SETTINGS: `make generated` runs many more.
QUERIES, AT_ONCE = (48, 12) if draws(1) == 1 else (draws(100), 25)
#: For a few hundred rows, compilation and shuffles take longer than execution.
SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
}
#: Batches take turns in these settings: filter pushdown, adaptive execution, and whether Spark considers a shard small enough to broadcast.
SETTINGS = tuple(
    {
        "spark.sql.python.filterPushdown.enabled": pushed,
        "spark.sql.adaptive.enabled": adaptive,
        "spark.sql.defaultSizeInBytes": size,
    }
    | SMALL
    for pushed, adaptive, size in (
        ("true", "false", "100000"),
        ("true", "false", "100000000"),
        ("true", "true", "100000"),
        ("false", "false", "100000"),
    )
)

#: The settings for Parquet, whose answers are the same under all of them.
PLAIN = SMALL | {"spark.sql.adaptive.enabled": "false"}

COLUMNS = ("id", "area", "n", "x", "s", "m", "d", "t", "b")
#: Expressions over a row `{a}`, each with the kind of literal that it is compared with.
TERMS = (
    ("{a}.id", "id"), ("{a}.id", "id"), ("{a}.n", "small"), ("{a}.n", "small"), ("{a}.p.x", "id"), ("{a}.id % 7", "small"),
    ("length({a}.s)", "small"), ("{a}.x", "double"), ("{a}.x", "double"), ("{a}.p.q.z", "double"), ("{a}.area", "text"),
    ("{a}.s", "text"), ("{a}.p.s", "text"), ("{a}.m", "decimal"), ("{a}.d", "date"), ("{a}.t", "instant"), ("{a}.b", "truth"),
)  # fmt: skip
#: Literals by kind, in ascending order.
LITERALS = {
    "id": ("-1", "3", "7", "12", "22.5D", "30", "45", "100", "160", "215"),
    "small": ("0", "1", "2", "3", "4", "5.0D", "6"),
    "double": (
        "double('-Infinity')",
        "-2.25D",
        "-0.0D",
        "0.0D",
        "0.5D",
        "1.5D",
        "12",
        "double('Infinity')",
        "double('NaN')",
    ),
    "text": ("''", "'NULL'", "'a_b'", "'n'", "'north'", "'o''hara'", "'z'", "'öst'", "'日本語'"),
    "decimal": ("-30.00", "-5", "0", "7.37", "12.5", "40"),
    "date": ("DATE '2013-01-01'", "DATE '2013-01-20'", "DATE '2013-02-05'"),
    "instant": (
        "TIMESTAMP '2013-01-01 00:00:00Z'",
        "TIMESTAMP '2013-01-01 10:47:00.000002Z'",
        "TIMESTAMP '2013-01-01 20:00:00Z'",
    ),
    "truth": ("false", "true"),
}
PATTERNS = ("'n%'", "'%a'", "'%o%'", "'_'", "'a\\\\_b'", "'日%'")


class Grammar:
    """The query of one seed, with names of twins.VIEWS in braces."""

    def __init__(self, seed: int) -> None:
        self.rng = generator(seed)
        self.aliases = 0

    def one_of(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def alias(self) -> str:
        self.aliases += 1
        return f"a{self.aliases}"

    # conditions on the row `a`

    def condition(self, a: str, depth: int = 2) -> str:
        drawn = self.rng.random()
        if depth == 0 or drawn < 0.5:
            return self.comparison(a)
        if drawn < 0.6:
            return f"NOT ({self.condition(a, depth - 1)})"
        return f"({self.condition(a, depth - 1)} {self.one_of('AND', 'AND', 'OR')} {self.condition(a, depth - 1)})"

    def comparison(self, a: str) -> str:
        term, kind = self.rng.choice(TERMS)
        term, literals = term.format(a=a), LITERALS[kind]
        low, high = sorted(self.rng.sample(range(len(literals)), 2))
        shapes = [
            f"{term} {self.one_of('=', '<=>', '<', '<=', '>', '>=', '<>')} {self.one_of(*literals)}",
            f"{term} {self.one_of('=', '<=>')} {self.one_of(*literals)}",
            f"{term} {self.one_of('>', '>=', '<>')} {self.one_of(*literals)}",
            f"{term} IS {self.one_of('', 'NOT ', 'NOT ')}NULL",
            f"{term} {self.one_of('', '', 'NOT ')}IN ({literals[high]}, {literals[low]})",
            f"{term} {self.one_of('', '', 'NOT ')}BETWEEN {literals[low]} AND {literals[high]}",
        ]
        if kind == "text":
            shapes.append(f"{term} {self.one_of('', 'NOT ')}LIKE {self.one_of(*PATTERNS)}")
        if kind == "truth":
            shapes.append(term)
        if kind == "small":
            shapes.append(f"{term} {self.one_of('=', '<', '>')} {a}.n + {self.rng.randrange(-2, 3)}")
        return self.one_of(*shapes)

    def sub(self, a: str) -> str:
        """A condition on the row `a` with a subquery, which is another scan."""
        b = self.alias()
        where = self.condition(b, 1)
        return self.one_of(
            f"{a}.id IN (SELECT {b}.id FROM {{whole}} {b} WHERE {where})",
            f"{a}.n NOT IN (SELECT {b}.n FROM {{whole}} {b} WHERE {b}.n IS NOT NULL AND {where})",
            f"{a}.n NOT IN (SELECT {b}.n FROM {{whole}} {b} WHERE {b}.id < 9 AND {where})",
            f"{self.one_of('', 'NOT ')}EXISTS (SELECT 1 FROM {{whole}} {b} WHERE {b}.id = {a}.id + {self.rng.randrange(4)} AND {where})",
            f"{a}.m {self.one_of('<', '>=')} (SELECT {self.one_of('avg', 'max', 'min')}({b}.m) FROM {{whole}} {b} WHERE {where})",
            f"{a}.id > (SELECT count(*) FROM {{whole}} {b} WHERE {b}.n = {a}.n AND {where})",
        )

    # relations: texts for FROM, with the columns of {whole}

    def relation(self) -> str:
        b = self.alias()
        drawn = self.rng.random()
        if drawn < 0.7:
            return "{whole}"
        if drawn < 0.8:
            return self.one_of("{rows}", "{rows}", "{third}", "{given}", "{early}", "{some}")
        if drawn < 0.9:
            return f"(SELECT * FROM {{whole}} {b} WHERE {self.condition(b, 1)})"
        return f"(SELECT * FROM {{whole}} {b} WHERE {self.condition(b, 1)} ORDER BY {b}.id, {b}.area LIMIT {self.rng.randrange(1, 60)})"

    def columns(self) -> list[str]:
        return self.rng.sample(COLUMNS, self.rng.randrange(1, 4))

    def selection(self, columns: list[str], *, subquery: float = 0.2) -> str:
        """One block over one relation."""
        a = self.alias()
        where = self.condition(a)
        if self.rng.random() < subquery:
            where = f"{where} AND {self.sub(a)}"
        distinct = "DISTINCT " if self.rng.random() < 0.15 else ""
        return f"SELECT {distinct}{', '.join(f'{a}.{column}' for column in columns)} FROM {self.relation()} {a} WHERE {where}"

    # whole queries

    def plain(self) -> str:
        return self.selection(self.columns())

    def nested(self) -> str:
        return self.selection(self.columns(), subquery=1)

    def together(self) -> str:
        columns = self.columns()
        text = self.selection(columns, subquery=0.1)
        for _ in range(self.rng.randrange(1, 3)):
            kind = self.one_of("UNION ALL", "UNION ALL", "UNION", "EXCEPT", "EXCEPT ALL", "INTERSECT", "INTERSECT ALL")
            text = f"({text}) {kind} ({self.selection(columns, subquery=0.1)})"
        return text

    def joined(self) -> str:
        a, b = self.alias(), self.alias()
        kind = self.one_of("JOIN", "JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN")
        on = self.one_of(
            f"{a}.id = {b}.id",
            f"{a}.id = {b}.id AND {a}.area <=> {b}.area",
            f"{a}.id = {b}.id + {self.rng.randrange(1, 5)}",
            f"{a}.n = {b}.n AND {a}.d = {b}.d",
            f"{a}.x <=> {b}.x AND {a}.area = {b}.area AND {b}.id < 40",
        )
        left = f"(SELECT * FROM {self.relation()} {self.alias()} WHERE {self.condition(f'a{self.aliases}', 1)})"
        both = "SEMI" not in kind and "ANTI" not in kind
        shown = f"{a}.id, {a}.s, {b}.id AS other, {b}.x" if both else f"{a}.id, {a}.s"
        hint = "" if self.rng.random() < 0.7 else f"/*+ {self.one_of('BROADCAST', 'MERGE', 'SHUFFLE_HASH')}({b}) */ "
        where = f" WHERE {self.condition(self.one_of(a, b) if both else a, 1)}"
        return f"SELECT {hint}{shown} FROM {left} {a} {kind} {self.relation()} {b} ON {on} AND {self.condition(b, 1)}{where}"

    def grouped(self) -> str:
        a = self.alias()
        keys = self.rng.sample(("n", "b", "area", "d", "x"), self.rng.randrange(1, 3))
        shown = ", ".join(f"{a}.{key}" for key in keys)
        by = f"{self.one_of('ROLLUP', 'CUBE')} ({shown})" if self.rng.random() < 0.2 else shown
        sums = self.rng.sample(
            (
                "count(*)", f"count({a}.n)", f"count(DISTINCT {a}.s)", f"sum({a}.m)", f"avg({a}.m)", f"min({a}.s)", f"max({a}.t)",
                f"sum({a}.n)", f"max({a}.id)", f"count(*) FILTER (WHERE {self.condition(a, 1)})",
                f"sum({a}.m) FILTER (WHERE {self.condition(a, 1)})", f"bool_or({a}.b)",
            ),
            2,
        )  # fmt: skip
        having = " HAVING count(*) > 2" if self.rng.random() < 0.3 else ""
        where = self.condition(a) if self.rng.random() < 0.7 else f"{self.condition(a, 1)} AND {self.sub(a)}"
        return f"SELECT {shown}, {sums[0]} AS f, {sums[1]} AS g FROM {self.relation()} {a} WHERE {where} GROUP BY {by}{having}"

    def named(self) -> str:
        """A query that uses a common table expression twice."""
        a, b, c = self.alias(), self.alias(), self.alias()
        table = f"WITH c AS (SELECT * FROM {self.relation()} {c} WHERE {self.condition(c)})"
        return self.one_of(
            f"{table} SELECT id, s FROM c WHERE {self.condition('c', 1)} UNION ALL SELECT id, s FROM c WHERE {self.condition('c', 1)}",
            f"{table} SELECT {a}.id, {b}.x FROM c {a} LEFT JOIN c {b} ON {a}.id = {b}.id + 1 AND {self.condition(b, 1)} "
            f"WHERE {self.condition(a, 1)}",
            f"{table} SELECT id, n FROM c WHERE n > (SELECT min(n) FROM c WHERE {self.condition('c', 1)})",
            f"{table} SELECT n, count(*) AS f FROM c WHERE id NOT IN (SELECT id FROM c WHERE {self.condition('c', 1)}) GROUP BY n",
        )

    def ranked(self) -> str:
        a = self.alias()
        over = f"OVER (PARTITION BY {a}.{self.one_of('n', 'b', 'area')} ORDER BY {a}.id, {a}.area)"
        rank = self.one_of(f"row_number() {over}", f"rank() {over}", f"sum({a}.m) {over}", f"lag({a}.id) {over}")
        text = f"SELECT {a}.id, {a}.area, {rank} AS f FROM {self.relation()} {a} WHERE {self.condition(a)}"
        return f"SELECT * FROM ({text}) WHERE f > 2" if self.rng.random() < 0.4 else text

    def text(self) -> str:
        shapes: tuple[Callable[[], str], ...] = (
            self.plain, self.nested, self.together, self.together, self.joined, self.joined, self.grouped, self.named, self.ranked,
        )  # fmt: skip
        return self.rng.choice(shapes)()


def query_of(seed: int) -> str:
    return Grammar(seed).text()


def at_once(seeds: range) -> str:
    """One query for all `seeds`, with the columns (seed, columns and their types, row)."""
    whole = "map('timestampFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSS')"
    return " UNION ALL ".join(
        f"SELECT {seed} AS seed, typeof(struct(q.*)) AS kind, to_json(struct(q.*), {whole}) AS row FROM ({query_of(seed)}) q"
        for seed in seeds
    )


def answers(twins, text: str, side: str) -> dict[int, Counter]:
    """The rows of each seed that has rows."""
    found: dict[int, Counter] = {}
    for seed, kind, row in twins.sql(text, side).collect():
        found.setdefault(seed, Counter())[kind, row] += 1
    return found


class Compared:
    """The answers of both sides by seed. The first seed of a batch runs the whole batch, AT_ONCE seeds. The error of a batch is the
    result of each of its seeds.
    """

    def __init__(self, twins) -> None:
        self.twins = twins
        self.found: dict[int, tuple[dict[int, Counter], dict[int, Counter]] | Exception] = {}

    def of(self, seed: int) -> tuple[Counter | None, Counter | None]:
        first = seed - seed % AT_ONCE
        if first not in self.found:
            try:
                self.found[first] = self._answers(first)
            except Exception as error:  # noqa: BLE001 - each seed of the batch raises it below
                self.found[first] = error
        found = self.found[first]
        if isinstance(found, Exception):
            raise found
        shard, parquet = found
        return shard.get(seed), parquet.get(seed)

    def _answers(self, first: int) -> tuple[dict[int, Counter], dict[int, Counter]]:
        text = at_once(range(first, first + AT_ONCE))
        with self.twins.conf(SETTINGS[first // AT_ONCE % len(SETTINGS)]):
            shard = answers(self.twins, text, "shard")
        with self.twins.conf(PLAIN):
            parquet = answers(self.twins, text, "parquet")
        assert len(parquet) > AT_ONCE / 4, "many have rows"
        return shard, parquet


@pytest.fixture(scope="module")
def compared(twins) -> Compared:
    return Compared(twins)


@pytest.mark.parametrize("seed", range(QUERIES))
def test_a_generated_query_returns_the_same_rows_from_a_shard_as_from_parquet(compared, seed):
    shard, parquet = compared.of(seed)
    assert shard == parquet, query_of(seed)


def see_catalog(twins) -> None:
    """Makes views of the side "catalog", with the names of twins.VIEWS, over a table of the SQL catalog: in the session of `twins`. Each
    scan of a query pushes the conditions of its own.
    """
    stores = {name: twins.given[name] for name in ("blob", "consensus")}
    for name, value in catalog_settings(**stores, name="twins", jar=False).items():
        twins.spark.conf.set(name, value)
    table = "SELECT * FROM twins.twins.rows"
    views = dict.fromkeys(("rows", "whole", "given"), table) | {
        "early": f"{table} VERSION AS OF 4",
        "some": f"{table} WHERE id >= 60 AND p.x < 30",
    }
    for name, text in (views | OVER).items():
        twins.spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW catalog_{name} AS {twins.text(text, 'catalog')}")


@pytest.fixture(scope="module")
def table_name(twins) -> str:
    """The shard has a name in the registry, by which the SQL catalog finds it."""
    shard = ShardId(twins.given["shard"])
    with PersistClient.open(Location(blob=twins.given["blob"], consensus=twins.given["consensus"])) as client:
        client.adopt(Owner("op", "twins", "rows"), shard, shard, take_over=True)
    return "twins.twins.rows"


@pytest.fixture(scope="module")
def catalog_side(twins, table_name) -> str:
    """See see_catalog."""
    see_catalog(twins)
    return "catalog"


#: The first seed of each batch of the tests below, whose sessions see the shard in another way. Without DEPTH there is one batch.
BATCHES = range(0, QUERIES if draws(1) > 1 else AT_ONCE, AT_ONCE)


def seen(twins, side: str, seeds: range) -> dict[int, Counter]:
    """The answers of one side to the batch `seeds`, in the batch's settings."""
    with twins.conf(SETTINGS[seeds.start // AT_ONCE % len(SETTINGS)]):
        return answers(twins, at_once(seeds), side)


@pytest.mark.parametrize("first", BATCHES)
def test_generated_queries_return_the_same_rows_through_the_catalog(compared, catalog_side, first):
    seeds = range(first, first + AT_ONCE)
    found = seen(compared.twins, catalog_side, seeds)
    for seed in seeds:
        assert found.get(seed) == compared.of(seed)[1], query_of(seed)


@pytest.mark.parametrize("side", ["shard", "catalog"])
@pytest.mark.parametrize("first", BATCHES)
def test_generated_queries_return_the_same_rows_over_connect_as_in_a_classic_session(
    compared, connect_twins, table_name, first, side
):
    if side == "catalog":
        see_catalog(connect_twins)
    seeds = range(first, first + AT_ONCE)
    found = seen(connect_twins, side, seeds)
    for seed in seeds:
        assert found.get(seed) == compared.of(seed)[0], query_of(seed)


def test_most_generated_queries_scan_a_frame_more_than_once():
    texts = [query_of(seed) for seed in range(QUERIES)]
    scans = (len(re.findall(r"\{whole\}|FROM c\b|JOIN c\b", text)) for text in texts)
    assert sum(count > 1 for count in scans) > QUERIES / 2
    assert len(set(texts)) == QUERIES
