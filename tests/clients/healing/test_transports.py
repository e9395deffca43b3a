"""Clients of both kinds go on with an answer on another server, and send again what may be sent again."""

import json
from typing import Any
from uuid import UUID

import httpx
import pytest

from tests.clients.healing.server import (
    AT_ONCE,
    DONE,
    ID,
    PATH,
    Answered,
    Plane,
    ask_async,
    ask_sync,
    event,
    failed,
    failure,
    stream,
)
from unbroken_client import RetryPolicy, httpx_client

CHAT: dict[str, Any] = {"model": "m", "messages": [], "stream": True}
SEND_1, SEND_2 = f"POST first {PATH}", f"POST second {PATH}"
RESUME_1, RESUME_2 = f"GET first /v1/streams/{ID}", f"GET second /v1/streams/{ID}"
CUT = httpx.ReadError("cut")
REFUSED = httpx.ConnectError("refused")
GONE = failed(404, "STREAM_NOT_FOUND", retryable=False)


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Any:
    def asked(plane: Plane, body: Any = CHAT, policy: Any = AT_ONCE, reads: int = 0, **headers: str) -> Answered:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answered: Answered = request.param(plane, body, {"x-request-id": ID, **named}, policy, reads)
        return answered

    return asked


# What is sent


def test_request_asks_to_be_kept_under_an_id_of_its_own(ask: Any) -> None:
    plane = Plane(stream(event("a", "1-0"), DONE), stream(event("a", "1-0"), DONE))

    ask(plane, x_request_id="")
    ask(plane, x_on_disconnect="cancel", x_request_id="mine")

    first, second = (one.headers for one in plane.requests)
    assert (UUID(first["x-request-id"]).version, first["x-on-disconnect"]) == (4, "continue")
    assert (second["x-request-id"], second["x-on-disconnect"]) == ("mine", "cancel")


# Streams


@pytest.mark.parametrize("cut", [CUT, httpx.RemoteProtocolError("cut"), failure("DRAINING", retryable=True), None])
def test_broken_stream_goes_on_after_the_last_whole_event(ask: Any, cut: Any) -> None:
    begun, half = event("a", "1-0") + event("b", "2-0"), event("c", "3-0")[:20]
    pieces = [] if cut is None else [cut]
    plane = Plane(stream(begun + ("" if isinstance(cut, str) else half), *pieces), stream(event("c", "3-0"), DONE))

    answered = ask(plane)

    assert (answered.text, answered.error) == (begun + event("c", "3-0") + DONE, None)
    assert plane.asked == [SEND_1, RESUME_2]
    assert plane.requests[1].headers["last-event-id"] == "2-0"
    assert plane.cancels == []


def test_events_are_whole_however_their_bytes_arrive(ask: Any) -> None:
    sent = "retry: 1000\n" + event("ü", "1-0") + event("b", "2-0") + DONE
    plane = Plane(stream(*(bytes([byte]) for byte in sent.encode())))

    assert ask(plane).text == sent


def test_usage_comes_once_if_the_end_of_the_stream_is_lost(ask: Any) -> None:
    usage, last = 'data: {"choices": [], "usage": {}}\n\n', event("a", "1e-0")
    plane = Plane(stream(last + usage, CUT), stream(usage + DONE))

    assert ask(plane).text == last + usage + DONE


def test_server_of_a_stream_that_is_silent_for_too_long_is_left(ask: Any) -> None:
    plane = Plane(stream(event("a", "1-0"), httpx.ReadTimeout("silent")), stream(event("b", "2-0"), DONE))

    answered = ask(plane, policy=RetryPolicy(base_s=0.0, silence_s_max=7.5))

    assert answered.text == event("a", "1-0") + event("b", "2-0") + DONE
    assert plane.asked == [SEND_1, RESUME_2]
    assert [one.extensions["timeout"]["read"] for one in plane.requests] == [7.5, 7.5]


def test_whole_answer_may_take_as_long_as_its_timeout_says(ask: Any) -> None:
    plane = Plane(httpx.Response(200, json={}))

    ask(plane, CHAT | {"stream": False}, RetryPolicy(silence_s_max=7.5))

    assert plane.requests[0].extensions["timeout"]["read"] != 7.5


def test_stream_that_breaks_again_goes_on_again(ask: Any) -> None:
    plane = Plane(
        stream(event("a", "1-0"), CUT), REFUSED, stream(event("b", "2-0"), CUT), stream(event("c", "3-0") + DONE)
    )

    answered = ask(plane)

    assert answered.text == event("a", "1-0") + event("b", "2-0") + event("c", "3-0") + DONE
    assert plane.asked == [SEND_1, RESUME_2, RESUME_1, RESUME_2]


