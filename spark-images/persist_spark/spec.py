"""What one sink run is asked to do: `sink.json`, parsed and checked. Owns what the blocks `input`, `envelope` and `write` may hold;
`persist_engine.codec.sink_run` owns the document. Knows no Spark, no store.

Every refusal is a ConfigurationError that names the field as the user wrote it (`input.format.name`), what stands
there and what may.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import MIB
from persist_engine.codec.sink_run import Fields, decode_sink_run
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

#: More tasks than this only cost scheduling: a task below some MiB of input is not worth its start.
PARALLELISM_MAX = 4096
#: As the resource definition has it.
TARGET_PART_BYTES = 64 * MIB
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
#: Names of input options whose values never stand in a message or a log.
SECRET_OPTION = re.compile(r"(?i)passw|secret|token|credential|access.?key|api.?key|private")


class ConfigurationError(InvalidUsage):
    """The sink cannot run as it is declared, or its input is not as declared. Repeating changes nothing; the text
    says what to change.
    """


class EnvelopeType(enum.StrEnum):
    """What the input's rows mean."""

    APPEND = "Append"
    MIRROR = "Mirror"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A Spark batch source, and optional SQL over it as the view `input`."""

    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None
    sql: str | None = None
    allow_empty: bool = False
    """Whether an input without rows is a fact (a mirror becomes empty) and not a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """How rows become updates."""

    type: EnvelopeType
    timestamp_column: str | None = None
    """Append only: the column whose value, in milliseconds, is the update's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """How updates become parts."""

    parallelism: int | None = None
    """Number of write tasks, exactly; None: by what there is to write."""
    target_part_bytes: int = TARGET_PART_BYTES
    """Grows with it: the memory of an executor task, and what it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec:
    """One run of one sink. `run_id` names the run: every retry carries the same, so that its data are appended once. Of ids
    `<series>-<number>` the greater number is the newer run: once it has appended, older ones append nothing any more.
    """

    sink_id: str
    run_id: str
    shard_id: ShardId
    key_ddl: str
    value_ddl: str
    blob: str
    consensus: str
    input: Input
    envelope: Envelope
    write: Write = field(default_factory=Write)
    purpose: str = "sink"

    @property
    def run_token(self) -> bytes:
        """What the shard keeps as this sink's source progress after the run."""
        return self.run_id.encode()

    @property
    def schema(self) -> Schema:
        """The shard's schema as declared. Raises ConfigurationError naming what does not parse."""
        try:
            return Schema.from_ddl(self.key_ddl, self.value_ddl)
        except InvalidUsage as error:
            raise ConfigurationError(f"schema: {error}") from error

    def secrets(self) -> tuple[str, ...]:
        """Option values that must not be shown."""
        return tuple(v for k, v in self.input.options.items() if v and SECRET_OPTION.search(k))

    @classmethod
    def load(cls, path: Path) -> SinkSpec:
        """Read and check the file. Raises ConfigurationError."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read the sink specification {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"the sink specification {path} is not JSON: {error}") from error
        return cls.parse(document)

    @classmethod
    def parse(cls, document: Any) -> SinkSpec:
        """Check a decoded `sink.json`. Raises ConfigurationError."""
        try:
            run = decode_sink_run(document)
            return cls(
                sink_id=run.sink_id,
                run_id=run.run_id,
                shard_id=run.shard_id,
                key_ddl=run.key_schema,
                value_ddl=run.val_schema,
                blob=run.blob,
                consensus=run.consensus,
                input=_parse_input(Fields(run.input, "input")),
                envelope=_parse_envelope(Fields(run.envelope, "envelope")),
                write=_parse_write(Fields(run.write, "write")),
                purpose=run.purpose,
            )
        except ConfigurationError:
            raise
        except InvalidUsage as error:
            raise ConfigurationError(str(error)) from error


def _parse_input(fields: Fields) -> Input:
    kind = fields.optional_text("type") or "Format"
    if kind != "Format":
        raise ConfigurationError(f"input.type: {kind!r} is not supported, must be 'Format'")
    source = fields.group("format")
    parsed = Input(
        format=source.text("name"),
        options=source.text_map("options"),
        schema=source.optional_text("schema"),
        sql=source.optional_text("sql"),
        allow_empty=fields.flag("allowEmpty"),
    )
    source.finish()
    fields.finish()
    return parsed


def _parse_envelope(fields: Fields) -> Envelope:
    name = fields.text("type")
    if name not in set(EnvelopeType):
        raise ConfigurationError(f"envelope.type: {name!r} is not supported, must be one of {', '.join(EnvelopeType)}")
    envelope = Envelope(type=EnvelopeType(name), timestamp_column=fields.optional_text("timestampColumn"))
    if envelope.type is not EnvelopeType.APPEND and envelope.timestamp_column is not None:
        raise ConfigurationError(f"envelope.timestampColumn: only an Append has times of its own, not a {name}")
    fields.finish()
    return envelope


def _parse_write(fields: Fields) -> Write:
    parallelism = fields.take("parallelism", int)
    if parallelism is not None and not 1 <= parallelism <= PARALLELISM_MAX:
        raise ConfigurationError(f"write.parallelism: {parallelism} is outside [1, {PARALLELISM_MAX}]")
    quantity = fields.take("targetBatchBytes", (int, str))
    target = TARGET_PART_BYTES if quantity is None else _bytes_of(quantity, "write.targetBatchBytes")
    if target < MIB:
        raise ConfigurationError(f"write.targetBatchBytes: {quantity} is less than 1Mi")
    fields.finish()
    return Write(parallelism=parallelism, target_part_bytes=target)


def _bytes_of(quantity: int | str, name: str) -> int:
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ConfigurationError(f"{name}: {quantity!r} is not a quantity of bytes such as 128Mi")
    return int(Decimal(match[1]) * _UNITS[match[2] or ""])
