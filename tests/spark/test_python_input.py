"""An input that a function of the user makes: what it may return, what is refused by name, and that executors run the same text."""

import io
import itertools
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from persist_engine import Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_spark.failures import ExitCode, Terminated, classify
from persist_spark.inputs.python import FILES_BYTES_MAX
from persist_spark.report import Log
from persist_spark.sink import run_sink
from persist_spark.spec import ConfigurationError, SinkSpec
from persist_spark.streaming.position import decode_position
from persist_spark.streaming.stream import run_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
#: Python imports a module once, so each has a name of its own.
NUMBERS = itertools.count()
KEY, VALUE = "id BIGINT", "name STRING"
ROWS = "    return spark.sql(\"select id, concat('n', id) as name from range(3)\")"
RATE = 'spark.readStream.format("rate-micro-batch").option("rowsPerBatch", "10").option("numPartitions", "1")'


@dataclass
class House:
    """A shard, and sinks whose input a function makes. The files of its ConfigMap are in a folder, as Kubernetes mounts them."""

    spark: object
    folder: Path

    def __post_init__(self):
        self.location = {"blob": f"file://{self.folder}/blobs", "consensus": f"sqlite://{self.folder}/consensus.db"}
        self.client = PersistClient.open(Location(**self.location), settings=Settings(retain_ms=None))
        self.shard = ShardId.new()
        self.client.initialise(self.shard, Schema.from_ddl(KEY, VALUE))

    def module(self, text, **files):
        """A module with this text in a folder with `files`. Returns its name."""
        name = f"users_{next(NUMBERS)}"
        hidden = self.folder / name / "..2026"
        hidden.mkdir(parents=True)
        (hidden.parent / "..data").symlink_to(hidden)
        for file, content in {f"{name}.py": text, **files}.items():
            (hidden / file).write_text(content)
            (hidden.parent / file).symlink_to(Path("..data") / file)
        return name

    def document(self, module, *, envelope="Append", run="u-1", stream=None, **python):
        function = {"module": module, "configMapName": "code", **python}
        document = {
            "sink_id": "ns/s",
            "run_id": run,
            "shard_id": self.shard,
            "schema": {"key": KEY, "value": VALUE},
            "location": self.location,
            "input": {"type": "Python", "python": {name: one for name, one in function.items() if one is not None}},
            "envelope": {"type": envelope},
            "write": {"parallelism": 1},
        }
        return document if stream is None else {**document, "stream": stream}

    def run(self, text, *, folder=None, options=None, files=(), **python):
        """One run of a sink over the function in `text`, or in the module `python` names."""
        name = python.pop("module", None)
        if name is None:
            name = self.module(text, **dict(files))
        spec = SinkSpec.parse(self.document(name, **python), options, folder or self.folder / name)
        if spec.stream is None:
            return run_sink(self.spark, spec)
        log = Log(io.StringIO(), SystemEnv())
        return run_stream(self.spark, spec, stop=threading.Event(), env=SystemEnv(), log=log)

    def failure(self, *arguments, **python):
        """How the run fails, as the report shows it. The shard is unchanged."""
        before = self.client.recent_upper(self.shard)
        with pytest.raises(Exception) as raised:  # noqa: PT011 - `classify` is what is tested
            self.run(*arguments, **python)
        assert self.client.recent_upper(self.shard) == before
        return classify(raised.value)

    def rows(self):
        with self.client.open_leased_reader(self.shard, purpose="test") as reader:
            table = reader.snapshot(self.client.recent_upper(self.shard).newest_complete).to_table()
        return sorted((row["key"]["id"], row["val"]["name"], row["diff"]) for row in table.to_pylist())

    def position(self):
        return decode_position(self.client.progress(self.shard, "ns/s").token, sink_id="ns/s")


@pytest.fixture
def house(local_spark, tmp_path):
    return House(local_spark, tmp_path)


def test_a_function_gets_its_arguments_and_executors_run_its_helpers(house, tmp_path):
    helper = f"helper_{next(NUMBERS)}"
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "suffix").write_text("!\n")
    text = f"""
from pathlib import Path
from pyspark.sql import functions as F
import {helper}

def load(spark, arguments):
    assert arguments == {{"rows": "4", "suffix": "!"}}, arguments
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    suffix = arguments["suffix"] + (Path(__file__).parent / "suffix.txt").read_text()
    named = F.udf(lambda number: {helper}.name(number) + suffix, "string")
    return spark.range(int(arguments["rows"])).select("id", named("id").alias("name"))
"""
    files = {
        "a copy of#.py": "1 / 0",
        f"{helper}.py": 'def name(number):\n    return f"n{number}"\n',
        "suffix.txt": "?",
    }
    report = house.run(
        text,
        files=files,
        arguments={"rows": "4"},
        optionsSecretName="words",
        options=tmp_path / "secret",
        sql="select * from input where id > 1",
        envelope="Mirror",
    )
    assert (report.rows_read, report.updates_written) == (2, 2)
    assert house.rows() == [(2, "n2!?", 1), (3, "n3!?", 1)]
    assert house.spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_a_function_is_called_once_in_a_run_that_reads_its_input_twice(house, tmp_path):
    text = f"def load(spark, arguments):\n    open({str(tmp_path / 'calls')!r}, 'a').write('.')\n{ROWS}"
    house.run(text, envelope="Mirror")
    assert (tmp_path / "calls").read_text() == "."
    assert len(house.rows()) == 3


