"""A stream over folders whose files, paths, options or SQL change: each file is read once, or the driver says why it cannot go on."""

import json
import os
import re
import shutil
import time
from collections import Counter

import pytest
from persist_spark.failures import ExitCode, classify
from persist_spark.spec import ConfigurationError, Input, PythonFunction
from persist_spark.streaming.checkpoint import Checkpoint
from persist_spark.streaming.file_log import check_goes_on
from stream_world import Acts, Died, World, die

pytestmark = [pytest.mark.spark, pytest.mark.slow]
DAY_MS = 86_400_000
#: Changes n, so that the rows of both branches differ.
TWICE = "select id, n from input union all select id, n + 100 as n from input"


@pytest.fixture
def world(local_spark, tmp_path):
    made = World(local_spark, tmp_path)
    yield made
    made.client.close()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "in"
    made.mkdir()
    return made


def drop(folder, *numbers):
    """A file for each number, by whose times Spark reads them in this order."""
    for number in numbers:
        path = folder / f"{number}.json"
        path.write_text(json.dumps({"id": number, "n": 0}))
        os.utime(path, (1_700_000_000 + 3600 * number,) * 2)


def files(path, *, sql=None, **options):
    return Input(format="json", schema="id BIGINT, n BIGINT", options={"path": str(path), **options}, sql=sql)


def rows(*numbers):
    return Counter((number, 0) for number in numbers)


def test_a_path_that_a_stream_does_not_read_is_said_with_what_to_do(world, folder):
    (folder / "x:y.json").write_text(json.dumps({"id": 1, "n": 0}))
    drop(folder, 0)
    for path, found in (
        (folder, r"(?s)FAILED_READ_FILE.*x:y.json.*its name has a colon: rename it"),
        (
            folder / "0.json",
            "(?s)must be a directory.*a stream reads folders: name the folder .* with the option pathGlobFilter",
        ),
    ):
        with pytest.raises(Exception) as refused:  # noqa: PT011 - Spark's, which the next line classifies
            world.run(input=files(path))
        failure = classify(refused.value)
        assert failure.exit_code is ExitCode.CONFIGURATION
        assert re.search(found, failure.message)
    world.run(input=files(folder, pathGlobFilter="0.json"))
    (folder / "x:y.json").rename(folder / "x-y.json")
    world.run(input=files(folder))
    assert world.rows() == rows(0, 1)


def test_sql_names_its_folder_once_or_twice_from_driver_to_driver(world, folder):
    drop(folder, 0)
    with pytest.raises(Died):
        world.run(Acts(die, "appended"), input=files(folder, sql=TWICE))
    drop(folder, 1)
    world.run(input=files(folder))
    drop(folder, 2)
    world.run(input=files(folder, sql=TWICE))
    assert world.rows() == rows(0, 1, 2) + Counter([(0, 100), (2, 100)])


def test_sql_names_its_shard_twice_from_some_driver_on(world):
    world.write(1)
    source = world.spec().input
    world.run(input=source)
    world.write(2)
    named = "select key.id as id, val.n {} as n from input"
    both = f"{named.format('')} union all {named.format('+ 100')}"
    world.run(input=Input(format="persist", options=source.options, sql=both))
    assert world.rows() == Counter([(1, 0), (1, 1), (2, 0), (2, 1), (2, 100), (2, 101)])


def test_another_folder_goes_on_after_the_first_batch(world, folder, tmp_path):
    drop(folder, 0)
    world.run(input=files(folder))
    other = tmp_path / "other"
    other.mkdir()
    drop(other, 1)
    world.run(input=files(other))
    drop(folder, 2)
    world.run(input=files(folder))
    assert world.rows() == rows(0, 1, 2)


def test_files_that_are_forgotten_are_not_read_again(world, folder):
    drop(folder, 0, 1, 2, 3)
    world.run(input=files(folder, maxFileAge="1h"))
    with pytest.raises(ConfigurationError, match="maxFileAge: it was lower before.*set less than 7200000ms"):
        world.run(input=files(folder, maxFileAge="7d"))
    drop(folder, 4)
    os.utime(folder / "4.json", (1_700_000_000 + 3 * 3600 + 1800,) * 2)
    world.run(input=files(folder, maxFileAge="7199s"))
    # This driver forgot nothing, and passes on what was forgotten before.
    with pytest.raises(ConfigurationError, match="set less than 9000000ms"):
        world.run(input=files(folder, maxFileAge="3h"))
    assert world.rows() == rows(0, 1, 2, 3, 4)


