"""A sink whose resource becomes another one: its mode, or the way in which the name of its source is written. Its progress in the shard stays."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_spark.sink import run_sink
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input
from stream_world import World

pytestmark = [pytest.mark.spark, pytest.mark.slow]
APPEND = Envelope(type=EnvelopeType.APPEND)


class Turned(World):
    """The world of a sink over a folder with a file of two rows."""

    def __init__(self, spark, folder):
        super().__init__(spark, folder)
        self.folder = folder / "in"
        self.folder.mkdir()
        self.add((1, 10), (2, 20))

    def add(self, *rows):
        """A file with these rows."""
        (self.folder / f"{rows[0][0]}.csv").write_text("".join(f"{key},{n},1\n" for key, n in rows))

    def files(self, envelope, name="csv"):
        columns = "*" if envelope.type is EnvelopeType.DIFF else "id, n"
        options = {"path": str(self.folder)}
        return Input(
            format=name, schema="id BIGINT, n BIGINT, d BIGINT", options=options, sql=f"select {columns} from input"
        )

    def streams(self, envelope=APPEND, name="csv"):
        """A driver of the sink with mode Streaming."""
        return self.run(input=self.files(envelope, name), envelope=envelope)

    def runs(self, run, envelope=APPEND, **more):
        """A run of the sink with mode Once or Scheduled."""
        source = replace(self.files(envelope), **more)
        return run_sink(self.spark, replace(self.spec(run, input=source, envelope=envelope), stream=None))


@pytest.fixture
def world(local_spark, tmp_path):
    made = Turned(local_spark, tmp_path)
    yield made
    made.client.close()


@pytest.mark.parametrize(
    "envelope", [APPEND, Envelope(type=EnvelopeType.DIFF, diff_column="d")], ids=lambda each: each.type
)
def test_a_run_that_would_add_the_rows_of_a_stream_again_is_refused(world, envelope):
    world.streams(envelope)
    before = world.progress()
    with pytest.raises(
        ConfigurationError,
        match=f"sink ns/s has written the shard as a stream.*{envelope.type} would add its rows again",
    ):
        world.runs("r-2", envelope)
    assert world.progress() == before
    world.add((3, 30))
    world.streams(envelope)
    assert world.rows() == Counter([(1, 10), (2, 20), (3, 30)])


@pytest.mark.parametrize("kind", [EnvelopeType.MIRROR, EnvelopeType.UPSERT])
def test_a_run_that_corrects_goes_on_after_a_stream_and_the_stream_does_not_go_on_after_it(world, kind):
    upserts = Envelope(type=EnvelopeType.UPSERT)
    world.streams(upserts)
    world.add((3, 30))
    world.runs("r-2", Envelope(type=kind))
    assert world.rows() == Counter([(1, 10), (2, 20), (3, 30)])
    with pytest.raises(ConfigurationError, match="in runs over a batch source, the last one r-2"):
        world.streams(upserts)


def test_an_upsert_reads_the_rows_that_a_mirror_wrote_as_commands(world):
    """The digest of a Mirror says which rows the shard holds, and not what an Upsert makes of them."""
    upserts = Envelope(type=EnvelopeType.UPSERT)
    for run, values, refusal in (
        ("1", "(1, 10), (2, null)", None),
        ("2", "(1, 10), (1, 11)", 'several different rows for key {"id":1}'),
        ("3", "(1, 10), (1, 10)", 'key {"id":1}'),
    ):
        sql = f"select cast(col1 as bigint) as id, cast(col2 as bigint) as n from values {values}"
        world.runs(f"m-{run}", Envelope(type=EnvelopeType.MIRROR), sql=sql)
        with nullcontext() if refusal is None else pytest.raises(InvalidUsage, match=refusal):
            world.runs(f"u-{run}", upserts, sql=sql)
        if refusal is None:  # a row without a value removes its key
            assert world.rows() == Counter([(1, 10)])


def test_a_source_is_the_same_in_whatever_letters_its_format_is_written(world):
    world.streams(name="CSV")
    world.add((3, 30))
    world.streams(name="csv")
    world.streams(name="Csv")
    assert world.rows() == Counter([(1, 10), (2, 20), (3, 30)])
