"""Whether the log of a shard is still the one that the status tells of: `status.log`, what it is compared with, and who may
accept another one. A store that lost versions and has grown since looks sound to everybody who did not know it before.
"""

from __future__ import annotations

from persist_engine.model.inspection import Inspection

from persist_operator.api import names
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import LogEntry
from persist_operator.plan.hints import Recover, Request, Words

#: The request that accepts a log which lost versions, after `persistshard.io/request-`.
ACCEPT = "accept-log"


def known_seqno(shard: Shard) -> int | None:
    """The newest version that the status tells of."""
    known = shard.known
    return known.frontiers.seqno if known.log.seqno is None else known.log.seqno


def entry(inspection: Inspection) -> LogEntry:
    """status.log: which log this is, and its newest entry."""
    return LogEntry(birth=inspection.birth, seqno=inspection.seqno, tag=inspection.tag)


def accept_token(shard: Shard) -> str | None:
    """The token of an annotation that accepts whatever log there is, when it was not handled yet."""
    token = shard.meta.annotations.get(f"{names.REQUEST_PREFIX}{ACCEPT}", "")[:64]
    return token if token and token != shard.known.handled(ACCEPT) else None


def was_recovered(shard: Shard, inspection: Inspection) -> bool:
    """Whether `persist admin recover` began this log anew in the place of the one that the status tells of."""
    return inspection.is_recovered_from(shard.known.log.birth or "")


def loss(shard: Shard, inspection: Inspection, words: Words) -> str | None:
    """What shows that versions which the status tells of are gone, and what to do; None when nothing does, when somebody
    accepted it, and for a log that was recovered on purpose.
    """
    if accept_token(shard) is not None or was_recovered(shard, inspection):
        return None
    birth, tag, seqno = shard.known.log.birth, shard.known.log.tag, known_seqno(shard)
    if birth and inspection.birth != birth:
        what = f"the log that was known, born as {birth}, was replaced by one born as {inspection.birth}"
    elif seqno is not None and inspection.seqno < seqno:
        what = f"the state went back from v{seqno} to v{inspection.seqno}"
    elif tag and inspection.known_tag is not None and inspection.known_tag != tag:
        what = f"v{seqno} is another entry than it was: the log was rolled back and has grown again"
    else:
        return None
    return (
        f"{what}: the consensus store lost acknowledged versions, and maintenance is stopped. Restore the store; or bring back "
        f"what blobs hold with {words(Recover(str(inspection.shard_id)))}; or go on with the log as it is: {words(Request(ACCEPT))}"
    )
