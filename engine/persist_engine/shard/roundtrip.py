"""Does what is about to be committed lead others to the state that its maker has? A check for tests and for doubts."""

from __future__ import annotations

from dataclasses import fields, replace

from persist_engine.base.errors import check
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState


def validate_roundtrip(before: ShardState, data: bytes, after: ShardState) -> None:
    """InvariantViolated, naming the fields, unless the encoded diff `data` leads from `before` to `after` (whose tag it
    gives), and `after` survives being rolled up. Traces without structure are compared by their hollow batches: replicas may group those
    otherwise, and rebuild their levels (spec 20, bug 25).
    """
    key = f"{after.shard_id} {after.seqno}"
    diff = decode_state_diff(data, key=key)
    after = replace(after, tag=diff.tag)
    check(encode_state_diff(diff) == data, f"diff {key} is not what it decodes to")
    _check_same(f"diff {key}", apply(before, diff), after)
    _check_same(f"rollup {key}", decode_rollup(encode_rollup(Rollup(after)), key=key).state, after)


def _check_same(what: str, found: ShardState, wanted: ShardState) -> None:
    names = [field.name for field in fields(ShardState) if field.name != "trace"]
    wrong = [name for name in names if getattr(found, name) != getattr(wanted, name)]
    if not is_same_trace(found.trace, wanted.trace):
        wrong.append("trace")
    check(not wrong, f"{what} leads to another state: {', '.join(wrong)}", fields=wrong)


def is_same_trace(found: Trace, wanted: Trace) -> bool:
    """Whether replicas may have both at one version: without stored structure each groups empty batches as it met them."""
    if found.structured and wanted.structured:
        return found == wanted
    same_bounds = (found.since, found.upper) == (wanted.since, wanted.upper)
    return same_bounds and _with_data(found) == _with_data(wanted)


def _with_data(trace: Trace) -> list[object]:
    return [batch for batch in trace.batches() if not batch.is_empty()]
