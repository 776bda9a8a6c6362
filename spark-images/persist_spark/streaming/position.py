"""The position of a stream in its source. The shard stores it beside the rows, as the token of the sink's source progress. Pure.

A durable format: JSON with a version. Code reads only its own version. The position is enough to write Spark's checkpoint anew on an empty
disk (`checkpoint.py`), so a stream needs no other durable place.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from persist_engine import SourceProgress
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage
from persist_engine.codec.sink_run import Fields
from persist_engine.flow.mint_run import RunToken

from persist_spark.spec import ConfigurationError, SinkSpec

FORMAT = 2
#: A longer document is compressed. A shorter one stays readable.
_PLAIN_BYTES_MAX = 4 << 10
#: The limit on the size of a token. Each commit of the stream writes one. A token of this size holds a few thousand names of files.
TOKEN_BYTES_MAX = 128 << 10
#: The limit on the size of an unpacked token.
_UNPACKED_BYTES_MAX = 64 << 20
#: The batch of a position before the first batch.
NO_BATCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position after `batch`: the shard has all rows of the batches up to it."""

    source: str
    """The kind of the source. It also identifies the source if the offsets do not."""
    query: str
    """The id of Spark's query. Drivers pass it on."""
    batch: int
    """The number of the last batch; NO_BATCH before the first one."""
    run: str
    """The id of the run that committed."""
    driver: str
    """The process that committed. Two drivers of one run never write equal positions."""
    offsets: str | None
    """The text of Spark's file offsets/<batch>. None before the first batch."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """The files of Spark's folder `sources` by path. They say where a source began, or which files it has read and what that list has
    forgotten.
    """
    has_rows: bool = True
    """Whether its commit also appended rows. If not, it did not change the shard's upper."""


def encode_position(position: Position) -> bytes:
    """Encodes the position as a token. Raises ConfigurationError when the token is too long to be part of every commit."""
    document = _json({"format": FORMAT, **asdict(position)})
    if len(document) > _PLAIN_BYTES_MAX:
        document = _json({"format": FORMAT, "packed": base64.b64encode(zlib.compress(document)).decode()})
    if len(document) > TOKEN_BYTES_MAX:
        raise ConfigurationError(
            f"input.format: the list of read files takes {len(document)} bytes, and a position may have at most {TOKEN_BYTES_MAX}: "
            "write fewer and larger files, or lower the option maxFileAge, after which a file is forgotten"
        )
    return document


def decode_position(token: bytes, *, sink_id: str) -> Position:
    """Inverse of `encode_position`. Raises Incompatible for another version, ConfigurationError for the token of a run over a batch source,
    and CorruptData for a damaged position.
    """
    document = _document(token)
    if document is None:
        raise ConfigurationError(
            f"sink {sink_id} has written the shard in runs over a batch source, the last one {_run_id(token)}: a stream cannot continue "
            "from there; create the stream as a sink with another name"
        )
    if document["format"] != FORMAT:
        raise Incompatible(
            f"the position of sink {sink_id} has format {document['format']}, and this release reads format {FORMAT}: use the release "
            "that wrote it"
        )
    try:
        fields = Fields(_unpacked(document), "position")
        fields.take("format", int)
        position = Position(
            source=fields.text("source"),
            query=fields.text("query"),
            batch=_batch(fields),
            run=fields.text("run"),
            driver=fields.text("driver"),
            offsets=fields.optional_text("offsets"),
            logs=fields.text_map("logs"),
            has_rows=fields.flag("has_rows"),
        )
        fields.finish()
        if (position.batch == NO_BATCH) != (position.offsets is None):
            raise InvalidUsage("position.offsets must be set exactly when there is a batch")
    except InvalidUsage as error:
        raise CorruptData(f"the position of sink {sink_id} is damaged: {error}", key=sink_id) from error
    return position


def check_no_stream(progress: SourceProgress | None, spec: SinkSpec) -> None:
    """Checks a run over a batch source. Raises ConfigurationError when its sink's `progress` is a stream's position and its envelope adds
    rows: a run reads all of its input, so it would add again what the stream has read. A run that corrects writes the difference (spec
    17.11).
    """
    if progress is None or spec.envelope.type.reads_back or _document(progress.token) is None:
        return
    raise ConfigurationError(
        f"mode: sink {spec.sink_id} has written the shard as a stream, the last time by {committer(progress)}. A run reads the whole "
        f"input, and {spec.envelope.type} would add its rows again. Choose mode Streaming, which goes on at its position, or one of the "
        "envelopes Mirror, Upsert and Debezium, which write what differs; or create a sink with another name whose input leaves out what "
        "the stream has read"
    )


def committer(progress: SourceProgress | None) -> str:
    """The driver and the run that committed `progress`, for a message."""
    if progress is None:
        return "another run"
    document = _document(progress.token)
    if document is None:
        return f"run {_run_id(progress.token)}"
    document = _unpacked(document)
    return f"driver {document.get('driver')} of run {document.get('run')} (its batch {document.get('batch')})"


def _document(token: bytes) -> dict[str, object] | None:
    """The position as JSON. None for the token of a run over a batch source, which is the id of the run."""
    try:
        document = json.loads(token)
    except ValueError:
        return None
    return document if isinstance(document, dict) and "format" in document else None


def _json(document: dict[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _unpacked(document: dict[str, object]) -> dict[str, object]:
    """The document inside a compressed `document`; an uncompressed `document` itself. Raises InvalidUsage for damaged bytes."""
    if "packed" not in document:
        return document
    try:
        packed = base64.b64decode(str(document["packed"]), validate=True)
        inner = json.loads(zlib.decompressobj().decompress(packed, _UNPACKED_BYTES_MAX))
    except (ValueError, zlib.error) as error:
        raise InvalidUsage(f"position.packed: {error}") from error
    if not isinstance(inner, dict):
        raise InvalidUsage("position.packed is not a position")
    return inner


def _batch(fields: Fields) -> int:
    number: int | None = fields.take("batch", int)
    if number is None or number < NO_BATCH:
        raise InvalidUsage(f"position.batch must be a number from {NO_BATCH}, not {number}")
    return number


def _run_id(token: bytes) -> str:
    return RunToken.decode(token).run.decode(errors="replace")[:128]
