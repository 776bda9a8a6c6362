"""The input of a stream as a frame. Refuses queries that cannot be repeated from offsets alone. Starts no Spark job.

Only the position of the source is stored. A query whose result depends on rows of earlier batches (a count, a distinct, a join of two
streams) would also need Spark's state, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.utils import ForeachBatchFunction

from persist_spark import frames
from persist_spark.datasource import register
from persist_spark.inputs.format import load_input, with_sql
from persist_spark.inputs.shard import DIFF, flat_changes
from persist_spark.source.native import java_class, scala_object
from persist_spark.spec import ConfigurationError, SinkSpec
from persist_spark.streaming.sources import PERSIST, children_of, streaming_nodes

_SQL = "org.apache.spark.sql"
#: The operators of Spark's optimized plan that process each row independently.
_STATELESS = frozenset(
    {
        "Project",
        "Filter",
        "Union",
        "Generate",
        "Repartition",
        "RepartitionByExpression",
        "RebalancePartitions",
        # Python functions over rows, or over the rows of one task in one batch.
        "ArrowEvalPython",
        "BatchEvalPython",
        "ArrowEvalPythonUDTF",
        "BatchEvalPythonUDTF",
        "MapInArrow",
        "MapInPandas",
        "StreamingRelation",
        "StreamingRelationV2",
    }
)


def streaming_input(spark: SparkSession, spec: SinkSpec) -> DataFrame:
    """The rows of the stream, with the SQL applied. Raises ConfigurationError when the source does not stream or the SQL keeps a state."""
    if spec.input.format.lower() == PERSIST or spec.input.python is not None:
        register(spark, blob=spec.blob, consensus=spec.consensus)
    loaded = load_input(spark, spec.input, streaming=True)
    frame = with_sql(flat_changes(loaded, spec) if spec.input.is_shard else loaded, spec.input)
    plan = _optimized(frame)
    if spec.input.is_shard:
        _check_diffs(plan)
    for node in streaming_nodes(plan):
        name = node.nodeName()
        if name not in _STATELESS and not _is_join_with_a_table(node):
            where = (
                "input.format.sql" if spec.input.python is None else f"input.python: {spec.input.python.name}, or sql"
            )
            raise ConfigurationError(
                f"{where}: {name} keeps a state over the rows of earlier batches, which a Streaming sink does not store; use "
                "projections, filters, unions and joins with tables"
            )
    return frame


def in_one_projection(rows: DataFrame) -> DataFrame:
    """Merges projections of `rows` that follow each other into one, because Spark analyses and optimizes the plan of a stream anew for each
    batch. It applies only optimizer rules that change no rows. Other rules choose a file, a time or a version of a table, and each batch
    must make these choices itself.
    """
    session = rows.sparkSession
    plan = rows._jdf.queryExecution().analyzed()
    for rule in ("analysis.EliminateSubqueryAliases", "analysis.EliminateView", "optimizer.CollapseProject"):
        plan = scala_object(session._jvm, f"{_SQL}.catalyst.{rule}").apply(plan)
    return DataFrame(java_class(session._jvm, f"{_SQL}.classic.Dataset").ofRows(session._jsparkSession, plan), session)


def _check_diffs(plan: Any) -> None:
    """Refuses SQL over the changes of a shard if it drops their diffs, or if a retracted row may get other values than the added
    row had.
    """
    # This is the column of the source. Users cannot name it, because SQL sees `_diff`. The optimizer removes it if nothing needs it.
    used = {str(column).partition("#")[0] for node in streaming_nodes(plan) for column in _columns(node.references())}
    if "diff" not in used:
        raise ConfigurationError(
            f"input.shard.sql: it drops {DIFF}, so rows that are taken away from the input would stay; select it, and name it in "
            "envelope.diffColumn"
        )
    if not plan.deterministic():
        raise ConfigurationError(
            "input.shard.sql: a row must have the same values when it is added and when it is taken away; use no random functions"
        )


def _columns(attributes: Any) -> list[Any]:
    sequence = attributes.toSeq()
    return [sequence.apply(index) for index in range(sequence.size())]


def _optimized(frame: DataFrame) -> Any:
    """Spark's plan without views, aliases and common table expressions, and with subqueries as joins. This calls the optimizer directly,
    because Spark refuses to optimize the plan of a stream that was not started.
    """
    execution = frame._jdf.queryExecution()
    try:
        return execution.sparkSession().sessionState().optimizer().execute(execution.analyzed())
    except (AnalysisException, Py4JError) as error:
        raise ConfigurationError(f"input.format.sql: {frames.first_line(error)}") from error


def _is_join_with_a_table(node: Any) -> bool:
    return bool(node.nodeName() == "Join" and sum(child.isStreaming() for child in children_of(node)) == 1)


class _InOneSession(ForeachBatchFunction):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """Uses one Python session for all batches of a query. Spark's own wrapper makes a new session for each batch, with a dozen calls of the
    JVM.
    """

    def call(self, jdf: Any, batch_id: int) -> None:
        """Does one batch. The JVM calls it."""
        if self.made is None:
            self.made = SparkSession(self.session.sparkContext, jdf.sparkSession())
        self.func(DataFrame(jdf, self.made), batch_id)

    made: SparkSession | None = None


def for_each_batch(writer: DataStreamWriter, of: DataFrame, do: Callable[[DataFrame, int], None]) -> DataStreamWriter:
    """`writer.foreachBatch(do)` for a writer of the stream `of`. The writer must start only one query."""
    gateway = of.sparkSession.sparkContext._gateway
    helper = java_class(gateway.jvm, "org.apache.spark.sql.execution.streaming.sources.PythonForeachBatchHelper")
    helper.callForeachBatch(writer._jwrite, _InOneSession(of.sparkSession, do))
    ensure_callback_server_started(gateway)
    return writer
