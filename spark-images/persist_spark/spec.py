"""What one sink run is asked to do: `sink.json`, parsed and checked. Owns: the names and bounds of its fields. Knows
no Spark, no store.

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
        top = _Fields(document, "")
        schema, location = top.group("schema"), top.group("location")
        shard_text = top.text("shard_id")
        try:
            shard_id = ShardId(shard_text)
        except InvalidUsage as error:
            raise ConfigurationError(f"shard_id: {error}") from error
        spec = cls(
            sink_id=top.text("sink_id"),
            run_id=top.text("run_id"),
            shard_id=shard_id,
            key_ddl=schema.text("key"),
            value_ddl=schema.optional_text("value") or "",
            blob=location.text("blob"),
            consensus=location.text("consensus"),
            input=_parse_input(top.group("input")),
            envelope=_parse_envelope(top.group("envelope")),
            write=_parse_write(top.group("write", required=False)),
            purpose=top.optional_text("purpose") or f"sink {top.text('sink_id')}",
        )
        for fields in (schema, location, top):
            fields.finish()
        return spec


def _parse_input(fields: _Fields) -> Input:
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


def _parse_envelope(fields: _Fields) -> Envelope:
    name = fields.text("type")
    if name not in set(EnvelopeType):
        raise ConfigurationError(f"envelope.type: {name!r} is not supported, must be one of {', '.join(EnvelopeType)}")
    envelope = Envelope(type=EnvelopeType(name), timestamp_column=fields.optional_text("timestampColumn"))
    if envelope.type is not EnvelopeType.APPEND and envelope.timestamp_column is not None:
        raise ConfigurationError(f"envelope.timestampColumn: only an Append has times of its own, not a {name}")
    fields.finish()
    return envelope


def _parse_write(fields: _Fields) -> Write:
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


class _Fields:
    """One JSON object being taken apart: every field is taken once, `finish` refuses what nobody took."""

    def __init__(self, document: Any, path: str) -> None:
        if not isinstance(document, Mapping):
            raise ConfigurationError(f"{path or 'the sink specification'} must be an object, not {_kind(document)}")
        self._rest = dict(document)
        self._seen: dict[str, Any] = dict(document)
        self._path = path

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value or None; null counts as absent."""
        self._rest.pop(key, None)
        value = self._seen.get(key)
        wrong = value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool))
        if wrong:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise ConfigurationError(
                f"{self.name(key)} must be {' or '.join(_KINDS[k] for k in kinds)}, not {_kind(value)}"
            )
        return value

    def text(self, key: str) -> str:
        value = self.take(key, str)
        if not value:
            raise ConfigurationError(f"{self.name(key)} is required")
        return str(value)

    def optional_text(self, key: str) -> str | None:
        value: str | None = self.take(key, str)
        return value or None

    def flag(self, key: str) -> bool:
        return bool(self.take(key, bool))

    def text_map(self, key: str) -> dict[str, str]:
        value: dict[str, Any] = self.take(key, dict) or {}
        for option, text in value.items():
            if not isinstance(text, str):
                raise ConfigurationError(f"{self.name(key)}.{option} must be text, not {_kind(text)}; put it in quotes")
        return dict(value)

    def group(self, key: str, *, required: bool = True) -> _Fields:
        value = self.take(key, dict)
        if value is None and required:
            raise ConfigurationError(f"{self.name(key)} is required")
        return _Fields(value or {}, self.name(key))

    def finish(self) -> None:
        if self._rest:
            names = ", ".join(sorted(self.name(key) for key in self._rest))
            raise ConfigurationError(f"unknown field: {names}")


_KINDS: dict[type, str] = {str: "text", int: "a whole number", bool: "true or false", dict: "an object"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)
