"""The failed attempts of a request, and the failure that its client gets if no attempt succeeds."""

from services.core.errors import REJECTIONS, Failure, Reason, RefusedFor, refused_for
from services.frontend.migration.policy import DEATHS, Progress
from services.frontend.migration.recorder import Recorder


class AttemptHistory:
    """The failed attempts of one request. Created with the first failure: most requests have none."""

    __slots__ = ("_barren_deaths", "_cause", "_delivered_before", "_free_moves", "_moves", "_record", "_refusal")

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._moves = self._free_moves = 0
        self._barren_deaths = 0
        self._delivered_before = 0  # Tokens that the client had when the current attempt became the current one.
        self._cause: Failure | None = None
        self._refusal: Failure | None = None

    def progress(self) -> Progress:
        """How far the request has come."""
        record = self._record
        return Progress(self._moves, self._free_moves, record.count, record.is_tracking, self._barren_deaths)

    def begin_attempt(self) -> None:
        """Called when another attempt becomes the current one."""
        self._delivered_before = self._record.count

    def count_death(self, failure: Failure, *, has_begun: bool) -> None:
        """Count a worker that may have died of the request: its engine had begun, and delivered no token for it."""
        if self._record.count > self._delivered_before:
            self._barren_deaths = 0
        elif failure.reason in DEATHS and has_begun:
            self._barren_deaths += 1

    def count(self, failure: Failure, *, is_timed: bool) -> None:
        """Count a move after this failure.

        `is_timed`: a deadline bounds the moves after refusals, so that their number need not be bounded.
        """
        if failure.traits.free:
            self._free_moves += not is_timed
            if failure.reason is Reason.WORKER_AT_CAPACITY:
                self._refusal = failure if self._refusal is None else _most_specific(failure, self._refusal)
            return
        self._moves += 1
        self._cause = self._cause or failure

    def final_failure(self, failure: Failure) -> Failure:
        """The failure that the client gets when the request is given up after `failure`.

        After a loss it is the first loss, with `failure` appended; but a failure that no other worker could have
        avoided, such as INVALID_ARGUMENT, is passed on as it is.
        """
        cause = self._cause
        if cause is None:
            return failure if self._refusal is None else _most_specific(failure, self._refusal)
        if not (failure.traits.migrates or failure.reason in (Reason.NO_WORKERS, Reason.OVERLOADED)):
            return failure
        return Failure(cause.reason, f"{cause.detail}; and then: {failure.detail}", retry_after_s=failure.retry_after_s)


def _most_specific(last: Failure, refusal: Failure) -> Failure:
    """The more specific one of the last failure and an earlier refusal.

    A refusal says more than NO_WORKERS: the workers that are left out had refused. A bound that only the worker knows,
    such as its queued tokens, says more than CAPACITY, which holds for all workers.
    """
    if last.reason is Reason.NO_WORKERS:
        return refusal
    is_general = last.reason in REJECTIONS and refused_for(last) is RefusedFor.CAPACITY
    return refusal if is_general and refused_for(refusal) is not RefusedFor.CAPACITY else last
