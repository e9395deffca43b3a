"""What must hold of the answers of a run, whatever its faults were."""

from collections.abc import Iterable
from itertools import pairwise

from simulation.clients.answer import Answer, Choice
from simulation.scenario.oracle import expected_choice
from simulation.scenario.plan import SLOTS_ENOUGH, Plan, RequestPlan

OVERLAP_S = 8.0
"""Faults within this time of each other count as simultaneous: detection, restart and quarantine take as long."""
LOST = frozenset(
    {
        "NO_WORKERS",
        "CANNOT_CONNECT",
        "DISCONNECTED",
        "STALLED",
        "DRAINING",
        "STREAM_INCOMPLETE",
        "POISON_REQUEST",
        "ENGINE_DEAD",
    }
)


def check_answer(plan: Plan, request: RequestPlan, answer: Answer) -> Iterable[str]:
    """Yield what is wrong with an answer."""
    name = f"request {request.number}"
    yield from (f"{name}: {fault}" for fault in answer.faults)
    for index, choice in enumerate(answer.choices):
        is_whole = choice.finish is not None or answer.is_complete
        yield from _check_choice(request, index, choice, is_whole=is_whole)
    if answer.is_complete:
        yield from _check_usage(request, answer)
    elif answer.failure is not None:
        if answer.failure not in allowed_failures(plan, request):
            yield f"{name}: failed with {answer.failure} ({answer.detail}), for which there is no cause"
    elif not answer.has_left and not may_lose(plan, request):
        yield f"{name}: lost its connection without a cause: {answer.losses}"


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
    completion = sum(len(expected_choice(request, index).token_ids) for index in range(request.n))
    expected = (len(request.prompt.encode()), completion)
    if answer.usage != expected:
        yield f"request {request.number}: the usage is {answer.usage}, expected {expected}"


def allowed_failures(plan: Plan, request: RequestPlan) -> frozenset[str]:
    """The reasons with which a request may fail under these faults."""
    allowed: set[str] = set()
    if plan.slots < SLOTS_ENOUGH:
        allowed |= {"OVERLOADED", "WORKER_AT_CAPACITY"}
    if request.deadline_s is not None:
        allowed |= {"DEADLINE_EXCEEDED"}
    if any(one.reader == "cancels" and one.number in (request.number, request.rival_of) for one in plan.requests):
        allowed |= {"CANCELLED"}
    if request.reader == "slow":
        allowed |= {"SLOW_CLIENT"}
    if request.is_kept:
        allowed |= {"STREAM_NOT_FOUND", "STREAM_EXPIRED", "TAKEN_OVER", "NO_WORKERS"}
    if may_be_without_workers(plan):
        allowed |= LOST
    if any(fault.target.startswith("frontend") for fault in plan.faults if fault.kind == "drain"):
        allowed |= {"DRAINING", "CANCELLED"}
    return frozenset(allowed)


def may_be_without_workers(plan: Plan) -> bool:
    """Whether all workers, or the way to them, may be away at the same time, or a request lose more than it may."""
    times = sorted(
        fault.at_s
        for fault in plan.faults
        if "worker" in fault.target + fault.other or (fault.target.startswith("frontend"))
    )
    return len(times) >= plan.workers or any(b - a < OVERLAP_S for a, b in pairwise(times))


def may_lose(plan: Plan, request: RequestPlan) -> bool:
    """Whether its connection may break."""
    return any(fault.target == f"frontend-{request.frontend}" for fault in plan.faults) or request.is_kept
