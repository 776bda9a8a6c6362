"""Checks that the bytes about to be committed lead other processes to the committer's state. For tests and diagnosis."""

from __future__ import annotations

from dataclasses import fields, replace

from persist_engine.base.errors import check
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState


def validate_roundtrip(before: ShardState, data: bytes, after: ShardState) -> None:
    """Raises InvariantViolated, with the names of the fields, unless the encoded diff `data` leads from `before` to `after` (and gives its
    tag), and `after` survives a round trip through a rollup. Traces without structure are compared by their hollow batches, because
    replicas may group those differently and rebuild their levels (spec 20, bug 25).
    """
    key = f"{after.shard_id} {after.seqno}"
    diff = decode_state_diff(data, key=key)
    after = replace(after, tag=diff.tag)
    check(encode_state_diff(diff) == data, f"diff {key} is not what it decodes to")
    _check_same(f"diff {key}", apply(before, diff), after)
    _check_same(f"rollup {key}", decode_rollup(encode_rollup(Rollup(after)), key=key).state, after)


def _check_same(what: str, actual: ShardState, wanted: ShardState) -> None:
    names = [field.name for field in fields(ShardState) if field.name != "trace"]
    wrong = [name for name in names if getattr(actual, name) != getattr(wanted, name)]
    if not is_same_trace(actual.trace, wanted.trace):
        wrong.append("trace")
    check(not wrong, f"{what} leads to another state: {', '.join(wrong)}", fields=wrong)


def is_same_trace(found: Trace, wanted: Trace) -> bool:
    """Whether replicas may hold both traces at one version. Without stored structure, each replica groups empty batches in the order in
    which it received them.
    """
    if found.structured and wanted.structured:
        return found == wanted
    same_bounds = (found.since, found.upper) == (wanted.since, wanted.upper)
    return same_bounds and _with_data(found) == _with_data(wanted)


def _with_data(trace: Trace) -> list[object]:
    return [batch for batch in trace.batches() if not batch.is_empty()]
