"""What an exception means to the resource that it met: an ActionFailure for the next plan, or conditions when there is no plan.

Must not know: how often and when. No traceback and no secret leaves from here; the log has the traceback.
"""

from __future__ import annotations

from persist_engine.base.errors import InvalidUsage, PersistError

from persist_operator.api.conditions import Condition
from persist_operator.api.redact import clip, redact
from persist_operator.bridge import BridgeFailure
from persist_operator.cluster.port import ApiError
from persist_operator.plan.observed import ACTION_REFUSED, ActionFailure

_MESSAGE_MAX = 2048
_WHAT_TO_DO = {
    0: "tried again by itself",
    400: "change the spec",
    401: "let the operator's service account in",
    403: "let the namespace's quota, its pod security level, its admission policies or the operator's roles allow it",
    404: "is the namespace gone?",
    409: "what stands in its way has to go",
    422: "change the spec",
    429: "tried again by itself",
}
#: The same request can only be refused again.
_PERMANENT = {400, 422}


def is_passing(error: Exception) -> bool:
    """Whether the API server did not answer or was not up to it: gone, as a rule, a moment later."""
    return isinstance(error, ApiError) and (error.status in {0, 429} or error.status >= 500)


def as_failure(error: Exception, before: ActionFailure | None, *, generation: int, now_ms: int) -> ActionFailure:
    """What the next plan needs to know of an action that raised. `before`: the refusal that it follows, if any."""
    if isinstance(error, ApiError):
        reason, permanent = ACTION_REFUSED, error.status in _PERMANENT
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
        generation=generation,
    )


def outcome(error: Exception) -> list[Condition]:
    """What the status says when the resource could not be looked at or planned for."""
    message = _words(error)
    if isinstance(error, ApiError):
        reason = "ObservationRefused"
        return [Condition("Ready", "Unknown", reason, message), Condition("Reconciling", "True", reason, message)]
    reason = "InvalidSpec" if isinstance(error, InvalidUsage) else "InternalError"
    return [Condition("Ready", "False", reason, message), Condition("Stalled", "True", reason, message)]


def _words(error: Exception) -> str:
    if isinstance(error, ApiError):
        told = f"{error}; {_WHAT_TO_DO.get(error.status, 'tried again by itself')}"
    elif isinstance(error, BridgeFailure | InvalidUsage):
        told = str(error)
    else:
        told = f"{type(error).__name__}: {error}; the operator's log has more"
    return clip(redact(told), _MESSAGE_MAX)
