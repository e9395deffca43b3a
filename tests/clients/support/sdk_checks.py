"""What must hold for a step, whichever SDK runs it.

For an error, a step reports the class's name (`error`), `status`, `code`, `param`, `request_id` and `retry_after`.
"""

from collections.abc import Callable
from typing import Any

from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import wait_until

Step = dict[str, Any]
Check = Callable[[Step, Frontend], None]
TOKENS = 120
REFUSED = {503: "InternalServerError", 429: "RateLimitError"}
"""Error classes by the status that a frontend is configured to give when it refuses for capacity."""


def answered(step: Step, _: Frontend) -> None:
    assert step["text"]
    assert step["finish_reason"] == "length"
    usage = step["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["prompt_tokens"] + TOKENS == usage["total_tokens"]


def models(step: Step, _: Frontend) -> None:
    """`ids`: all models. `id`: one model that was requested alone."""
    assert step["ids"] == ["full", "mocker"]
    assert step["id"] == "mocker"


def named(step: Step, frontend: Frontend) -> None:
    assert step["given"] == step["request_id"] == request_id(step)
    assert frontend.events_until_now("request", request_id=step["given"], outcome="length")


def choices(step: Step, _: Frontend) -> None:
    """`unary`, `stream`: the texts of two choices."""
    assert step["unary"] == step["stream"]
    assert len(set(step["unary"])) == 2
    assert step["usage"]["completion_tokens"] % 2 == 0


def logprobs(step: Step, _: Frontend) -> None:
    """`unary`, `stream`: log probabilities of the tokens of `text`, each with up to two of the most likely tokens."""
    assert step["unary"] == step["stream"]
    assert bytes(byte for token in step["unary"] for byte in token["bytes"]).decode() == step["text"]
    assert all(token["logprob"] <= 0 for token in step["unary"])
    assert {len(token["top_logprobs"]) for token in step["unary"]} <= {1, 2}


def not_found(step: Step, _: Frontend) -> None:
    assert (step["error"], step["status"]) == ("NotFoundError", 404)
    assert (step["code"], step["param"]) == ("MODEL_NOT_FOUND", "model")


def bad_request(step: Step, _: Frontend) -> None:
    assert (step["error"], step["status"]) == ("BadRequestError", 400)
    assert (step["code"], step["param"]) == ("INVALID_ARGUMENT", "temperature")


def refusal(step: Step, frontend: Frontend) -> None:
    assert step["error"] == REFUSED[step["status"]]
    assert step["code"] in ("OVERLOADED", "WORKER_AT_CAPACITY")
    assert 1 <= int(step["retry_after"]) < 60
    assert frontend.events_until_now("request", request_id=step["request_id"], outcome=step["code"])


def retry(step: Step, _: Frontend) -> None:
    """`attempts`: the outcome and the time of each."""
    refused, taken = step["attempts"]
    assert refused["status"] in REFUSED
    assert taken["status"] == 200
    assert taken["at_s"] - refused["at_s"] >= refused["retry_after_s"] >= 1.0
    assert step["finish_reason"] == "length"


def timeout(step: Step, frontend: Frontend) -> None:
    """The timeout of the SDK itself."""
    assert step["error"] in ("APITimeoutError", "APIConnectionTimeoutError")
    wait_until(lambda: frontend.events("request", request_id=step["request_id"], outcome="CANCELLED"))


def deadline(step: Step, frontend: Frontend) -> None:
    """The server's deadline. The SDK must not retry, although the status is a server error."""
    assert (step["error"], step["status"], step["code"]) == ("InternalServerError", 504, "DEADLINE_EXCEEDED")
    assert len(frontend.events_until_now("request", request_id=step["request_id"])) == 1


def abort(step: Step, frontend: Frontend) -> None:
    wait_until(lambda: frontend.events("request", request_id=request_id(step), outcome="CANCELLED"))


def cancelled(step: Step, frontend: Frontend) -> None:
    """Cancelled in mid-stream, so there is no status."""
    assert (step["error"], step["code"]) == ("APIError", "CANCELLED")
    wait_until(lambda: frontend.events("request", request_id=step["request_id"], outcome="CANCELLED"))


def broken_stream(step: Step, _: Frontend) -> None:
    """Ended by the server's deadline, after some chunks."""
    assert (step["error"], step["code"]) == ("APIError", "DEADLINE_EXCEEDED")
    assert step["pieces"] > 1


def request_id(step: Step) -> str:
    """Return the request id, which is a part of the answer's id."""
    return str(step["id"]).removeprefix("chatcmpl-")


CHECKS: dict[str, Check] = {
    "unary": answered,
    "completion": answered,
    "models": models,
    "named": named,
    "choices": choices,
    "logprobs": logprobs,
    "not_found": not_found,
    "model_not_found": not_found,
    "bad_request": bad_request,
    "refusal": refusal,
    "retry": retry,
    "timeout": timeout,
    "deadline": deadline,
    "abort": abort,
    "cancelled": cancelled,
    "broken_stream": broken_stream,
}
SAME = {
    "stream": "unary",
    "lost_worker": "unary",
    "async": "unary",
    "async_stream": "unary",
    "completion_stream": "completion",
}
"""Steps whose answers must be equal in `text`, `finish_reason` and `usage`."""
