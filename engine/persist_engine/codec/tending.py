"""Converts wishes and answers of `model.tending` to JSON texts and back. A wish is one argument of a command line. An answer fits
into the termination message of a container (4096 bytes, a limit of Kubernetes).

Invariant: every text either parses to a value within the limits named here, or raises InvalidUsage, which says why. Another process
may have forged the answer.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.secrets import without_secrets
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection, ReaderInfo
from persist_engine.model.ownership import OwnedElsewhere, Owner, Unowned
from persist_engine.model.state import CodecNames
from persist_engine.model.tending import (
    READERS_MAX,
    KnownLog,
    NoSuchShard,
    NotTended,
    Tended,
    Tending,
    WantedHold,
    WantedSchema,
    Wish,
)
from persist_engine.rows.schema import Schema

FORMAT = 3
REPORT_BYTES_MAX = 4096
_UNPACKED_BYTES_MAX = 256 << 10
_DDL_MAX, _CODEC_MAX, _WORDS_MAX, _MESSAGE_MAX = 65_536, 64, 128, 1500
_COUNT_MAX, _TIME_MAX = (1 << 63) - 1, (1 << 64) - 1
#: The limit on counts of readers and writers, because statuses hold these in 32 bits.
_LEFT_OUT_MAX = 1_000_000_000
_HEX = re.compile(r"[0-9a-f]{0,128}")
_KIND = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]+")
#: The fields of an inspection that a report holds as counts, or not at all.
_LEFT_OUT = frozenset({"readers", "writers", "progress"})
_TIMES, _HEXES, _DDLS = (
    frozenset({"since", "upper", "retained_since"}),
    frozenset({"birth", "tag", "known_tag"}),
    ("key_schema", "val_schema"),
)


def encode_wish(wish: Wish) -> str:
    """One line of JSON; inverse of `decode_wish`. It has no dollar signs, because Kubernetes replaces `$(NAME)` in arguments."""
    document = {"format": FORMAT, **dataclasses.asdict(wish), "owner": str(wish.owner)}
    if wish.take_over is not None:
        document["take_over"] = {"shard_id": wish.take_over.shard_id, "owner": str(wish.take_over.owner)}
    return json.dumps(document, sort_keys=True).replace("$", "\\u0024")


def decode_wish(text: str) -> Wish:
    """Inverse of `encode_wish`. Raises InvalidUsage for any other text."""
    found = _Fields(_loaded(text), "the wish")
    found.expect("format", lambda one: one == FORMAT, f"{FORMAT}: another release of persist wrote it")
    wanted, take_over, known, schema, codecs, hold, evolve = (
        found.take(name) for name in ("wanted", "take_over", "known", "schema", "codecs", "hold", "evolve")
    )
    wish = Wish(
        owner=Owner.parse(found.text("owner", 4096)),
        wanted=None if wanted is None else ShardId(wanted),
        proposed=ShardId(found.text("proposed", _WORDS_MAX)),
        take_over=None if take_over is None else _owned_elsewhere(_Fields(take_over, "take_over"), 4096),
        known=None if known is None else _known(_Fields(known, "known")),
        schema=None if schema is None else _ddls(schema),
        codecs=None
        if codecs is None
        else _pair(codecs, _CODEC_MAX, "codecs are the names of those of keys and of values"),
        hold=None if hold is None else _hold(_Fields(hold, "hold")),
        evolve=None if evolve is None else _evolve(_Fields(evolve, "evolve")),
    )
    found.end()
    return wish


def encode_report(answer: Tending) -> str:
    """One line of at most 4096 bytes. It is compressed when it is long. If it is too long even then, it is NotTended (ReportTooLong)."""
    document = json.dumps({"format": FORMAT, **_document(answer)}, separators=(",", ":"))
    if len(document) <= REPORT_BYTES_MAX:
        return document
    packed = base64.b64encode(zlib.compress(document.encode(), 9)).decode()
    line = json.dumps({"format": FORMAT, "packed": packed}, separators=(",", ":"))
    if len(line) <= REPORT_BYTES_MAX:
        return line
    if isinstance(answer, NotTended):  # shorten the message, because the kind matters more
        return encode_report(dataclasses.replace(answer, message=answer.message[: len(answer.message) // 2]))
    text = f"schema and readers of the shard take {len(packed)} bytes, more than a termination message holds: use a storage profile"
    return encode_report(NotTended("ReportTooLong", text))


def decode_report(document: object) -> Tending:
    """The answer in a report that was parsed as JSON. Raises InvalidUsage for any document that `encode_report` would not write."""
    found = _Fields(document, "the report")
    found.expect("format", lambda one: one == FORMAT, f"{FORMAT}: is the engine's image of the operator's release?")
    if "packed" in found.left:
        packed = found.text("packed", REPORT_BYTES_MAX)
        found.end()
        found = _Fields(_loaded(_unpacked(packed)), "the report")
        found.expect("format", lambda one: one == FORMAT, f"{FORMAT}")
    answer = _ANSWERS[found.choice("answer", _ANSWERS)](found)
    found.end()
    return answer


def _document(answer: Tending) -> dict[str, Any]:
    match answer:
        case Tended(inspection=seen):
            fields = {
                one.name: getattr(seen, one.name) for one in dataclasses.fields(Inspection) if one.name not in _LEFT_OUT
            }
            named = [
                {
                    **dataclasses.asdict(one),
                    "purpose": _words(one.purpose, _WORDS_MAX),
                    "hostname": _words(one.hostname, _WORDS_MAX),
                }
                for one in seen.readers
            ]
            return {
                "answer": "Tended",
                **fields,
                "codecs": dataclasses.asdict(seen.codecs),
                "applier_version": _words(seen.applier_version, _WORDS_MAX),
                "readers": named,
                "readers_left_out": answer.readers_left_out,
                "writers_left_out": answer.writers_left_out,
                "hold_problem": _words(without_secrets(answer.hold_problem), _MESSAGE_MAX),
                "schema_problem": _words(answer.schema_problem, _MESSAGE_MAX),
                "schema_generation": answer.schema_generation,
            }
        case NoSuchShard(shard_id):
            return {"answer": "NoSuchShard", "shard_id": shard_id}
        case OwnedElsewhere(shard_id, owner):
            return {"answer": "OwnedElsewhere", "shard_id": shard_id, "owner": str(owner)}
        case Unowned(shard_id):
            return {"answer": "Unowned", "shard_id": shard_id}
        case NotTended(kind, message):
            return {"answer": "NotTended", "kind": kind, "message": _words(without_secrets(message), _MESSAGE_MAX)}


def _words(text: str, characters: int) -> str:
    return _CONTROL.sub(" ", text)[:characters]


class _Fields:
    """The fields of one JSON object. Each is taken once. `end` refuses the fields that are left."""

    def __init__(self, document: object, what: str) -> None:
        if not isinstance(document, Mapping):
            raise InvalidUsage(f"{what} is not a JSON object")
        self.left, self._what = dict(document), what

    def take(self, name: str) -> Any:
        if name not in self.left:
            raise InvalidUsage(f"{self._what} has no {name}")
        return self.left.pop(name)

    def expect(self, name: str, is_good: Callable[[Any], bool], wanted: str) -> Any:
        value = self.take(name)
        if not is_good(value):
            raise InvalidUsage(f"{self._what}: {name} is not {wanted}")
        return value

    def text(self, name: str, characters: int) -> str:
        wanted = f"a text of at most {characters} characters, none of them control characters"
        text: str = self.expect(
            name, lambda one: isinstance(one, str) and len(one) <= characters and not _CONTROL.search(one), wanted
        )
        return text

    def flag(self, name: str) -> bool:
        return self.expect(name, lambda one: isinstance(one, bool), "true or false") is True

    def count(self, name: str, *, most: int = _COUNT_MAX, optional: bool = False) -> int | None:
        def is_good(one: Any) -> bool:
            return (one is None and optional) or (
                isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= most
            )

        count: int | None = self.expect(name, is_good, f"a whole number up to {most}")
        return count

    def hex(self, name: str, *, optional: bool = False) -> str | None:
        def is_good(one: Any) -> bool:
            return (one is None and optional) or (isinstance(one, str) and _HEX.fullmatch(one) is not None)

        text: str | None = self.expect(name, is_good, "hex digits")
        return text

    def choice(self, name: str, known: Mapping[str, Any]) -> str:
        text: str = self.expect(name, lambda one: isinstance(one, str) and one in known, f"one of {', '.join(known)}")
        return text

    def shard_id(self) -> ShardId:
        return ShardId(self.text("shard_id", _WORDS_MAX))

    def end(self) -> None:
        if self.left:
            raise InvalidUsage(f"{self._what} has a field too many: {str(next(iter(self.left)))[:64]!r}")


def _loaded(text: str) -> object:
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"not JSON: {error}") from error
    return document


def _unpacked(packed: str) -> str:
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(base64.b64decode(packed, validate=True), _UNPACKED_BYTES_MAX)
        text = raw.decode()
    except (ValueError, zlib.error) as error:
        raise InvalidUsage(f"the report does not unpack: {error}") from error
    if not unpacker.eof:
        raise InvalidUsage(f"the report unpacks to more than {_UNPACKED_BYTES_MAX} bytes, or is cut off")
    return text


def _known(found: _Fields) -> KnownLog:
    known = KnownLog(seqno=found.count("seqno") or 0, birth=found.hex("birth") or "", tag=found.hex("tag") or "")
    found.end()
    return known


def _owned_elsewhere(found: _Fields, characters: int) -> OwnedElsewhere:
    answer = OwnedElsewhere(found.shard_id(), Owner.parse(found.text("owner", characters)))
    found.end()
    return answer


def _hold(found: _Fields) -> WantedHold:
    hold = WantedHold(
        shard_id=found.shard_id(),
        critical_id=CriticalReaderId(found.text("critical_id", _WORDS_MAX)),
        purpose=found.text("purpose", _WORDS_MAX),
        since_lag_ms=found.count("since_lag_ms") or 0,
        since_min=found.count("since_min", most=_TIME_MAX) or 0,
    )
    found.end()
    return hold


def _evolve(found: _Fields) -> WantedSchema:
    shard_id, generation = found.shard_id(), found.count("generation") or 0
    key, value = _ddls([found.take(name) for name in ("key", "value")])
    found.end()
    return WantedSchema(shard_id=shard_id, key=key, value=value, generation=generation)


def _ddls(document: object) -> tuple[str, str]:
    pair = _pair(document, _DDL_MAX, "a schema is the DDL of the key and that of the value")
    Schema.from_ddl(*pair)
    return pair


def _pair(document: object, characters: int, what: str) -> tuple[str, str]:
    if (
        not isinstance(document, list)
        or len(document) != 2
        or not all(isinstance(one, str) and len(one) <= characters for one in document)
    ):
        raise InvalidUsage(what)
    return (document[0], document[1])


def _codecs(document: object) -> CodecNames:
    found = _Fields(document, "codecs")
    codecs = CodecNames(*(found.text(name, _CODEC_MAX) for name in ("key", "val", "time", "diff")))
    found.end()
    return codecs


def _tended(found: _Fields) -> Tended:
    readers = found.expect("readers", lambda one: isinstance(one, list) and len(one) <= READERS_MAX + 1, "a short list")
    values: dict[str, Any] = {"readers": tuple(map(_reader, readers)), "writers": (), "progress": {}}
    values["codecs"] = _codecs(found.take("codecs"))
    values["key_schema"], values["val_schema"] = _ddls([found.take(name) for name in _DDLS])
    for one in dataclasses.fields(Inspection):
        if one.name not in values:
            values[one.name] = _field(found, one.name, str(one.type))
    ShardId(values["shard_id"])
    return Tended(
        inspection=Inspection(**values),
        readers_left_out=found.count("readers_left_out", most=_LEFT_OUT_MAX) or 0,
        writers_left_out=found.count("writers_left_out", most=_LEFT_OUT_MAX) or 0,
        hold_problem=found.text("hold_problem", _MESSAGE_MAX),
        schema_problem=found.text("schema_problem", _MESSAGE_MAX),
        schema_generation=found.count("schema_generation") or 0,
    )


def _field(found: _Fields, name: str, annotation: str) -> Any:
    optional = annotation.endswith(" | None")
    if name in _HEXES:
        return found.hex(name, optional=optional)
    match annotation.removesuffix(" | None"):
        case "int":
            return found.count(name, most=_TIME_MAX if name in _TIMES else _COUNT_MAX, optional=optional)
        case "bool":
            return found.flag(name)
        case "str":
            return found.text(name, _WORDS_MAX)
        case _:
            raise AssertionError(f"Inspection.{name} has no form in a report")


def _reader(document: object) -> ReaderInfo:
    found = _Fields(document, "a reader")
    reader = ReaderInfo(
        id=found.text("id", _WORDS_MAX),
        kind="leased" if found.choice("kind", {"leased": 1, "critical": 1}) == "leased" else "critical",
        since=found.count("since", most=_TIME_MAX, optional=True),
        seqno=found.count("seqno", optional=True),
        purpose=found.text("purpose", _WORDS_MAX),
        hostname=found.text("hostname", _WORDS_MAX),
        last_heartbeat_ms=found.count("last_heartbeat_ms", optional=True),
    )
    found.end()
    return reader


def _not_tended(found: _Fields) -> NotTended:
    kind = found.expect("kind", lambda one: isinstance(one, str) and _KIND.fullmatch(one) is not None, "a word")
    return NotTended(kind, found.text("message", _MESSAGE_MAX))


_ANSWERS: Mapping[str, Callable[[_Fields], Tending]] = {
    "Tended": _tended,
    "NoSuchShard": lambda found: NoSuchShard(found.shard_id()),
    "OwnedElsewhere": lambda found: _owned_elsewhere(found, 1024),
    "Unowned": lambda found: Unowned(found.shard_id()),
    "NotTended": _not_tended,
}
