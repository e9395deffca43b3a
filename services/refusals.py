"""Which bound a refusal for want of capacity has met, for programs: OVERLOADED and WORKER_AT_CAPACITY have several.

It travels as `cause` in the failure's metadata. These are not reasons, for clients act the same on all of them: only
whoever runs the plane does not.
"""

from enum import StrEnum

from services.errors import Failure, Reason

REJECTIONS = frozenset({Reason.WORKER_AT_CAPACITY, Reason.OVERLOADED})
CAUSE = "cause"
"""Its name in a failure's metadata."""


class RefusedFor(StrEnum):
    """capacity: as many requests as run and wait at most. busy_threshold: some worker has room, but those that have are
    over a threshold. queue_tokens: prompt tokens that wait. queue_timeout: how long one may wait. preparation: requests
    that are made ready aside, before they count as any of these.
    """

    CAPACITY = "capacity"
    BUSY_THRESHOLD = "busy_threshold"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_TIMEOUT = "queue_timeout"
    PREPARATION = "preparation"


_BY_NAME = {one.value: one for one in RefusedFor}


def refused_for(failure: Failure) -> RefusedFor:
    """The bound that a refusal has met. Of one that does not say, or names what is not known here: capacity."""
    return _BY_NAME.get(failure.metadata.get(CAUSE, ""), RefusedFor.CAPACITY)