def test_failure_that_nobody_can_mend_reaches_the_user(ask: Any) -> None:
    sent = event("a", "1-0") + failure("POISON_REQUEST", retryable=False)
    plane = Plane(stream(sent))

    answered = ask(plane)

    assert (answered.text, answered.error) == (sent, None)
    assert plane.asked == [SEND_1]


def test_slow_reader_comes_back(ask: Any) -> None:
    plane = Plane(stream(event("a", "1-0") + failure("SLOW_CLIENT", retryable=False)), stream(event("b", "2-0") + DONE))

    assert ask(plane).text == event("a", "1-0") + event("b", "2-0") + DONE


@pytest.mark.parametrize("status", [404, 410])
def test_answer_that_the_plane_has_lost_is_asked_for_anew_if_the_user_has_nothing_of_it(ask: Any, status: int) -> None:
    gone = failed(status, "STREAM_NOT_FOUND", retryable=False)
    plane = Plane(stream(CUT), gone, stream(event("a", "1-0"), DONE))

    assert ask(plane).text == event("a", "1-0") + DONE
    assert plane.asked == [SEND_1, RESUME_2, SEND_2]
    assert plane.requests[2].headers["x-request-id"] == ID


def test_user_is_told_that_the_plane_has_lost_the_answer(ask: Any) -> None:
    answered = ask(Plane(stream(event("a", "1-0"), CUT), GONE))

    assert answered.text.startswith(event("a", "1-0") + "event: error\ndata: ")
    assert json.loads(answered.text.rpartition("data: ")[2])["error"]["code"] == "STREAM_NOT_FOUND"


def test_first_failure_is_told_rather_than_what_came_of_the_resume(ask: Any) -> None:
    sent = event("a", "1-0") + failure("DISCONNECTED", retryable=True)

    assert ask(Plane(stream(sent), GONE)).text == sent


def test_first_failure_is_told_if_no_server_answers_any_more(ask: Any) -> None:
    sent = event("a", "1-0") + failure("DRAINING", retryable=True)

    answered = ask(Plane(stream(sent), *[REFUSED] * 20))

    assert (answered.text, answered.error) == (sent, None)


def test_stream_of_another_server_passes_through_and_ends_as_it_likes(ask: Any) -> None:
    sent = event("a") + event("b")
    plane = Plane(stream(sent, headers={"content-type": "text/event-stream; charset=utf-8"}))

    assert ask(plane).text == sent


# Tokens that the client keeps


def test_lost_answer_goes_on_with_the_tokens_and_the_seed_if_they_are_known(ask: Any) -> None:
    begun = event("a", "1-0", token_ids=[5]) + event("b", "3-0", token_ids=[6, 7])
    plane = Plane(stream(begun, CUT), GONE, stream(event("c", "4-0", token_ids=[8]), CUT), stream(DONE))
    body = CHAT | {"return_token_ids": True}

    answered = ask(plane, body)

    assert answered.text == begun + event("c", "4-0", token_ids=[8]) + DONE
    assert plane.asked == [SEND_1, RESUME_2, SEND_2, RESUME_1]
    assert json.loads(plane.requests[2].content) == body | {"generated_token_ids": [5, 6, 7], "seed": 77}


def test_tokens_of_several_choices_are_sent_as_lists(ask: Any) -> None:
    begun = event("a", "1.0-0", token_ids=[5], finish_reason="stop") + event("b", "1e.1-0", token_ids=[6], index=1)
    plane = Plane(stream(begun, CUT), GONE, stream(DONE))

    ask(plane, CHAT | {"return_token_ids": True, "n": 2})

    assert json.loads(plane.requests[2].content)["generated_token_ids"] == [None, [6]]


def test_diverged_answer_goes_on_under_another_id(ask: Any) -> None:
    diverged = failed(409, "RESUME_DIVERGED", retryable=False)
    plane = Plane(stream(event("a", "1-0", token_ids=[5]), CUT), diverged, stream(DONE))

    ask(plane, CHAT | {"return_token_ids": True})

    assert plane.requests[2].headers["x-request-id"] != ID


def test_answer_that_another_client_has_taken_over_is_left_to_it(ask: Any) -> None:
    taken = failed(409, "TAKEN_OVER", retryable=False)
    plane = Plane(stream(event("a", "1-0", token_ids=[5]), CUT), taken)

    assert "TAKEN_OVER" in ask(plane, CHAT | {"return_token_ids": True}).text
    assert plane.asked == [SEND_1, RESUME_2]


