"""The schemas of a shard: their ids, and how one replaces another. `rows.evolution` decides which may replace which."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.base.refusal import Refusal
from persist_engine.model.commands import SchemaEvolved
from persist_engine.model.maintenance import Maintenance
from persist_engine.rows.evolution import incompatibilities
from persist_engine.rows.schema import Schema
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine


@dataclass(frozen=True, slots=True)
class SchemaIncompatible(Refusal):
    """The shard's `current` schema cannot become the requested one. `reasons` name the fields."""

    reasons: tuple[str, ...]
    current: Schema

    @property
    def meaning(self) -> str:
        """See Refusal."""
        return f"the schema stays as it is, because {'; '.join(self.reasons)}"


def schema_id_of(machine: Machine, schema: Schema) -> int:
    """The id under which `schema` is registered, the newest if there are several. Makes no round trip when the id is known here; otherwise
    linearized. Raises SchemaMismatch, which names the columns, when the shard never had this schema.
    """
    found = _known_id(machine, schema)
    if found is None:
        machine.refresh()
        found = _known_id(machine, schema)
    if found is None:
        raise SchemaMismatch(
            f"shard {machine.shard_id} has another schema: {machine.schema.difference(schema)}",
            requested=repr(schema),
            actual=repr(machine.schema),
        )
    return found


def _known_id(machine: Machine, schema: Schema) -> int | None:
    pairs = machine.state.schemas.items()
    return next((schema_id for schema_id, pair in reversed(pairs) if Schema.from_pair(pair) == schema), None)


def evolve_schema(machine: Machine, schema: Schema) -> tuple[SchemaEvolved | SchemaIncompatible, Maintenance]:
    """Makes `schema` the shard's newest schema. Commits nothing if it already is. Returns SchemaIncompatible when it cannot replace the
    current one. Idempotent. Linearized, also with concurrent evolutions. Raises InvalidUsage once the shard is finalized.
    """
    while True:
        state = machine.refresh()
        current_id = max(state.schemas)
        current = Schema.from_pair(state.schemas[current_id])
        if current == schema:
            return SchemaEvolved(current_id), NO_MAINTENANCE
        reasons = incompatibilities(current, schema)
        if reasons:
            return SchemaIncompatible(reasons, current), NO_MAINTENANCE
        answer, maintenance = machine.compare_and_evolve_schema(schema.to_pair(), expected_id=current_id)
        if isinstance(answer, SchemaEvolved):
            return answer, maintenance
        if answer.current_id is None:
            raise InvalidUsage(f"shard {machine.shard_id} is finalized: its schema stays")
