"""Applies defaults, structural validation and CEL rules to a resource, as the API server does before it stores one.

One difference is intended: an unknown field is an error here, as with `kubectl apply --validate=strict`, while the API server drops it.
The CRD files are the only source of the definitions. The module is pure, except that it reads each file once.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml
from persist_engine.base.errors import InvalidUsage

from persist_operator.api import names

if TYPE_CHECKING:
    import cel

Json = Any
#: In a checkout, a symbolic link to `crds/` at the root. Builds copy the linked files.
_CRDS = Path(__file__).parents[1] / "crds"
#: Commands wait for the definitions. The C loader reads them seven times as fast, but not every build of PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class SchemaError:
    """One error and the path of the field. `str()` gives one line for people."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def crd_dir() -> Path:
    """The folder of the CRD files."""
    return _CRDS


def printer_columns(kind: str) -> list[Mapping[str, Json]]:
    """The columns of `kubectl get` for this kind; none for a kind that no CRD file defines."""
    for path in sorted(crd_dir().glob("*.yaml")):
        crd = _definition(path)
        if crd["spec"]["names"]["kind"] == kind:
            columns: list[Mapping[str, Json]] = _stored_version(crd).get("additionalPrinterColumns", [])
            return columns
    return []


class ResourceSchemas:
    """The schemas of the kinds in the CRD files. Immutable after construction."""

    def __init__(self, definitions: Sequence[Mapping[str, Json]]) -> None:
        self._schemas = {
            crd["spec"]["names"]["kind"]: _stored_version(crd)["schema"]["openAPIV3Schema"] for crd in definitions
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that have a schema."""
        return tuple(sorted(self._schemas))

    def schema(self, kind: str) -> Mapping[str, Json]:
        """The schema of the whole resource. Raises InvalidUsage for an unknown kind."""
        if kind not in self._schemas:
            raise InvalidUsage(f"unknown kind {kind!r}, expected one of {', '.join(self.kinds)}")
        schema: Mapping[str, Json] = self._schemas[kind]
        return schema

    def default(self, resource: Mapping[str, Json]) -> dict[str, Json]:
        """A deep copy of `resource` with the defaults of its schema. Idempotent."""
        defaulted: dict[str, Json] = copy.deepcopy(dict(resource))
        _default(self.schema(str(resource.get("kind"))), defaulted)
        return defaulted

    def check(self, resource: Mapping[str, Json], old: Mapping[str, Json] | None = None) -> list[SchemaError]:
        """The errors for which the API server would refuse to create `resource`, or to change `old` into it; empty when it is valid.

        Takes the resource as the user wrote it and fills in the defaults first. CEL rules run only when the structure is valid.
        """
        if not isinstance(resource, Mapping):
            return [SchemaError("", "a resource must be a mapping")]
        if resource.get("apiVersion") != names.API_VERSION:
            return [SchemaError("apiVersion", f"must be {names.API_VERSION}, not {resource.get('apiVersion')!r}")]
        kind = resource.get("kind")
        if not isinstance(kind, str) or kind not in self._schemas:
            return [SchemaError("kind", f"must be one of {', '.join(self.kinds)}, not {kind!r}")]
        metadata = resource.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str):
            problem = "is required" if name is None else f"must be a string, not {name!r}: put it in quotes"
            return [SchemaError("metadata.name", problem)]
        schema, defaulted = self.schema(resource["kind"]), self.default(resource)
        errors = [
            *_structure_errors(schema, defaulted),
            *_unknown_fields(schema, defaulted, ""),
            *_duplicates(schema, defaulted, ""),
        ]
        if errors:
            return errors
        return list(_rule_errors(schema, defaulted, None if old is None else self.default(old), ""))


@functools.cache
def load_schemas(folder: Path | None = None) -> ResourceSchemas:
    """The schemas from the CRD files of `folder` (`crd_dir()` when None). Read once per process."""
    files = sorted((folder or crd_dir()).glob("*.yaml"))
    if not files:
        raise InvalidUsage(f"no resource definitions in {folder or crd_dir()}")
    return ResourceSchemas([_definition(file) for file in files])


@functools.cache
def _definition(file: Path) -> Mapping[str, Json]:
    definition: Mapping[str, Json] = yaml.load(file.read_text(encoding="utf-8"), _LOADER)  # noqa: S506 - safe, both of them
    return definition


def _stored_version(crd: Mapping[str, Json]) -> Mapping[str, Json]:
    version: Mapping[str, Json] = next(one for one in crd["spec"]["versions"] if one["storage"])
    return version


def _default(schema: Mapping[str, Json], value: Json) -> None:
    """Fill in the defaults. A field that is null counts as absent, as on the API server, for which no field of ours may be null."""
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), _values(schema)
        for name in [one for one, given in value.items() if given is None and (one in known or others)]:
            del value[name]
        for name, child in known.items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
        for name, given in value.items():
            if name in known or others:
                _default(known.get(name, others), given)
    elif isinstance(value, list):
        for item in value:
            _default(schema.get("items", {}), item)


def _values(schema: Mapping[str, Json]) -> Mapping[str, Json]:
    """The schema of the values of a map; empty for an object with fields of its own, and for one that may hold anything."""
    found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else {}


def _pattern(validator: Any, pattern: str, value: Json, schema: Json) -> Iterator[jsonschema.ValidationError]:
    """Matches `$` at the very end only, as the API server does. In Python, `$` also matches before a final line break."""
    if (
        isinstance(value, str)
        and re.search(pattern.removesuffix("$") + (r"\Z" if pattern.endswith("$") else ""), value) is None
    ):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]  # unannotated in its stubs
    jsonschema.Draft202012Validator, {"pattern": _pattern}
)


def _structure_errors(schema: Mapping[str, Json], value: Json) -> Iterator[SchemaError]:
    validator = _Validator(schema)
    for error in sorted(validator.iter_errors(value), key=lambda one: [str(part) for part in one.absolute_path]):
        path = ".".join(str(part) for part in error.absolute_path)
        yield SchemaError(path, error.message if len(error.message) < 400 else f"{error.validator} is violated")


def _unknown_fields(schema: Mapping[str, Json], value: Json, path: str) -> Iterator[SchemaError]:
    if schema.get("x-kubernetes-preserve-unknown-fields") or path in {"metadata", "status"}:
        return
    if isinstance(value, Mapping) and "properties" in schema:
        for name, child in value.items():
            where = f"{path}.{name}" if path else str(name)
            if name in schema["properties"]:
                yield from _unknown_fields(schema["properties"][name], child, where)
            else:
                yield SchemaError(where, f"unknown field; known here: {', '.join(sorted(schema['properties']))}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_fields(schema.get("items", {}), item, f"{path}[{index}]")


def _duplicates(schema: Mapping[str, Json], value: Json, path: str) -> Iterator[SchemaError]:
    if isinstance(value, Mapping):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                yield from _duplicates(child, value[name], f"{path}.{name}" if path else name)
    elif isinstance(value, list) and schema.get("x-kubernetes-list-type") == "set":
        for index, item in enumerate(value):
            if item in value[:index]:
                yield SchemaError(f"{path}[{index}]", f"Duplicate value: {item!r}")


def _rule_errors(schema: Mapping[str, Json], value: Json, old: Json, path: str) -> Iterator[SchemaError]:
    """Evaluates the rules of this node, then those of its children. A rule that uses oldSelf runs only when there is an old value."""
    for rule in schema.get("x-kubernetes-validations", ()):
        transition = "oldSelf" in rule["rule"]
        if transition and old is None:
            continue
        if not _holds(rule["rule"], {"self": value, **({"oldSelf": old} if transition else {})}):
            yield SchemaError(f"{path}{rule.get('fieldPath', '')}".lstrip("."), rule["message"])
    if isinstance(value, Mapping):
        for name, child in schema.get("properties", {}).items():
            if name in value:
                before = old.get(name) if isinstance(old, Mapping) else None
                yield from _rule_errors(child, value[name], before, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _rule_errors(schema.get("items", {}), item, None, f"{path}[{index}]")


def _holds(rule: str, variables: Mapping[str, Json]) -> bool:
    """Whether the rule holds. False when its evaluation fails, as on the API server; a rule must guard with has()."""
    try:
        return _program(rule).execute(dict(variables)) is True
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False


@functools.cache
def _program(rule: str) -> cel.Program:
    """The compiled rule. Cached, because compiling a rule takes longer than evaluating it."""
    # The module imports a command line, which is an eighth of the imports of `persist local get`. Most commands, and the operator, check no
    # rule.
    import cel

    return cel.compile(rule)
