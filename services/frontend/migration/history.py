"""What a request has lost on its way: workers, and places that it was refused; and what its client is told of it."""

from services.core.errors import REJECTIONS, Failure, Reason, RefusedFor, refused_for
from services.frontend.migration.policy import DEATHS, Progress
from services.frontend.migration.recorder import Recorder


class AttemptHistory:
    """Of one request, from its first loss on: most have none."""

    __slots__ = ("_barren_deaths", "_cause", "_free_moves", "_given_before", "_moves", "_record", "_refusal")

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._moves = self._free_moves = 0
        self._barren_deaths = 0
        self._given_before = 0  # Tokens that the client had when the current leg became the current one.
        self._cause: Failure | None = None
        self._refusal: Failure | None = None

    def progress(self) -> Progress:
        """How far it has come."""
        record = self._record
        return Progress(self._moves, self._free_moves, record.count, record.is_tracking, self._barren_deaths)

    def begin_leg(self) -> None:
        """Another leg is the current one."""
        self._given_before = self._record.count

    def count_death(self, failure: Failure, *, has_begun: bool) -> None:
        """A worker that dies while it has given the request no token may have died of it, if it had begun with it."""
        if self._record.count > self._given_before:
            self._barren_deaths = 0
        elif failure.reason in DEATHS and has_begun:
            self._barren_deaths += 1

    def count(self, failure: Failure, *, is_timed: bool) -> None:
        """It goes on elsewhere after this. is_timed: only until a time, which bounds the moves that are free."""
        if failure.traits.free:
            self._free_moves += not is_timed
            if failure.reason is Reason.WORKER_AT_CAPACITY:
                self._refusal = failure if self._refusal is None else _refused_by_all(failure, self._refusal)
            return
        self._moves += 1
        self._cause = self._cause or failure

    def last_word(self, failure: Failure) -> Failure:
        """What cost the request its worker and became of the last try to go on; or what no other worker could mend."""
        cause = self._cause
        if cause is None:
            return failure if self._refusal is None else _refused_by_all(failure, self._refusal)
        if not (failure.traits.migrates or failure.reason in (Reason.NO_WORKERS, Reason.OVERLOADED)):
            return failure
        return Failure(cause.reason, f"{cause.detail}; and then: {failure.detail}", retry_after_s=failure.retry_after_s)


def _refused_by_all(last: Failure, refusal: Failure) -> Failure:
    """What a request is told that nobody took: not that there is no worker, for those with room have refused it before;
    and what only a worker could know, such as that too many tokens wait, before what is known of all.
    """
    if last.reason is Reason.NO_WORKERS:
        return refusal
    is_general = last.reason in REJECTIONS and refused_for(last) is RefusedFor.CAPACITY
    return refusal if is_general and refused_for(refusal) is not RefusedFor.CAPACITY else last
