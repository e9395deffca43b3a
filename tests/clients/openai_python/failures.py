"""How the `openai` package reports failures: `failures.py http://HOST:PORT/v1`.

It prints a line of JSON for each failure.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from openai import APIError, APIStatusError, APITimeoutError, DefaultHttpxClient, OpenAI

MODEL = "mocker"
FULL_MODEL = "full"
"""The only worker of this model runs one request at a time."""
ENDLESS = 100_000
SHORT_S = 2.0
QUESTION: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20}
OF_FULL: Any = {**QUESTION, "model": FULL_MODEL}
LONG: Any = {**QUESTION, "max_tokens": ENDLESS}


def main() -> None:
    """Cause each failure once."""
    with OpenAI(base_url=sys.argv[1], api_key="none") as client:
        wrong(client)
        with client.chat.completions.create(**{**OF_FULL, "max_tokens": ENDLESS}, stream=True) as holder:
            next(holder)  # It now holds the only slot of that model.
            refusal(client)
            retry(client, refused=holder.close)
        timeout(client)
        deadline(client)
        broken_stream(client)


def wrong(client: OpenAI) -> None:
    """Send requests that cannot be served."""
    try:
        client.chat.completions.create(**QUESTION, temperature=3)
    except APIStatusError as error:
        report("bad_request", **describe_status_error(error))
    try:
        client.chat.completions.create(**{**QUESTION, "model": "nobody"})
    except APIStatusError as error:
        report("not_found", **describe_status_error(error))
    try:
        client.models.retrieve("nobody")
    except APIStatusError as error:
        report("model_not_found", **describe_status_error(error))


def refusal(client: OpenAI) -> None:
    """Send a request while no slot is free, with the package's retries turned off."""
    try:
        client.with_options(max_retries=0).chat.completions.create(**OF_FULL)
    except APIStatusError as error:
        report("refusal", **describe_status_error(error))


def retry(client: OpenAI, refused: Callable[[], None]) -> None:
    """Let the package retry a refused request after the delay that the server named. `refused` frees the slot."""
    request_id = "openai_python-retry"
    attempts: list[dict[str, Any]] = []

    def note(response: Any) -> None:
        retry_after_s = float(response.headers.get("retry-after-ms", 0)) / 1e3
        attempts.append({"status": response.status_code, "at_s": time.monotonic(), "retry_after_s": retry_after_s})
        refused()

    with DefaultHttpxClient(event_hooks={"response": [note]}) as http_client:
        watched = client.with_options(http_client=http_client)
        answer = watched.chat.completions.create(**OF_FULL, extra_headers={"X-Request-Id": request_id})
    report("retry", request_id=request_id, attempts=attempts, finish_reason=answer.choices[0].finish_reason)


def timeout(client: OpenAI) -> None:
    """Set a timeout in the client. When it passes, the worker stops within two steps."""
    request_id = "openai_python-timeout"
    hurried = client.with_options(timeout=SHORT_S, max_retries=0)
    try:
        hurried.chat.completions.create(**LONG, extra_headers={"X-Request-Id": request_id})
    except APITimeoutError as error:  # The package received no response, so it knows no request id.
        report("timeout", request_id=request_id, **describe_error(error))


def deadline(client: OpenAI) -> None:
    """Set a deadline for the server. Its response tells the package not to retry."""
    headers = {"X-Request-Id": "openai_python-deadline", "X-Request-Timeout": str(SHORT_S)}
    try:
        client.chat.completions.create(**LONG, extra_headers=headers)
    except APIStatusError as error:
        report("deadline", **describe_status_error(error))


def broken_stream(client: OpenAI) -> None:
    """Set a deadline that passes in mid-stream, when the status has already been sent."""
    pieces = 0
    try:
        for _ in client.chat.completions.create(**LONG, stream=True, extra_headers={"X-Request-Timeout": str(SHORT_S)}):
            pieces += 1
    except APIError as error:
        report("broken_stream", pieces=pieces, **describe_error(error))


def describe_error(error: APIError) -> dict[str, Any]:
    """Return what an error says: its class, `code` for programs, and `message` for people."""
    return {"error": type(error).__name__, "code": error.code, "param": error.param, "message": error.message}


def describe_status_error(error: APIStatusError) -> dict[str, Any]:
    """Return what an error with an HTTP status says."""
    http = {"status": error.status_code, "request_id": error.request_id}
    return {**describe_error(error), **http, "retry_after": error.response.headers.get("retry-after")}


def report(step: str, **fields: Any) -> None:
    """Print the result of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
