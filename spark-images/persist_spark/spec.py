"""The specification of one sink run: parses and checks `sink.json`. Owns the contents of its blocks `input`, `envelope`, `write`, `stream`;
`persist_engine.codec.sink_run` owns the document. Must not know: Spark, stores.

Every refusal is a ConfigurationError that names the field as the user wrote it (`input.format.name`), its value and
the allowed values.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import MIB
from persist_engine.codec.sink_run import Fields, SinkRun, decode_sink_run
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema

from persist_spark.inputs.secret_options import secret_options

#: The options of a stream of a shard for input.shard.refresh: everySeconds, alignedTo, at.
REFRESH_OPTIONS = ("refreshEvery", "refreshAlignedTo", "refreshAt")
#: The format of an input that a function makes.
PYTHON = "python"
#: The limit on write tasks. With more, a task has so little input that its start is not worthwhile.
PARALLELISM_MAX = 4096
#: The default in the resource definition.
TARGET_PART_BYTES = 64 * MIB
#: The default interval of a stream, and the longest interval.
COMMIT_INTERVAL_S, COMMIT_INTERVAL_S_MAX = 10, 3600
#: The default of how long a stopped stream waits for the batch in flight.
STOP_S = 30
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
#: Names of input options whose values must not appear in a message or a log.
SECRET_OPTION = re.compile(r"(?i)passw|secret|token|credential|access.?key|api.?key|private|jaas|keystore.key")
#: A shorter text from a Secret is not treated as secret.
_SECRET_CHARS_MIN = 4
#: A value in quotes within an option, such as the password in a `kafka.sasl.jaas.config`.
_QUOTED = re.compile(r"(?i)(?:passw|secret|token)\w*\s*=\s*(?:\"([^\"]+)\"|'([^']+)')")


class ConfigurationError(InvalidUsage):
    """The sink cannot run as declared, or its input is not as declared. A retry does not help. The message says what to change."""


class EnvelopeType(enum.StrEnum):
    """How rows of the input become updates. Append adds every row. Diff adds a row as often as one of its columns says. Mirror writes
    desired minus persisted. Upsert makes each row the only value of its key. Debezium does the same with the events of a Debezium
    connector.
    """

    APPEND = "Append"
    DIFF = "Diff"
    MIRROR = "Mirror"
    UPSERT = "Upsert"
    DEBEZIUM = "Debezium"

    @property
    def reads_back(self) -> bool:
        """Whether a run writes the difference from the contents of the shard."""
        return self is EnvelopeType.MIRROR or self.has_keys

    @property
    def has_keys(self) -> bool:
        """Whether a row is a command on its key."""
        return self in (EnvelopeType.UPSERT, EnvelopeType.DEBEZIUM)


class WriteMode(enum.StrEnum):
    """ReadWrite appends. ReadOnly compares the shard with the contents that a run would give it, and reports the difference."""

    READ_WRITE = "ReadWrite"
    READ_ONLY = "ReadOnly"


class OnError(enum.StrEnum):
    """What to do with a row that cannot be written. Fail ends the run, which writes nothing. Collect writes the reason as an error beside
    the rows (persist_engine.rows.errors_column).
    """

    FAIL = "Fail"
    COLLECT = "Collect"


#: The envelopes for which each field that names a column has a meaning.
_ENVELOPE_COLUMNS = {
    "timestampColumn": (EnvelopeType.APPEND, EnvelopeType.DIFF),
    "diffColumn": (EnvelopeType.DIFF,),
    "orderColumn": (EnvelopeType.UPSERT, EnvelopeType.DEBEZIUM),
    "deleteColumn": (EnvelopeType.UPSERT,),
}
_ATTRIBUTES = {
    "timestampColumn": "timestamp_column",
    "diffColumn": "diff_column",
    "orderColumn": "order_column",
    "deleteColumn": "delete_column",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFunction:
    """The function of the user that makes an input."""

    module: str
    function: str = "load"
    config_map: str | None = None
    """The ConfigMap with the files of the module. None: a module on Python's path."""
    folder: Path | None = None
    """The folder with the files of the ConfigMap."""

    @property
    def name(self) -> str:
        """The name in Python's notation: MODULE.FUNCTION."""
        return f"{self.module}.{self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A Spark source, and optional SQL over it as the view `input`."""

    format: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The options of the format. For `python`, the arguments of the function."""
    secret_options: frozenset[str] = frozenset()
    """The names of the options that come from a Secret."""
    schema: str | None = None
    sql: str | None = None
    allow_empty: bool = False
    """Whether an input without rows is valid (a Mirror becomes empty) instead of an error."""
    is_shard: bool = False
    """Whether the sink reads a shard, which the options name. The format is then `persist`."""
    keeps_malformed: bool = False
    """Whether a record that does not parse becomes a row with the reason in the column `err`, instead of an error."""
    python: PythonFunction | None = None
    """The function that makes the input. The format is then `python`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """How rows become updates."""

    type: EnvelopeType
    timestamp_column: str | None = None
    """Append and Diff: the column with the time of the update, in milliseconds."""
    diff_column: str | None = None
    """Diff: the column with the number of times that the row is added. A negative number removes the row."""
    order_column: str | None = None
    """Upsert and Debezium: if a key has several rows, the row with the greatest value in this column wins. For Debezium it may be the
    path of a field within a struct.
    """
    delete_column: str | None = None
    """Upsert: the boolean column that is true in a row which removes its key."""
    on_error: OnError = OnError.FAIL

    def __post_init__(self) -> None:
        for name, kinds in _ENVELOPE_COLUMNS.items():
            if getattr(self, _ATTRIBUTES[name]) is not None and self.type not in kinds:
                raise ConfigurationError(
                    f"envelope.{name}: it has no meaning for {self.type}, only for {' and '.join(kinds)}; remove it"
                )
        if self.type is EnvelopeType.DIFF and self.diff_column is None:
            raise ConfigurationError("envelope.diffColumn is required for Diff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """How updates become parts."""

    parallelism: int | None = None
    """The exact number of write tasks. None: it is derived from the size of the data."""
    target_part_bytes: int = TARGET_PART_BYTES
    """Target size of a part in memory. The memory of a write task grows with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """How a Streaming sink runs."""

    commit_interval_s: int = COMMIT_INTERVAL_S
    """The time from the beginning of one batch to the beginning of the next."""
    is_bounded: bool = False
    """Whether the stream ends when its source has no new rows."""
    stop_s: int = STOP_S
    """How long a stopped stream waits for the batch in flight."""
    fresh_s: int | None = None
    """How old the rows of the shard may become. None: the driver does not report how old they are."""
    stands_by: bool = False
    """Whether the driver begins on standby. It then writes nothing, and follows the writing driver until it is ordered to take over."""


@dataclass(frozen=True, slots=True)
class CompactionSpec:
    """A shard to compact, and its two stores. The addresses of the stores name files with credentials, and contain no secret."""

    shard_id: ShardId
    blob: str
    consensus: str
    full: bool = False
    """Whether all batches are merged into one."""
    max_bytes: int | None = None
    """The most bytes that all merges may read together, unless `full`. None: no bound."""
    record_days: int = 90
    """How many days the records of deletions are kept. 0: no records are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec:
    """One run of one sink. Every retry of a run has the same `run_id`, so that its data is appended once. In ids `<series>-<number>`,
    the greater number is the newer run. After it has appended, older runs append nothing.
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
    stream: Stream | None = None
    """None: one run over a batch source."""
    write_mode: WriteMode = WriteMode.READ_WRITE

    @property
    def run_token(self) -> bytes:
        """The sink's source progress that the run commits with its data."""
        return self.run_id.encode()

    @property
    def schema(self) -> Schema:
        """The declared schema of the shard. Raises ConfigurationError, which names the part that does not parse."""
        try:
            return Schema.from_ddl(self.key_ddl, self.value_ddl)
        except InvalidUsage as error:
            raise ConfigurationError(f"schema: {error}") from error

    def secrets(self) -> tuple[str, ...]:
        """The values of input options that must not be shown, the passwords within these values, and their single lines, because a log
        shows a text line by line. Short words of a Secret, such as `true`, are left out: they are not secret, and hiding them would make
        messages unreadable.
        """
        given = self.input.options.items()
        hidden = [v for k, v in given if v and SECRET_OPTION.search(k)]
        hidden += [v for k, v in given if k in self.input.secret_options and _is_long(v)]
        lines = [line.strip() for v in hidden for line in v.splitlines() if "\n" in v and _is_long(line.strip())]
        return (*hidden, *lines, *(text for v in hidden for pair in _QUOTED.findall(v) for text in pair if text))

    @classmethod
    def load(cls, path: Path, options: Path | None = None, code: Path | None = None) -> SinkSpec:
        """Reads and checks the file, and the folder `options` with the input's options from a Secret. `code`: the folder with the files of
        the input's ConfigMap. Raises ConfigurationError.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read the sink specification {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"the sink specification {path} is not JSON: {error}") from error
        return cls.parse(document, options, code)

    @classmethod
    def parse(cls, document: Any, options: Path | None = None, code: Path | None = None) -> SinkSpec:
        """Checks a decoded `sink.json`. `options` and `code`: see `load`. Raises ConfigurationError."""
        try:
            run = decode_sink_run(document)
            envelope = _parse_envelope(Fields(run.envelope, "envelope"))
            source = _parse_input(Fields(run.input, "input"), run, options, code)
            spec = cls(
                sink_id=run.sink_id,
                run_id=run.run_id,
                shard_id=run.shard_id,
                key_ddl=run.key_schema,
                value_ddl=run.val_schema,
                blob=run.blob,
                consensus=run.consensus,
                input=replace(source, keeps_malformed=envelope.on_error is OnError.COLLECT),
                envelope=envelope,
                write=_parse_write(Fields(run.write, "write")),
                purpose=run.purpose,
                stream=None if run.stream is None else _parse_stream(Fields(run.stream, "stream")),
                write_mode=_parse_write_mode(run.write_mode),
            )
            if spec.stream is not None:
                _check_stream(spec)
            if spec.write_mode is WriteMode.READ_ONLY and not spec.envelope.type.reads_back:
                raise ConfigurationError(
                    f"writeMode: an {spec.envelope.type} adds its rows to what the shard holds, so there is nothing to compare; choose "
                    "Mirror, Upsert or Debezium, or writeMode ReadWrite"
                )
            return spec
        except ConfigurationError:
            raise
        except InvalidUsage as error:
            raise ConfigurationError(str(error)) from error


def _is_long(text: str) -> bool:
    return len(text) >= _SECRET_CHARS_MIN and text.lower() not in {"true", "false"}


def _parse_input(fields: Fields, run: SinkRun, options: Path | None, code: Path | None) -> Input:
    kind = fields.optional_text("type") or "Format"
    if kind == "Shard":
        return _parse_shard_input(fields, run)
    if kind not in {"Format", "Python"}:
        raise ConfigurationError(f"input.type: {kind!r} is not supported, must be 'Format', 'Shard' or 'Python'")
    is_format = kind == "Format"
    source = fields.group("format" if is_format else "python")
    given, secret = source.text_map("options" if is_format else "arguments"), source.optional_text("optionsSecretName")
    added = {} if secret is None else secret_options(source.name("optionsSecretName"), secret, options, given)
    parsed = Input(
        format=source.text("name") if is_format else PYTHON,
        options={**given, **added},
        secret_options=frozenset(added),
        schema=source.optional_text("schema") if is_format else None,
        sql=source.optional_text("sql"),
        allow_empty=fields.flag("allowEmpty"),
        python=None if is_format else _parse_function(source, code),
    )
    source.finish()
    fields.finish()
    return parsed


def _parse_function(source: Fields, code: Path | None) -> PythonFunction:
    module, function = source.text("module"), source.optional_text("function") or "load"
    for name, value, is_valid in (
        ("module", module, all(part.isidentifier() for part in module.split("."))),
        ("function", function, function.isidentifier()),
    ):
        if not is_valid:
            raise ConfigurationError(
                f"{source.name(name)}: {value!r} is not a name in Python; write it as in an import"
            )
    config_map = source.optional_text("configMapName")
    return PythonFunction(module=module, function=function, config_map=config_map, folder=code)


def _parse_shard_input(fields: Fields, run: SinkRun) -> Input:
    """Parses `input.shard`. Without `source` in the document, the name or id is looked up in the stores that the sink writes."""
    shard, source = fields.group("shard"), run.source
    name, columns = shard.text("name"), shard.texts("columns")
    options = {
        "shard": name if source is None else source.shard_id,
        "blob": run.blob if source is None else source.blob,
        "consensus": run.consensus if source is None else source.consensus,
        "as_of": shard.optional_text("asOf"),
        "where": shard.optional_text("where"),
        "columns": ",".join(columns) or None,
        "rows": None if run.stream is None else "updates",
        **_refresh_options(shard.group("refresh", required=False)),
    }
    if run.stream is None and any(options.get(name) for name in REFRESH_OPTIONS):
        raise ConfigurationError("input.shard.refresh: it only has a meaning for a stream; remove it")
    if run.stream is not None and options["as_of"] is not None:
        raise ConfigurationError("input.shard.asOf: it has no meaning for a stream; remove it")
    parsed = Input(
        format="persist",
        options={name: value for name, value in options.items() if value is not None},
        sql=shard.optional_text("sql"),
        allow_empty=fields.flag("allowEmpty"),
        is_shard=True,
    )
    shard.finish()
    fields.finish()
    return parsed


def _refresh_options(refresh: Fields) -> dict[str, str | None]:
    """The options of the stream that choose its refreshes."""
    every, at = refresh.take("everySeconds", int), ",".join(refresh.texts("at"))
    options = (None if every is None else f"{every}s", refresh.optional_text("alignedTo"), at or None)
    refresh.finish()
    return dict(zip(REFRESH_OPTIONS, options, strict=True))


def _parse_envelope(fields: Fields) -> Envelope:
    name = fields.text("type")
    if name not in set(EnvelopeType):
        raise ConfigurationError(f"envelope.type: {name!r} is not supported, must be one of {', '.join(EnvelopeType)}")
    columns = {attribute: fields.optional_text(field) for field, attribute in _ATTRIBUTES.items()}
    on_error = fields.optional_text("onError") or OnError.FAIL
    if on_error not in set(OnError):
        raise ConfigurationError(
            f"envelope.onError: {on_error!r} is not supported, must be one of {', '.join(OnError)}"
        )
    fields.finish()
    return Envelope(type=EnvelopeType(name), on_error=OnError(on_error), **columns)


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


def _parse_write_mode(mode: str | None) -> WriteMode:
    if mode is not None and mode not in set(WriteMode):
        raise ConfigurationError(f"writeMode: {mode!r} is not supported, must be one of {', '.join(WriteMode)}")
    return WriteMode.READ_WRITE if mode is None else WriteMode(mode)


def _parse_stream(fields: Fields) -> Stream:
    stream = Stream(
        commit_interval_s=_seconds(fields, "commitIntervalSeconds", COMMIT_INTERVAL_S, least=1),
        is_bounded=fields.flag("bounded"),
        stop_s=_seconds(fields, "stopSeconds", STOP_S, least=0),
        fresh_s=fields.take("freshSeconds", int),
        stands_by=fields.flag("standby"),
    )
    fields.finish()
    return stream


def _seconds(fields: Fields, name: str, default: int, *, least: int) -> int:
    seconds: int | None = fields.take(name, int)
    if seconds is not None and not least <= seconds <= COMMIT_INTERVAL_S_MAX:
        raise ConfigurationError(f"{fields.name(name)}: {seconds} is outside [{least}, {COMMIT_INTERVAL_S_MAX}]")
    return default if seconds is None else seconds


def _check_stream(spec: SinkSpec) -> None:
    """Refuses settings with which a stream could not keep its guarantees."""
    if spec.write_mode is WriteMode.READ_ONLY and spec.stream is not None and spec.stream.stands_by:
        raise ConfigurationError(
            "rollout.strategy: a ReadOnly stream commits nothing that a second driver could follow; choose Recreate, or writeMode ReadWrite"
        )
    if spec.envelope.type is EnvelopeType.MIRROR:
        raise ConfigurationError(
            "envelope.type: a Streaming sink cannot be a Mirror, because a batch holds new rows, not all desired contents of the shard; "
            "choose Append, or mode Once or Scheduled"
        )
    if spec.input.is_shard and spec.envelope.type is not EnvelopeType.DIFF:
        raise ConfigurationError(
            f"envelope.type: {spec.envelope.type} would lose the rows that are taken away from the shard that the sink reads; choose Diff "
            "with diffColumn _diff, or mode Once or Scheduled"
        )
    if spec.input.python is None:  # streaming/sources.py checks the stream of a function
        check_losses(spec.input.options)


def check_losses(options: Mapping[str, str]) -> None:
    """Refuses options of a source with which a stream would skip lost rows."""
    for name, value in options.items():
        if name.lower() == "failondataloss" and value.strip().lower() == "false":
            raise ConfigurationError(
                f"input.format.options.{name}: must not be false, because the sink would pass over rows that the source has lost; "
                "remove the option"
            )


def _bytes_of(quantity: int | str, name: str) -> int:
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ConfigurationError(f"{name}: {quantity!r} is not a quantity of bytes such as 128Mi")
    return int(Decimal(match[1]) * _UNITS[match[2] or ""])
