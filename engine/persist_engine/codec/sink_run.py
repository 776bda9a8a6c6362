"""sink.json: one run of one sink, as the operator writes it and the driver on Spark reads it. Only this module names its fields.

`input`, `envelope` and `write` are the blocks of the resource as the user wrote them. The resource definition describes them, and the
driver's `persist_spark.spec` parses them and `stream`, with the same `Fields`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId
from persist_engine.rows.errors_column import ERR, without_errors
from persist_engine.rows.schema import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSource:
    """The shard that a sink reads, and the URLs of its stores."""

    shard_id: ShardId
    blob: str
    consensus: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRun:
    """The task of one attempt of a run. `key_schema` and `val_schema` are DDL; `blob` and `consensus` are URLs. `stream` says how a
    Streaming sink runs; None for a sink of another mode. `source` is the shard that `input` names; None for another kind of input.
    `write_mode` is that of the resource; None when it has none.
    """

    sink_id: str
    run_id: str
    shard_id: ShardId
    key_schema: str
    val_schema: str
    blob: str
    consensus: str
    input: Mapping[str, Any]
    envelope: Mapping[str, Any]
    write: Mapping[str, Any]
    purpose: str
    stream: Mapping[str, Any] | None = None
    source: SinkSource | None = None
    write_mode: str | None = None


def encode_sink_run(run: SinkRun) -> dict[str, Any]:
    """The JSON document. Inverse of `decode_sink_run`."""
    document: dict[str, Any] = {
        "sink_id": run.sink_id,
        "run_id": run.run_id,
        "shard_id": run.shard_id,
        "schema": {"key": run.key_schema, "value": run.val_schema},
        "location": {"blob": run.blob, "consensus": run.consensus},
        "input": dict(run.input),
        "envelope": dict(run.envelope),
        "write": dict(run.write),
        "purpose": run.purpose,
    }
    if run.stream is not None:
        document["stream"] = dict(run.stream)
    if run.write_mode is not None:
        document["write_mode"] = run.write_mode
    if (source := run.source) is not None:
        location = {"blob": source.blob, "consensus": source.consensus}
        document["source"] = {"shard_id": source.shard_id, "location": location}
    return document


def decode_sink_run(document: object) -> SinkRun:
    """The run in a parsed JSON document. Raises InvalidUsage, which names the field that is missing, wrong or unknown. A person may
    write the document by hand, so `schema.value`, `write`, `write_mode`, `purpose`, `stream` and `source` may be absent.
    """
    top = Fields(document, "")
    schema, location = top.group("schema"), top.group("location")
    shard_id, source = top.shard_id("shard_id"), top.optional_block("source")
    run = SinkRun(
        sink_id=top.text("sink_id"),
        run_id=top.text("run_id"),
        shard_id=shard_id,
        key_schema=schema.text("key"),
        val_schema=schema.optional_text("value") or "",
        blob=location.text("blob"),
        consensus=location.text("consensus"),
        input=top.block("input"),
        envelope=top.block("envelope"),
        write=top.block("write", required=False),
        purpose=top.optional_text("purpose") or f"sink {top.text('sink_id')}",
        stream=top.optional_block("stream"),
        source=None if source is None else _source(Fields(source, "source")),
        write_mode=top.optional_text("write_mode"),
    )
    for fields in (schema, location, top):
        fields.finish()
    return run


def _source(fields: Fields) -> SinkSource:
    location = fields.group("location")
    source = SinkSource(
        shard_id=fields.shard_id("shard_id"), blob=location.text("blob"), consensus=location.text("consensus")
    )
    location.finish()
    fields.finish()
    return source


def columns_beside(envelope: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The columns that an envelope reads besides the fields of the shard, each as (column, the field of the envelope that names it). A
    column may be a field of the shard, too. Not for Debezium, whose input has columns of its own.
    """
    return [(envelope[name], name) for name in _NAMING_COLUMNS if envelope.get(name)]


def input_schema(schema: Schema, envelope: Mapping[str, Any], columns: Collection[str]) -> Schema:
    """The fields that an input with these columns must have for a shard of `schema`. An envelope that collects errors needs no column for
    them. Raises InvalidUsage when the shard cannot hold the errors. Not for Debezium.
    """
    return without_errors(schema) if envelope.get("onError") == "Collect" and ERR not in columns else schema


class Fields:
    """Takes the fields of one JSON object. `finish` refuses the fields that were not taken.

    Every error is InvalidUsage and names the field by its path (`input.format.name`).
    """

    def __init__(self, document: Any, path: str) -> None:
        if not isinstance(document, Mapping):
            raise InvalidUsage(f"{path or 'the sink specification'} must be an object, not {_kind(document)}")
        self._rest = dict(document)
        self._seen: dict[str, Any] = dict(document)
        self._path = path

    def name(self, key: str) -> str:
        """The path of the field `key`."""
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value, or None if it is absent or null."""
        self._rest.pop(key, None)
        value = self._seen.get(key)
        wrong = value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool))
        if wrong:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise InvalidUsage(f"{self.name(key)} must be {' or '.join(_KINDS[k] for k in kinds)}, not {_kind(value)}")
        return value

    def text(self, key: str) -> str:
        """A text that is present and not empty."""
        value = self.take(key, str)
        if not value:
            raise InvalidUsage(f"{self.name(key)} is required")
        return str(value)

    def optional_text(self, key: str) -> str | None:
        """A text; None when it is absent or empty."""
        value: str | None = self.take(key, str)
        return value or None

    def shard_id(self, key: str) -> ShardId:
        """The id of a shard."""
        text = self.text(key)
        try:
            return ShardId(text)
        except InvalidUsage as error:
            raise InvalidUsage(f"{self.name(key)}: {error}") from error

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty when it is absent."""
        values: list[Any] = self.take(key, list) or []
        for value in values:
            if not isinstance(value, str) or not value:
                raise InvalidUsage(f"{self.name(key)} must be a list of texts, not of {_kind(value)}")
        return tuple(values)

    def flag(self, key: str) -> bool:
        """True or false; false when it is absent."""
        return bool(self.take(key, bool))

    def text_map(self, key: str) -> dict[str, str]:
        """An object of texts; empty when it is absent."""
        value: dict[str, Any] = self.take(key, dict) or {}
        for option, text in value.items():
            if not isinstance(text, str):
                raise InvalidUsage(f"{self.name(key)}.{option} must be text, not {_kind(text)}; put it in quotes")
        return dict(value)

    def optional_block(self, key: str) -> dict[str, Any] | None:
        """An object inside this one, as it stands; None when it is absent."""
        value: dict[str, Any] | None = self.take(key, dict)
        return value

    def block(self, key: str, *, required: bool = True) -> dict[str, Any]:
        """An object inside this one, as it stands."""
        value = self.optional_block(key)
        if value is None and required:
            raise InvalidUsage(f"{self.name(key)} is required")
        return value or {}

    def group(self, key: str, *, required: bool = True) -> Fields:
        """An object inside this one."""
        return Fields(self.block(key, required=required), self.name(key))

    def finish(self) -> None:
        """Raises InvalidUsage for the fields that were not taken."""
        if self._rest:
            names = ", ".join(sorted(self.name(key) for key in self._rest))
            raise InvalidUsage(f"unknown field: {names}")


#: The fields of an envelope that name a column of the input.
_NAMING_COLUMNS = ("timestampColumn", "diffColumn", "orderColumn", "deleteColumn")
_KINDS: dict[type, str] = {str: "text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)
