"""Compares the schema of the spec with that of the stored shard: it is the same, a successor that the engine may register, or refused.
Compares the codecs of the spec, which never change. Pure.

A schema only grows (persist_engine.rows.evolution). While the spec has an impossible schema, a shard that was served before keeps its own
schema: it is maintained, and its sinks write it. A shard that this resource has not served yet is not changed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.inspection import Inspection
from persist_engine.rows.evolution import incompatibilities
from persist_engine.rows.schema import Schema

from persist_operator.api.conditions import Condition, reconciling, stalled
from persist_operator.api.redact import clip
from persist_operator.api.shard import Shard, ShardCodecs, ShardSchema
from persist_operator.api.shard_status import Ddl
from persist_operator.plan.observed import SCHEMA_REFUSED, ActionFailure

_RETRY_MS = 30_000
_MESSAGE_MAX = 4096


@dataclass(frozen=True, slots=True)
class Stopped:
    """The resource never served this shard, and the spec's schema is different or invalid."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The shard keeps its schema, because the spec's schema cannot succeed it."""

    message: str


@dataclass(frozen=True, slots=True)
class Evolves:
    """The shard will get this schema. `is_due`: the try is now; otherwise it waits after `failure`."""

    schema: ShardSchema
    is_due: bool = True
    failure: ActionFailure | None = None


Standing = Stopped | Refused | Evolves | None


def codecs_problem(shard: Shard, found: Inspection) -> str | None:
    """The difference of the spec's codecs from those that the stored shard records. None when the spec names none, or the same."""
    wanted, recorded = shard.spec.codecs, ShardCodecs(key=found.codecs.key, value=found.codecs.val)
    if wanted in {None, recorded}:
        return None
    return (
        f"shard {found.shard_id} records the codecs {recorded}, and spec.codecs wants {wanted}; nothing was changed: create the "
        "resource anew with the recorded codecs, or with another shardId"
    )


@functools.lru_cache(maxsize=1024)
def schema_problem(wanted: ShardSchema, actual: ShardSchema | None) -> str | None:
    """The reason why the wanted schema is invalid, or its difference from the actual schema (if there is one). None when it is right."""
    try:
        schema = Schema.from_ddl(wanted.key, wanted.value)
    except InvalidUsage as error:
        return f"spec.schema: {error}"
    if actual is None:
        return None
    difference = schema.difference(Schema.from_ddl(actual.key, actual.value))
    return None if difference is None else f"spec.schema differs from the shard's: {difference}"


def standing(shard: Shard, actual: ShardSchema, failure: ActionFailure | None, *, now_ms: int) -> Standing:
    """The relation of the spec's schema to the stored schema; None when nothing must be done. `failure`: of the last try to evolve."""
    wanted, is_served = shard.spec.schema, shard.known.schema != Ddl()
    problem = None if wanted is None else schema_problem(wanted, actual)
    if wanted is None or problem is None:
        return None
    is_invalid = schema_problem(wanted, None) is not None
    if not is_served:
        return Stopped("InvalidSchema" if is_invalid else "SchemaMismatch", problem)
    if is_invalid:
        return Refused(problem)
    reasons = incompatibilities(Schema.from_ddl(actual.key, actual.value), Schema.from_ddl(wanted.key, wanted.value))
    if reasons:
        return Refused(f"spec.schema cannot succeed the shard's: {'; '.join(reasons)}")
    if failure is None or failure.generation != shard.meta.generation:
        return Evolves(wanted)
    if failure.permanent:
        return Refused(failure.message)
    return Evolves(wanted, is_due=abs(now_ms - failure.at_ms) >= _RETRY_MS, failure=failure)


def conditions(found: Standing, ready: Condition) -> list[Condition]:
    """`ready`, or the conditions that replace it."""
    match found:
        case Refused(message):
            text = clip(
                f"{message}. Nothing was changed: maintenance goes on, and sinks write the old schema", _MESSAGE_MAX
            )
            return stalled(SCHEMA_REFUSED, text)
        case Evolves(failure=failure):
            reason = "EvolvingSchema" if failure is None else failure.reason
            text = "the shard gets the schema of the spec" if failure is None else failure.message
            return reconciling(reason, text)
        case _:
            return [ready]