def test_a_function_of_the_image_needs_no_files(house, tmp_path, monkeypatch):
    package = tmp_path / "image" / f"team_{next(NUMBERS)}"
    package.mkdir(parents=True)
    (package / "orders.py").write_text(f"def three(spark, arguments):\n{ROWS}\n")
    monkeypatch.syspath_prepend(package.parent)
    module = f"{package.name}.orders"
    assert house.run("", module=module, function="three", configMapName=None).rows_read == 3
    assert house.rows() == [(0, "n0", 1), (1, "n1", 1), (2, "n2", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def load(spark, arguments)\n    pass", "input.python: MODULE cannot be imported in MODULE.py, line 1: SyntaxError: expected ':'"),
        ("import nonsuch", "input.python: MODULE cannot be imported in MODULE.py, line 1: ModuleNotFoundError: No module named 'nonsuch'"),
        ("x = 1", "input.python.function: module MODULE has no function load"),
        ("load = 1", "input.python.function: module MODULE has no function load; its load is of type int"),
        ("def load(spark): pass", "input.python.function: MODULE.load must take (spark, arguments), and takes (spark)"),
        ("def load(spark, arguments): pass", "input.python: MODULE.load returned None, and a sink reads a DataFrame of Spark"),
        ("def load(spark, arguments): return [1]", "returned a builtins.list, and a sink reads a DataFrame of Spark"),
        ("async def load(spark, arguments): pass", "returned a builtins.coroutine"),
        (f"def load(spark, arguments): return {RATE}.load()", "returned a streaming DataFrame, and only mode Streaming reads one"),
        ("def load(spark, arguments): return spark.read.csv('/nonsuch')", "[PATH_NOT_FOUND]"),
        ("def load(spark, arguments): return spark.range(1)", "input columns do not match the shard's schema: missing: name"),
    ],
    ids=["syntax", "dependency", "no-function", "no-callable", "parameters", "none", "list", "coroutine", "stream", "path", "columns"],
)  # fmt: skip
def test_what_a_repetition_cannot_mend_is_refused_by_name(house, text, message):
    module = house.module(text)
    failed = house.failure("", module=module)
    assert failed.exit_code is ExitCode.CONFIGURATION
    assert message.replace("MODULE", module) in failed.message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"module": "elsewhere"}, "input.python.module: no module elsewhere in ConfigMap code; its files are the modules"),
        ({"module": "nonsuch.orders", "configMapName": None}, "input.python.module: no module nonsuch on the path of Python; build it"),
        ({"module": "os", "function": "system", "configMapName": None}, "input.python.function: os.system must take (spark, arguments)"),
        ({"module": "../orders"}, "input.python.module: '../orders' is not a name in Python"),
        ({"function": "path.join"}, "input.python.function: 'path.join' is not a name in Python"),
    ],
    ids=["file", "image", "builtin", "path", "dots"],
)  # fmt: skip
def test_names_that_lead_nowhere(house, more, message):
    folder = house.folder / house.module("")
    failed = house.failure("", **{"module": "orders", "folder": folder, **more})
    assert failed.exit_code is ExitCode.CONFIGURATION
    assert message in failed.message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            None,
            "input.python.configMapName: ConfigMap code is not mounted at .*; outside a cluster, make a folder code with",
        ),
        ({}, "ConfigMap code has no files; add the module"),
        (
            {"json.py": ""},
            "ConfigMap code has the file json.py, and Python or the image has a module json already; rename",
        ),
        ({"pyarrow.py": ""}, "has a module pyarrow already"),
        ({"table.csv": "x" * (FILES_BYTES_MAX + 1)}, f"has {FILES_BYTES_MAX + 1} bytes in its files"),
    ],
    ids=["absent", "empty", "standard", "installed", "large"],
)
def test_files_that_cannot_be_modules(house, tmp_path, files, message):
    folder = tmp_path / "given"
    for name, content in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    if files == {}:
        folder.mkdir()
    spec = SinkSpec.parse(house.document("orders"), None, folder)
    with pytest.raises(ConfigurationError, match=message):
        run_sink(house.spark, spec)


