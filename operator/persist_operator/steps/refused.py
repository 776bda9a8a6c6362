"""Converts an exception to an ActionFailure for the next plan, or to conditions when there is no plan.

Must not know: retries and their times. The results contain no traceback and no secret; the log has the traceback.
"""

from __future__ import annotations

import re

from persist_engine.base.errors import InvalidUsage, PersistError

from persist_operator.api import conditions
from persist_operator.api.conditions import Condition
from persist_operator.api.redact import clip, redact
from persist_operator.bridge import BridgeFailure
from persist_operator.cluster.port import ApiError
from persist_operator.plan.observed import ACTION_REFUSED, ActionFailure
from persist_operator.steps.places import Queued

_MESSAGE_MAX = 2048
_FORBIDDEN = 403
_WHAT_TO_DO = {
    400: "change the spec",
    401: "let the operator's service account in",
    _FORBIDDEN: "let the namespace's quota, its pod security level, its admission policies or the operator's roles allow it",
    404: "create what it does not find",
    422: "change the spec",
}
_ENDS_WITH_NAMESPACE = (
    "no pod starts there any more; a PersistShard whose deletion waits for one goes with reclaimPolicy: Retain, and its data stay; or "
    "end the shard by hand, as docs/howto/delete-a-shard.md says"
)
#: Codes with which the API server must refuse the same request again, unless an admission policy or a webhook refused it.
_PERMANENT = {400, 422}
#: The API server's message when a policy or a webhook refused. The code does not show it: a policy without its own reason answers 422.
_ADMISSION = re.compile(r"denied (the )?request\b")
#: The API server's message for a new object in a namespace that is being deleted. Its code is also 403.
_ENDING = "because it is being terminated"


def _is_by_admission(error: ApiError) -> bool:
    """Whether an admission policy or a webhook refused the request. The policy may change while the resource stays the same."""
    return _ADMISSION.search(str(error)) is not None


def is_passing(error: Exception) -> bool:
    """Whether the API server did not answer or had an internal failure. Such a failure usually passes in a moment."""
    return isinstance(error, ApiError) and (error.status in {0, 429} or error.status >= 500)


def as_failure(error: Exception, before: ActionFailure | None, *, generation: int, now_ms: int) -> ActionFailure:
    """The failure of an action that raised an error, for the next plan. `before`: the refusal of the previous try, if there was one."""
    if isinstance(error, Queued):
        reason, permanent = error.reason, False
    elif isinstance(error, ApiError):
        reason, permanent = ACTION_REFUSED, error.status in _PERMANENT and not _is_by_admission(error)
    elif isinstance(error, PersistError):
        reason, permanent = error.kind.value, isinstance(error, InvalidUsage)
    else:
        reason, permanent = "InternalError", True
    again = before is not None and before.generation == generation
    return ActionFailure(
        reason=reason,
        message=_words(error),
        permanent=permanent,
        at_ms=now_ms,
        count=before.count + 1 if before is not None and again else 1,
        place=error.place if isinstance(error, Queued) else 0,
        generation=generation,
    )


def outcome(error: Exception) -> list[Condition]:
    """The conditions of a resource whose observation or planning raised an error."""
    message = _words(error)
    if isinstance(error, ApiError):
        return conditions.reconciling("ObservationRefused", message, ready="Unknown")
    return conditions.stalled("InvalidSpec" if isinstance(error, InvalidUsage) else "InternalError", message)


def _words(error: Exception) -> str:
    if isinstance(error, ApiError):
        status = _FORBIDDEN if _is_by_admission(error) else error.status
        what_to_do = (
            _ENDS_WITH_NAMESPACE if _ENDING in str(error) else _WHAT_TO_DO.get(status, "the operator tries again")
        )
        text = f"{error}; {what_to_do}"
    elif isinstance(error, BridgeFailure | InvalidUsage | Queued):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}; see the operator's log"
    return clip(redact(text), _MESSAGE_MAX)
