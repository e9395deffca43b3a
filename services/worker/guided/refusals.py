"""What a worker's request gets when the helper processes for guided fields have no room for it."""

from services.core.errors import CAUSE, Failure, Reason, RefusedFor


def at_capacity(why: str) -> Failure:
    """WORKER_AT_CAPACITY: another worker may have room."""
    cause = {CAUSE: RefusedFor.PREPARATION}
    return Failure(Reason.WORKER_AT_CAPACITY, f"Server overloaded: {why}", metadata=cause)


def of_pool(failure: Failure) -> Failure:
    """What a failure of the pool of helpers is for a worker's request: OVERLOADED is said of the whole plane only."""
    return at_capacity(failure.detail) if failure.reason is Reason.OVERLOADED else failure
