"""Two meanings of empty: without rows, and without parts."""

from __future__ import annotations

from persist_engine.model.spine.trace import Trace
from persist_kit.states import batch, description


def test_the_spine_goes_by_rows_and_a_hollow_batch_by_parts() -> None:
    """Spec 11.14: a batch with a part and no rows is fused with an empty one, as if it had no parts."""
    named = batch(1, 2, 0, keys=("w/p1",))
    assert not named.is_empty()
    trace, _ = Trace().push(batch(0, 1))
    trace, requests = trace.push(named)
    assert requests == ()
    (fused,) = trace.batches()
    assert fused.is_empty()
    assert fused.desc == description(0, 2)
