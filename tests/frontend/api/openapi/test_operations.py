"""Each operation lists its body, its answer, its headers and every reason that it can fail with."""

import pytest

from services.core.errors import Reason
from services.frontend.api.openapi.operations import ANSWER_REASONS, OPERATIONS, Operation

CALLS = list(OPERATIONS.items())
IDS = [f"{method} {path}" for method, path in OPERATIONS]


@pytest.mark.parametrize(("call", "operation"), CALLS, ids=IDS)
def test_operation_with_a_body_can_fail_for_it(call: tuple[str, str], operation: Operation) -> None:
    for_bodies = {Reason.INVALID_ARGUMENT, Reason.BODY_TOO_LARGE, Reason.DEADLINE_EXCEEDED}

    assert (operation.body is not None) == (for_bodies <= operation.reasons)
    assert operation.body is None or call[0] == "POST"


@pytest.mark.parametrize(("call", "operation"), CALLS, ids=IDS)
def test_operations_that_are_not_open_can_fail_for_lack_of_a_key_or_token(
    call: tuple[str, str], operation: Operation
) -> None:
    assert operation.is_open == (Reason.UNAUTHENTICATED not in operation.reasons)
    assert not (operation.is_open and operation.is_guarded)


@pytest.mark.parametrize(("call", "operation"), CALLS, ids=IDS)
def test_only_completions_and_resumed_ones_are_streamed_and_take_headers(
    call: tuple[str, str], operation: Operation
) -> None:
    is_answer = call[1].endswith("/completions") or call[1].startswith("/v1/streams/")

    assert (operation.event is not None) == is_answer
    assert (operation.headers is not None) == is_answer


def test_completions_can_fail_with_every_reason_of_a_request() -> None:
    assert set(Reason) - ANSWER_REASONS == {
        Reason.INSTANCE_NOT_FOUND,
        Reason.STORE_AWAY,
    }


def test_resumed_answers_can_fail_as_first_ones_but_for_their_body() -> None:
    assert ANSWER_REASONS - OPERATIONS["GET", "/v1/streams/{generation_id}"].reasons == {Reason.BODY_TOO_LARGE}
