"""Moving the times of a staged batch without touching its data (spec 10.6, 10.7).

A rewrite is metadata: every part carries the frontier that its times are advanced to when it is read. It lets a batch
be staged before the time is known at which it will be appended.
"""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.errors import InvalidBatchBounds, InvalidRewrite
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain, Description


def rewritten(batch: HollowBatch, frontier: Antichain, new_upper: Antichain) -> HollowBatch:
    """`batch` with all times advanced to `frontier` and registered up to `new_upper`. Idempotent.

    InvalidRewrite unless frontier < new_upper, updates may have the time `frontier`, neither steps back behind the batch's
    own bounds nor behind an earlier rewrite, and the batch is as a user wrote it (since at the minimum).
    """
    desc = batch.desc
    if frontier.time is not None and frontier.time > DATA_TIME_MAX:  # read, its rows would lie before it
        raise InvalidRewrite(f"batch {desc} rewritten to {frontier}: no update is later than {DATA_TIME_MAX}")
    if not frontier < new_upper:
        raise InvalidRewrite(f"batch {desc} rewritten to {frontier}, at or past its new upper {new_upper}")
    if not desc.upper <= new_upper:
        raise InvalidRewrite(f"batch {desc} rewritten to the upper {new_upper}, before its own")
    if not desc.lower <= frontier:
        raise InvalidRewrite(f"batch {desc} rewritten to {frontier}, before its lower")
    if desc.since != MINIMUM:
        raise InvalidRewrite(f"batch {desc} was compacted and cannot be rewritten")
    for part in batch.parts:
        if part.ts_rewrite is not None and not part.ts_rewrite <= frontier:
            raise InvalidRewrite(f"batch {desc} rewritten to {frontier}, before an earlier {part.ts_rewrite}")
    parts = tuple(replace(part, ts_rewrite=frontier) for part in batch.parts)
    return replace(batch, desc=Description(desc.lower, new_upper, desc.since), parts=parts)


def check_truncation(batch: HollowBatch, lower: Antichain, upper: Antichain, *, any_rewritten: bool) -> None:
    """Whether `batch` may be registered under [lower, upper). With any rewrite in the call nothing is cut off above: a
    rewritten update that is cut could not be told from one that was never there.
    """
    desc = batch.desc
    if any_rewritten:
        if upper != desc.upper:
            raise InvalidRewrite(f"rewritten batch {desc} appended with upper {upper}")
        for frontier in [part.ts_rewrite or desc.lower for part in batch.parts]:
            if not lower <= frontier:
                raise InvalidRewrite(
                    f"batch {desc} rewritten to {frontier}, before the lower {lower} it is appended with"
                )
    if not (desc.lower <= lower and upper <= desc.upper):
        raise InvalidBatchBounds(
            f"batch {desc} does not cover [{lower}, {upper})",
            batch_lower=desc.lower,
            batch_upper=desc.upper,
            append_lower=lower,
            append_upper=upper,
        )
