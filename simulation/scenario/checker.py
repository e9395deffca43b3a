"""What must hold of the answers of a run, whatever its faults were."""

from collections.abc import Iterable

from services.core.flow.client_flow import ClientBounds
from simulation.clients.answer import Answer, Choice, Visit
from simulation.clients.client import DROPPED
from simulation.scenario.history import History
from simulation.scenario.oracle import expected_choice
from simulation.scenario.plan import BYTES_ENOUGH, RECORDS_ENOUGH, Plan, RequestPlan

LOST = frozenset(
    {"NO_WORKERS", "CANNOT_CONNECT", "DISCONNECTED", "STALLED", "DRAINING", "STREAM_INCOMPLETE", "PROTOCOL_VIOLATION"}
)
"""How a request fails that has lost its worker."""
FULL = frozenset({"OVERLOADED", "WORKER_AT_CAPACITY"})
MOVES_MAX = 3
"""Moves of a request, where its client sets no limit of its own."""
LATE_S = 1.0
"""How long after its deadline an answer may end."""


class Checker:
    """Judges the answers to the requests of a plan by what has struck meanwhile."""

    def __init__(self, plan: Plan, history: History) -> None:
        self._plan = plan
        self._history = history

    def check(self, request: RequestPlan, answer: Answer) -> Iterable[str]:
        """Yield what is wrong with an answer."""
        name = f"request {request.number}"
        if request.is_foreign and (answer.token_count or answer.is_complete or answer.usage or answer.cursor):
            yield f"{name}: has got some of another tenant's answer"
        yield from (f"{name}: {fault}" for fault in answer.faults)
        for index, choice in enumerate(answer.choices):
            is_whole = choice.finish is not None or answer.is_complete
            yield from _check_choice(request, index, choice, is_whole=is_whole)
        if answer.is_complete:
            yield from _check_usage(request, answer)
        elif answer.failure is None and not answer.has_left and not answer.losses:
            yield f"{name}: has neither an end nor a failure"
        for visit in answer.visits:
            yield from (f"{name} at {visit.frontend}: {fault}" for fault in self._check_visit(request, answer, visit))

    def _check_visit(self, request: RequestPlan, answer: Answer, visit: Visit) -> Iterable[str]:
        is_away = self._history.may_be_away(visit.frontend, visit.began_s, visit.ended_s)
        # The end of an answer waits so long for its client, which gets no reason then.
        is_late = visit.ended_s - visit.began_s >= ClientBounds().drain_s_max
        may_be_cut = request.reader == "slow" and (is_late or self._plan.client_bytes_max < BYTES_ENOUGH)
        if visit.loss not in ("", DROPPED) and not (is_away or may_be_cut):
            yield f"lost its connection without a cause: {visit.loss}"
        if visit.ending not in ("", "complete") and visit.ending not in self._allowed(request, answer, visit):
            yield f"failed with {visit.ending}, for which there is no cause: {answer.detail}"
        yield from self._check_deadline(request, visit)

    def _check_deadline(self, request: RequestPlan, visit: Visit) -> Iterable[str]:
        lasted_s, deadline_s = visit.ended_s - visit.began_s, request.deadline_s
        if deadline_s is None or visit.is_resume or request.reader == "slow" or lasted_s <= deadline_s + LATE_S:
            return
        if self._history.is_calm(visit.began_s, visit.ended_s):
            yield f"ended {lasted_s - deadline_s:.3f} s after its deadline"

    def _allowed(self, request: RequestPlan, answer: Answer, visit: Visit) -> frozenset[str]:
        """The reasons with which the request may fail, under the faults that have struck until then."""
        plan, history = self._plan, self._history
        since, until = answer.visits[0].began_s, visit.ended_s
        allowed: set[str] = set()
        if plan.is_tight or history.has_filled(until):
            allowed |= FULL
        if request.deadline_s is not None:
            allowed.add("DEADLINE_EXCEEDED")
        if self._is_cancelled(request):
            allowed.add("CANCELLED")
        if request.reader == "slow":
            allowed.add("SLOW_CLIENT")
        if history.has_drained(visit.frontend, visit.began_s, until):
            allowed |= {"DRAINING", "CANCELLED"}
        if self._may_lose(request, since, until) or history.may_be_away(visit.frontend, visit.began_s, until):
            allowed |= LOST
        if history.may_lack_view(visit.frontend, visit.began_s):
            allowed.add("NO_WORKERS")
        if history.kill_count(since, until) and history.loss_count(since, until) > 1:
            allowed.add("POISON_REQUEST")
        if request.is_kept:
            allowed.update(self._allowed_of_kept(request, answer, visit))
        return frozenset(allowed)

    def _may_lose(self, request: RequestPlan, since: float, until: float) -> bool:
        """Whether there may have been no worker for it, or it has moved as often as it may."""
        limit = MOVES_MAX if request.migration_limit is None else request.migration_limit
        losses = self._history.loss_count(since, until)
        if self._plan.is_tight and (losses or self._history.has_filled(until)):
            return True  # The workers that are left have no room for it.
        return losses > limit or self._history.may_lack_workers(since, until)

    def _allowed_of_kept(self, request: RequestPlan, answer: Answer, visit: Visit) -> Iterable[str]:
        """How a client may fail that comes back."""
        if request.is_foreign:
            yield "STREAM_NOT_FOUND"
            if self._plan.odd_worker or self._history.loss_count(answer.visits[0].began_s, visit.ended_s):
                yield from LOST
            return
        rivals = [
            one for one in self._plan.requests if request.number in (one.number, one.rival_of) and not one.is_foreign
        ]
        has_resumed_before = any(one.is_resume and one.began_s < visit.began_s for one in answer.visits)
        if request.rival_of is not None or len(rivals) > 1 or has_resumed_before:
            yield "TAKEN_OVER"  # Of two resumes at once, the one with the higher number wins.
        if not visit.is_resume:
            return
        if self._plan.odd_worker or self._history.loss_count(answer.visits[0].began_s, visit.ended_s):
            yield from LOST  # A worker that may have the answer cannot be asked.
        yield "STREAM_EXPIRED"
        may_have_ended = request.deadline_s is not None or self._is_cancelled(request) or self._plan.is_tight
        was_never_there = request.rival_of is not None or not answer.token_count
        # A worker that is away, or was, still has its records; they are gone with it, or once a request has failed.
        is_lost = self._history.kill_count(answer.visits[0].began_s, visit.ended_s) > 0
        is_lost |= any(one.ending not in ("", "complete") for one in answer.visits if one is not visit)
        if is_lost or may_have_ended or was_never_there or self._plan.records_max < RECORDS_ENOUGH:
            yield "STREAM_NOT_FOUND"

    def _is_cancelled(self, request: RequestPlan) -> bool:
        numbers = (request.number, None if request.is_foreign else request.rival_of)
        return any(one.reader == "cancels" and one.number in numbers for one in self._plan.requests)


def _check_choice(request: RequestPlan, index: int, choice: Choice, *, is_whole: bool) -> Iterable[str]:
    name, expected = f"request {request.number} choice {index}", expected_choice(request, index)
    token_ids = tuple(choice.token_ids)
    if token_ids != expected.token_ids[: len(token_ids)]:
        yield f"{name}: tokens {token_ids} are not those of {expected.token_ids}"
    if not expected.text.startswith(choice.text):
        yield f"{name}: the text {choice.text!r} does not begin {expected.text!r}"
    if not is_whole:
        return
    if (got := (token_ids, choice.text, choice.finish)) != (expected.token_ids, expected.text, expected.finish):
        yield f"{name}: ended as {got}, expected {expected}"
    if request.logprobs is not None and choice.logprob_count != len(token_ids):
        yield f"{name}: {choice.logprob_count} log probabilities of {len(token_ids)} tokens"


def _check_usage(request: RequestPlan, answer: Answer) -> Iterable[str]:
    completion = sum(len(expected_choice(request, index).token_ids) for index in range(request.choice_count))
    expected = (sum(len(prompt.encode()) for prompt in request.prompts), completion)
    if answer.usage != expected:
        yield f"request {request.number}: the usage is {answer.usage}, expected {expected}"