def test_an_exception_has_its_causes_and_the_line_in_the_users_file(house):
    text = "def rate(table):\n    return table['eur']\n\ndef load(spark, arguments):\n    try:\n        rate({})\n"
    text += "    except KeyError as error:\n        raise ValueError('no rate today') from error\n"
    module = house.module(text)
    failed = house.failure("", module=module)
    assert failed.exit_code is ExitCode.APPLICATION, "it may be gone tomorrow"
    where = f"input.python: {module}.load failed in {module}.py, line 2: "
    assert failed.message == f"{where}ValueError: no rate today; caused by KeyError: 'eur'"


def test_an_exception_on_an_executor_has_the_line_too(house):
    text = "from pyspark.sql import functions as F\n\ndef load(spark, arguments):\n    def bad(number):\n        return 1 / number\n"
    text += "    return spark.range(1).select('id', F.udf(bad, 'string')('id').alias('name'))\n"
    module = house.module(text)
    failed = house.failure("", module=module)
    assert failed.exit_code is ExitCode.APPLICATION
    assert f'{module}.py", line 5, in bad' in failed.message
    assert "ZeroDivisionError" in failed.message


def test_an_exit_of_the_users_code_is_a_failure_and_sigterm_is_none(house):
    failed = house.failure("import sys\n\ndef load(spark, arguments):\n    sys.exit(0)\n")
    assert failed.exit_code is ExitCode.APPLICATION
    assert "line 4: SystemExit: 0" in failed.message
    with pytest.raises(Terminated):
        house.run("from persist_spark.failures import Terminated\ndef load(spark, arguments):\n    raise Terminated\n")


BOUNDED = {"bounded": True}


def test_a_stream_of_a_function_goes_on_at_its_position_and_only_in_its_source(house):
    text = f"""
from pyspark.sql import functions as F

def load(spark, arguments):
    rate = {RATE}.option("startTimestamp", "0").load()
    named = F.udf(lambda number: f"n{{number}}", "string")
    return rate.select(F.col("value").alias("id"), named("value").alias("name")).where("id < 25")
"""
    house.run(text, stream=BOUNDED)
    first = house.position()
    assert first.source == "python rate-micro-batch"
    house.run(text, stream=BOUNDED, run="u-2")
    rows = house.rows()
    assert rows == [(number, f"n{number}", 1) for number in range(len(rows))]
    assert house.position().batch >= first.batch
    (house.folder / "in").mkdir()
    other = f"def load(spark, arguments):\n    read = spark.readStream.format('json').schema('{KEY}, {VALUE}')\n"
    failed = house.failure(f"{other}    return read.load({str(house.folder / 'in')!r})\n", stream=BOUNDED, run="u-3")
    assert failed.exit_code is ExitCode.CONFIGURATION
    assert "input.python: sink ns/s has read python rate-micro-batch" in failed.message
    assert "positions have no meaning in python json" in failed.message


def test_a_stream_over_files_reads_each_of_them_once(house):
    source = house.folder / "in"
    source.mkdir()
    text = f"def load(spark, arguments):\n    return spark.readStream.schema('{KEY}, {VALUE}').json({str(source)!r})\n"
    for number in range(3):
        (source / f"{number}.json").write_text(f'{{"id": {number}, "name": "n{number}"}}\n')
        house.run(text, stream=BOUNDED, run=f"u-{number}")
    assert house.rows() == [(number, f"n{number}", 1) for number in range(3)]
    assert house.position().logs


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("spark.range(3)", "returned a DataFrame that does not stream, and mode Streaming reads a stream"),
        (f"{RATE}.load().groupBy('value').count()", "keeps a state over the rows of earlier batches"),
        (f"{RATE}.option('failOnDataLoss', 'false').load()", "input.python: the option failOnDataLoss: must not be false"),
        ("spark.readStream.option('latestFirst', 'true').schema('value BIGINT').json(FOLDER)", "option latestFirst: the sink would have"),
        (
            f"spark.readStream.schema('timestamp TIMESTAMP, value BIGINT').json(FOLDER).union({RATE}.load())",
            "unites a folder of files with another source",
        ),
    ],
    ids=["batch", "state", "losses", "latest", "mixed"],
)  # fmt: skip
def test_a_stream_that_a_resource_could_not_declare_is_refused(house, made, message):
    (house.folder / "in").mkdir()
    flat = ".selectExpr('value as id', 'cast(value as string) as name')" if "range" not in made else ""
    made = made.replace("FOLDER", repr(str(house.folder / "in")))
    failed = house.failure(f"def load(spark, arguments):\n    return {made}{flat}\n", stream=BOUNDED)
    assert failed.exit_code is ExitCode.CONFIGURATION
    assert message in failed.message
