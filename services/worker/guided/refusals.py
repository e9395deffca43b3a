"""What a worker's request gets when its guided field is refused, or the helper processes for it have no room."""

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid
from services.core.request import GuidedKind


def unusable(kind: GuidedKind | str, why: str) -> Failure:
    """INVALID_ARGUMENT. `why`: a sentence without a subject of its own."""
    return invalid("guided", f"guided.{kind} cannot be used: {why}")


def at_capacity(why: str) -> Failure:
    """WORKER_AT_CAPACITY: another worker may have room."""
    cause = {CAUSE: RefusedFor.PREPARATION}
    return Failure(Reason.WORKER_AT_CAPACITY, f"Server overloaded: {why}", metadata=cause)


def of_pool(failure: Failure) -> Failure:
    """What a failure of the pool of helpers is for a worker's request: OVERLOADED is said of the whole plane only."""
    return at_capacity(failure.detail) if failure.reason is Reason.OVERLOADED else failure
