"""Checks whether the log of a shard is still the log of its status: `status.log`, its comparison with the store, and the request that
accepts another log. A store that lost versions and has grown since looks sound to a process that did not know the earlier versions.
"""

from __future__ import annotations

from persist_engine.model.inspection import Inspection

from persist_operator.api import names
from persist_operator.api.shard import Shard
from persist_operator.api.shard_status import LogEntry
from persist_operator.plan.hints import Recover, Request, Words

#: The request that accepts a log after it lost versions. It follows `persistshard.io/request-`.
ACCEPT = "accept-log"


def known_seqno(shard: Shard) -> int | None:
    """The newest version on the status; None before the first one."""
    known = shard.known
    return known.frontiers.seqno if known.log.seqno is None else known.log.seqno


def entry(inspection: Inspection) -> LogEntry:
    """The value of status.log: the birth of the log, and its newest entry."""
    return LogEntry(birth=inspection.birth, seqno=inspection.seqno, tag=inspection.tag)


def accept_token(shard: Shard) -> str | None:
    """The token of the request that accepts the present log; None when there is no such request or it was already handled."""
    token = names.request_token(shard.meta.annotations, ACCEPT)
    return token if token and token != shard.known.handled(ACCEPT) else None


def was_recovered(shard: Shard, inspection: Inspection) -> bool:
    """Whether `persist admin recover` began this log to replace the log of the status."""
    return inspection.is_recovered_from(shard.known.log.birth or "")


def loss(shard: Shard, inspection: Inspection, words: Words) -> str | None:
    """The evidence in the log that known versions are gone, and the remedies. None when there is no evidence, when a request accepts the
    log, and when the log was recovered.
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
        f"{what}: the consensus store lost acknowledged versions, and maintenance is stopped. Restore the store; or recover "
        f"what the blob store holds with {words(Recover(str(inspection.shard_id)))}; or accept the log as it is: "
        f"{words(Request(ACCEPT))}"
    )
