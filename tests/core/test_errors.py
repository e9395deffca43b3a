"""Failures: one table says for every reason what clients see, who may retry, and whether a worker is to blame."""

import pytest
from grpc import StatusCode

from services.core.errors import (
    TRAITS,
    Failure,
    Reason,
    RefusedFor,
    Traits,
    invalid,
    quoted,
    refused_for,
    wait_for_slot_s,
)

LOST = {"CANNOT_CONNECT", "DISCONNECTED", "STALLED", "STREAM_INCOMPLETE", "PROTOCOL_VIOLATION", "ENGINE_DEAD"}
FREE = {"WORKER_AT_CAPACITY", "DRAINING"}
REQUEST = {"INVALID_ARGUMENT", "BODY_TOO_LARGE", "PROMPT_TOO_LONG", "MODEL_NOT_FOUND", "INSTANCE_NOT_FOUND"}
RESUME = {"TAKEN_OVER", "STREAM_NOT_FOUND", "STREAM_EXPIRED", "RESUME_DIVERGED", "CURSOR_BEYOND_END"}


def where(**wanted: object) -> set[str]:
    """The reasons with these traits."""
    return {reason for reason, traits in TRAITS.items() if all(getattr(traits, k) == v for k, v in wanted.items())}


def test_every_reason_has_a_row_and_a_value_of_its_own() -> None:
    assert set(TRAITS) == set(Reason)
    assert all(reason.value == name for name, reason in Reason.__members__.items()), "equal values become one member"


def test_lost_workers_are_blamed_and_moves_away_from_them_count() -> None:
    assert where(blames_worker=True) == LOST
    assert where(migrates=True, free=False) == LOST


def test_moves_after_refusals_are_free_and_blame_no_worker() -> None:
    assert where(free=True) == FREE
    assert where(migrates=True) == LOST | FREE


def test_a_failure_that_the_request_itself_causes_is_never_retried() -> None:
    assert where(kind="invalid_request_error") == REQUEST | RESUME
    assert not where(kind="invalid_request_error", retryable=True)
    assert not where(kind="invalid_request_error", migrates=True)


@pytest.mark.parametrize("reason", [Reason.DEADLINE_EXCEEDED, Reason.CANCELLED])
def test_a_deadline_and_a_cancel_end_a_request_for_good(reason: Reason) -> None:
    traits = TRAITS[reason]

    assert [traits.migrates, traits.retryable, traits.blames_worker] == [False] * 3
    assert traits.grpc is StatusCode[reason]


@pytest.mark.parametrize(
    ("reason", "http", "grpc"),
    [
        (Reason.STREAM_NOT_FOUND, 404, StatusCode.NOT_FOUND),
        (Reason.STREAM_EXPIRED, 410, StatusCode.NOT_FOUND),
        (Reason.RESUME_DIVERGED, 409, StatusCode.ABORTED),
        (Reason.TAKEN_OVER, 409, StatusCode.ABORTED),
        (Reason.CURSOR_BEYOND_END, 416, StatusCode.OUT_OF_RANGE),
    ],
)
def test_a_refused_resume_has_a_status_that_says_why(reason: Reason, http: int, grpc: StatusCode) -> None:
    assert (TRAITS[reason].http, TRAITS[reason].grpc) == (http, grpc)


@pytest.mark.parametrize("reason", Reason)
def test_every_row_has_an_error_status_and_a_hint(reason: Reason) -> None:
    traits: Traits = TRAITS[reason]

    assert traits.grpc not in (StatusCode.OK, StatusCode.UNKNOWN)
    assert 400 <= traits.http <= 599
    assert (traits.hint is None) == (reason is Reason.INVALID_ARGUMENT), "its detail says what to change"
    assert traits.hint is None or traits.hint.endswith(".")
    assert traits.free is False or traits.migrates, "only a move can be free"


def test_retryable_failures_have_a_retryable_status() -> None:
    """Clients in other languages look at the status alone."""
    statuses = {TRAITS[Reason(reason)].grpc for reason in where(retryable=True)}

    assert statuses == {StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED, StatusCode.INTERNAL}


def test_the_text_of_a_failure_is_its_reason_and_detail() -> None:
    failure = Failure(Reason.STALLED, "silent for 1 s", retry_after_s=2.0)

    assert str(failure) == "STALLED: silent for 1 s"
    assert (failure.traits, failure.retry_after_s, failure.param) == (TRAITS[Reason.STALLED], 2.0, None)


def test_invalid_names_the_field() -> None:
    failure = invalid("top_p", "top_p is 2: it must be at most 1")

    assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "top_p")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("gpt", "'gpt'"), ("a\nb", r"'a\nb'"), ("x" * 201, f"'{'x' * 200}'")],
    ids=["short", "lines", "long"],
)
def test_a_clients_text_is_quoted_and_shortened(given: str, expected: str) -> None:
    assert quoted(given) == expected


@pytest.mark.parametrize(("waiting", "slots", "expected_s"), [(0, 1, 8.0), (3, 1, 32.0), (3, 4, 8.0), (0, 4, 2.0)])
def test_a_request_waits_for_all_before_it_and_one_more_at_the_rate_of_all_slots(
    waiting: int, slots: int, expected_s: float
) -> None:
    assert wait_for_slot_s(waiting, 8.0, slots) == expected_s


def test_clearing_the_tracebacks_drops_the_frames_of_a_failure_and_of_its_causes() -> None:
    """Under a storm of refusals, these frames were most of what the garbage collector looked at."""

    def fail() -> None:
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise Failure(Reason.INTERNAL, "a bug") from error

    try:
        fail()
    except Failure as caught:
        failure = caught

    failure.clear_tracebacks()

    assert failure.__traceback__ is None
    assert failure.__cause__ is not None
    assert failure.__cause__.__traceback__ is None


@pytest.mark.parametrize("cause", RefusedFor)
def test_the_bound_behind_a_refusal_is_read_from_the_metadata(cause: RefusedFor) -> None:
    assert refused_for(Failure(Reason.OVERLOADED, "full", metadata={"cause": cause.value})) is cause


@pytest.mark.parametrize("metadata", [{}, {"cause": "from the future"}], ids=["none", "unknown"])
def test_without_a_known_bound_a_refusal_is_for_capacity(metadata: dict[str, str]) -> None:
    assert refused_for(Failure(Reason.WORKER_AT_CAPACITY, "full", metadata=metadata)) is RefusedFor.CAPACITY
