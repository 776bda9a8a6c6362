"""A format of Spark as the input of a sink, with its SQL. Starts no Spark job, except to infer a schema that the user left out.

Records of a text format may not parse. By default Spark shows them as nulls. Here they end the run. With `keeps_malformed` they become rows
with the reason in the column `err` instead (envelopes/collected.py), which the user's SQL does not see.
"""

from __future__ import annotations

from functools import reduce

from persist_engine import ERR
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.frames import first_line, quoted
from persist_spark.inputs.python import made_input
from persist_spark.spec import ConfigurationError, Input

#: The name of the input in `input.format.sql`.
INPUT_VIEW = "input"
#: Formats whose records may be malformed, and the column in which Spark shows such a record if the schema has it.
_TEXTS, _CORRUPT = ("csv", "json", "xml"), "_corrupt_record"
#: The number of characters of a malformed record that a message shows.
_SHOWN_CHARS = 500


def read_input(spark: SparkSession, source: Input) -> DataFrame:
    """The input that the user declared, with its SQL applied. Raises ConfigurationError when it does not exist or the SQL is invalid."""
    return with_sql(load_input(spark, source), source)


def load_input(spark: SparkSession, source: Input, *, streaming: bool = False) -> DataFrame:
    """The input that the user declared, without its SQL. `streaming`: as a stream. If malformed records are kept, they are in a column
    `_corrupt_record`. Raises ConfigurationError when the input does not exist.
    """
    if source.python is not None:
        return made_input(spark, source, source.python, streaming=streaming)
    read = spark.readStream if streaming else spark.read
    reader = read.format(source.format).options(**careful_options(source))
    try:
        if source.schema is not None:
            reader = reader.schema(source.schema)
        loaded = reader.load()
        return reader.schema(_with_corrupt(loaded.schema)).load() if _keeps_malformed(source) else loaded
    except (AnalysisException, IllegalArgumentException, Py4JJavaError) as error:
        # For an unknown format, Spark raises a plain Java error.
        raise ConfigurationError(f"input.format: {first_line(error)}") from error


def with_sql(frame: DataFrame, source: Input) -> DataFrame:
    """The frame with the input's SQL applied to it. Raises ConfigurationError when the SQL is invalid."""
    if not _keeps_malformed(source):
        return _with_sql(frame, source)
    # SUBTLE: Spark checks a record only in the columns that a query needs. So this query needs all columns, and all readings of the input
    # agree which records are malformed. The sum is never negative, which the optimizer cannot know.
    needs_all = reduce(Column.__add__, (F.col(quoted(name)).isNull().cast("int") for name in frame.columns)) >= 0
    is_parsed = needs_all & F.col(_CORRUPT).isNull()
    record = F.concat(
        F.lit(f"the {source.format.lower()} record does not parse: "), F.substring(_CORRUPT, 1, _SHOWN_CHARS)
    )
    reason = F.concat(record, F.lit(" (in "), F.col("_metadata.file_path"), F.lit(")"))
    if source.sql is None:
        columns = [
            F.when(is_parsed, F.col(quoted(name))).alias(name) for name in frame.columns if name not in (_CORRUPT, ERR)
        ]
        given = [F.col(ERR)] if ERR in frame.columns else []
        return frame.select(*columns, F.coalesce(F.when(~is_parsed, reason), *given).alias(ERR))
    rows = _with_sql(frame.where(is_parsed).drop(_CORRUPT), source)
    if ERR not in rows.columns:
        rows = rows.select("*", F.lit(None).cast("string").alias(ERR))
    if sum(name == ERR for name in rows.columns) > 1:
        return rows  # refused by name later
    # Columns are matched by position. The SQL may give two columns one name; a later check refuses that name.
    columns = [
        (reason if field.name == ERR else F.lit(None).cast(field.dataType)).alias(field.name) for field in rows.schema
    ]
    return rows.unionAll(frame.where(~is_parsed).select(*columns))


def _with_sql(frame: DataFrame, source: Input) -> DataFrame:
    if source.sql is None:
        return frame
    spark = frame.sparkSession
    frame.createOrReplaceTempView(INPUT_VIEW)
    try:
        return spark.sql(source.sql)
    except AnalysisException as error:
        raise ConfigurationError(f"input.format.sql: {first_line(error)}") from error
    finally:
        spark.catalog.dropTempView(INPUT_VIEW)


def careful_options(source: Input) -> dict[str, str]:
    """The options of the input, with options that keep Spark from changing rows silently. By default it reads a malformed record as nulls,
    and matches the columns of a CSV file by position, even if its header differs. Options that the user has set stay.
    """
    given = {name.lower(): value for name, value in source.options.items()}
    kind, options = source.format.lower(), dict(source.options)
    if _decides_malformed(source):
        options["mode"] = "PERMISSIVE" if source.keeps_malformed else "FAILFAST"
    if kind == "csv" and given.get("header", "").lower() == "true" and "enforceschema" not in given:
        options["enforceSchema"] = "false"
    return options


def _decides_malformed(source: Input) -> bool:
    """Whether records may be malformed and the user lets the sink decide what to do with them."""
    given = {name.lower() for name in source.options}
    is_users = {"mode", "columnnameofcorruptrecord"} & given or _CORRUPT in (source.schema or "")
    return source.format.lower() in _TEXTS and not is_users


def _keeps_malformed(source: Input) -> bool:
    return source.keeps_malformed and _decides_malformed(source)


def _with_corrupt(schema: T.StructType) -> T.StructType:
    others = [field for field in schema.fields if field.name != _CORRUPT]
    return T.StructType([*others, T.StructField(_CORRUPT, T.StringType())])