def test_a_file_by_whose_time_spark_would_pass_over_all_later_ones_is_refused(world, folder):
    drop(folder, 0)
    world.run(input=files(folder))
    drop(folder, 1)
    ahead_s = time.time() + 8 * DAY_MS / 1000
    os.utime(folder / "1.json", (ahead_s, ahead_s))
    with pytest.raises(
        ConfigurationError, match=r"1\.json has a time that is more than maxFileAge .* ahead of the clock"
    ):
        world.run(input=files(folder))
    drop(folder, 1, 2)
    world.run(input=files(folder))
    assert world.rows() == rows(0, 1, 2)
    ahead_s = time.time() + 6 * DAY_MS / 1000
    (folder / "3.json").write_text(json.dumps({"id": 3, "n": 0}))
    os.utime(folder / "3.json", (ahead_s, ahead_s))
    world.run(input=files(folder))
    (folder / "4.json").write_text(json.dumps({"id": 4, "n": 0}))
    world.run(input=files(folder))
    assert world.rows() == rows(0, 1, 2, 3, 4)


def test_folders_that_change_their_places_are_refused(world, tmp_path, monkeypatch):
    one, two, code = (tmp_path / name for name in ("one", "two", "code"))
    for each in (one, two, code):
        each.mkdir()
    text = (
        "def load(spark, arguments):\n"
        "    read = spark.readStream.format('json').schema('id BIGINT, n BIGINT')\n"
        "    return read.load(arguments['first']).union(read.load(arguments['second']))\n"
    )
    (code / "two_folders.py").write_text(text)
    monkeypatch.syspath_prepend(str(code))

    def source(first, second):
        options = {"first": str(first), "second": str(second)}
        return Input(format="python", options=options, python=PythonFunction(module="two_folders"))

    for number, folder in enumerate([one, two, one]):
        drop(folder, number)
        world.run(input=source(one, two))
    with pytest.raises(ConfigurationError, match="one was source 0 of the function and is source 1 now"):
        world.run(input=source(two, one))
    assert world.rows() == rows(0, 1, 2)
    two.rename(tmp_path / "three")
    drop(tmp_path / "three", 3)
    shutil.rmtree(one)
    one.mkdir()
    with pytest.raises(ConfigurationError, match="one was source 0"):
        world.run(input=source(tmp_path / "three", one))


def test_a_file_that_goes_before_its_batch_is_missed_and_read_when_it_is_back(world, folder):
    drop(folder, 0, 1, 2)
    source = files(folder, maxFilesPerTrigger="1")
    with pytest.raises(Exception, match="gone after the folder was listed") as raised:
        world.run(Acts((folder / "1.json").unlink, "batch", 1), input=source)
    failure = classify(raised.value)
    assert (failure.failure_class, "/in/1.json: gone" in failure.message) == ("Application", True)
    assert world.rows() == rows(0)
    drop(folder, 1)
    world.run(input=source)
    assert world.rows() == rows(0, 1, 2)


def test_batches_without_rows_beside_files_that_are_there(world, folder):
    drop(folder, 0, 1, 2)
    for number in (0, 2):
        (folder / f"{number}.json").write_text("")
        os.utime(folder / f"{number}.json", (1_700_000_000 + 3600 * number,) * 2)
    assert world.run(input=files(folder, maxFilesPerTrigger="1")).batches == 3
    assert world.rows() == rows(1)


def entries(*named):
    return "\n".join(["v1", *(json.dumps({"path": path, "timestamp": at, "batchId": 0}) for path, at in named)])


@pytest.mark.parametrize(
    ("logs", "folders", "message"),
    [
        ({"0/0.compact": entries(("file:///a/1", 9 * DAY_MS))}, [], ""),
        ({"0/0.compact": entries(("file:///a/1", 9 * DAY_MS)), "0/.forgotten": "0"}, [], ""),
        ({"0/0.compact": entries(("file:///a/1", 7 * DAY_MS)), "0/.forgotten": "0"}, [], "set less than 604800000ms"),
        ({"0/0.compact": entries(("file:///a%20b/1", 0))}, ["/c", "/a b"], "/a b was source 0"),
        ({"0/0.compact": entries(("s3a://x/a/1", 0))}, ["s3a://y/a", "s3a://x/a"], "x/a was source 0"),
        ({"0/0.compact": entries(("s3a://x/a/1", 0))}, ["s3a://x/a", "s3a://y/a"], ""),
        ({"0/0.compact": entries(("s3a://x/moved/1", 0))}, ["s3a://x/a", "s3a://x/b"], ""),
    ],
)
def test_what_spark_would_read_again(logs, folders, message):
    if not message:
        check_goes_on(logs, age_ms=7 * DAY_MS, folders=folders)
    else:
        with pytest.raises(ConfigurationError, match=message):
            check_goes_on(logs, age_ms=7 * DAY_MS, folders=folders)


def test_a_folder_beside_one_that_is_named_twice_is_refused(tmp_path):
    for number in (0, 1):
        (tmp_path / "sources" / str(number)).mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="names one folder twice beside another folder"):
        Checkpoint(tmp_path, file_age_ms=50).logs("\n".join(["v1", "{}", *['{"logOffset":0}'] * 3]))