# Retries


@pytest.mark.parametrize("body", [CHAT, CHAT | {"stream": False}])
def test_refused_connection_is_tried_at_the_next_server_with_the_same_id(ask: Any, body: Any) -> None:
    plane = Plane(REFUSED, stream(event("a", "1-0"), DONE))

    ask(plane, body)

    assert plane.asked == [SEND_1, SEND_2]
    assert {one.headers["x-request-id"] for one in plane.requests} == {ID}
    assert [one.headers["host"] for one in plane.requests] == ["first:8000", "second:8000"]


def test_request_that_may_have_arrived_is_looked_for_before_it_is_sent_again(ask: Any) -> None:
    plane = Plane(httpx.RemoteProtocolError("no response"), GONE, stream(event("a", "1-0"), DONE))

    assert ask(plane).text == event("a", "1-0") + DONE
    assert plane.asked == [SEND_1, RESUME_2, SEND_2]


def test_whole_answer_is_fetched_whole(ask: Any) -> None:
    plane = Plane(httpx.Response(200, stream=stream('{"half', CUT).stream), httpx.Response(200, json={"id": "x"}))

    answered = ask(plane, CHAT | {"stream": False})

    assert json.loads(answered.text) == {"id": "x"}
    assert plane.asked == [SEND_1, RESUME_2]
    assert plane.requests[1].headers["accept"] == "application/json"


@pytest.mark.parametrize(
    "refusal",
    [
        failed(503, "X", retryable=False),
        failed(503, "X", retryable=True, x_should_retry="false"),
        failed(400, "INVALID_ARGUMENT", retryable=False),
        httpx.Response(500),
    ],
)
def test_what_is_not_retryable_is_not_sent_again(ask: Any, refusal: httpx.Response) -> None:
    plane = Plane(refusal)

    assert ask(plane).status == refusal.status_code
    assert plane.asked == [SEND_1]


@pytest.mark.parametrize(
    "refusal",
    [
        failed(503, "X", retryable=True),
        failed(503, "X", retryable=False, x_should_retry="true"),
        httpx.Response(429),
        httpx.Response(502, text="<html>"),
    ],
)
def test_what_is_retryable_is_sent_again(ask: Any, refusal: httpx.Response) -> None:
    plane = Plane(refusal, stream(event("a", "1-0"), DONE))

    assert ask(plane).status == 200
    assert plane.asked == [SEND_1, SEND_2]


def test_the_sdk_is_told_not_to_retry_what_has_been_retried_enough(ask: Any) -> None:
    plane = Plane(failed(503, "OVERLOADED", retryable=True, retry_after="1000"))

    answered = ask(plane)

    assert (answered.status, answered.headers["x-should-retry"]) == (503, "false")


def test_deadline_of_the_user_travels(ask: Any) -> None:
    plane = Plane(failed(503, "X", retryable=True, retry_after_ms="20"), stream(event("a", "1-0"), DONE))

    ask(plane, x_request_timeout="30s")

    first, second = (float(one.headers["x-request-timeout"]) for one in plane.requests)
    assert 0 < second <= first - 0.02 <= 30


# Leaving


def test_user_who_leaves_ends_the_answer(ask: Any) -> None:
    plane = Plane(stream(event("a", "1-0"), event("b", "2-0"), DONE))

    ask(plane, reads=1)

    assert [one.url.path for one in plane.cancels] == [f"/v1/requests/{ID}/cancel"]


def test_user_who_leaves_ends_the_answer_by_its_own_id_if_the_name_that_the_user_chose_cannot_be_one(ask: Any) -> None:
    """A name is known to one server alone, and a balancer may send the cancel to another."""
    plane = Plane(stream(event("a", "1-0"), event("b", "2-0"), DONE))

    ask(plane, reads=1, x_request_id="mine")

    assert [one.url.path for one in plane.cancels] == [f"/v1/requests/{ID}/cancel"]


@pytest.mark.parametrize(
    "urls", [[], "http://first:8000", ["first:8000"], ["127.0.0.1:8000"], ["http://first:8000", "second"], ["http://"]]
)
def test_base_urls_that_no_request_could_match_are_refused(urls: Any) -> None:
    """A bug: the requests were passed on without protection, and nothing told so."""
    with pytest.raises(ValueError, match="base URL"):
        httpx_client(urls)


def test_user_who_leaves_may_let_the_answer_go_on(ask: Any) -> None:
    plane = Plane(stream(event("a", "1-0"), event("b", "2-0"), DONE))

    ask(plane, reads=1, x_on_disconnect="continue")

    assert plane.cancels == []
