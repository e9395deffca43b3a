"""What the `openai` package makes of failures: `failures.py http://HOST:PORT/v1`.

It prints a line of JSON for each failure that it meets.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from openai import APIError, APIStatusError, APITimeoutError, DefaultHttpxClient, OpenAI

MODEL = "mocker"
FULL_MODEL = "full"
"""Its only worker takes one request at a time."""
ENDLESS = 100_000
SHORT_S = 2.0
QUESTION: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20}
OF_FULL: Any = {**QUESTION, "model": FULL_MODEL}
LONG: Any = {**QUESTION, "max_tokens": ENDLESS}


def main() -> None:
    """Meet every failure once."""
    with OpenAI(base_url=sys.argv[1], api_key="none") as client:
        wrong(client)
        with client.chat.completions.create(**{**OF_FULL, "max_tokens": ENDLESS}, stream=True) as holder:
            next(holder)  # It has all the room of that model now.
            refusal(client)
            retry(client, refused=holder.close)
        timeout(client)
        deadline(client)
        broken_stream(client)


def wrong(client: OpenAI) -> None:
    """Ask what can't be answered."""
    try:
        client.chat.completions.create(**QUESTION, temperature=3)
    except APIStatusError as error:
        tell("bad_request", **of_status(error))
    try:
        client.chat.completions.create(**{**QUESTION, "model": "nobody"})
    except APIStatusError as error:
        tell("not_found", **of_status(error))
    try:
        client.models.retrieve("nobody")
    except APIStatusError as error:
        tell("model_not_found", **of_status(error))


def refusal(client: OpenAI) -> None:
    """There is no room, and the package is not to try again."""
    try:
        client.with_options(max_retries=0).chat.completions.create(**OF_FULL)
    except APIStatusError as error:
        tell("refusal", **of_status(error))


def retry(client: OpenAI, refused: Callable[[], None]) -> None:
    """The package sends a refused request again by itself, when the answer said. `refused` makes room for it."""
    request_id = "openai_python-retry"
    attempts: list[dict[str, Any]] = []

    def note(response: Any) -> None:
        retry_after_s = float(response.headers.get("retry-after-ms", 0)) / 1e3
        attempts.append({"status": response.status_code, "at_s": time.monotonic(), "retry_after_s": retry_after_s})
        refused()

    with DefaultHttpxClient(event_hooks={"response": [note]}) as http_client:
        watched = client.with_options(http_client=http_client)
        answer = watched.chat.completions.create(**OF_FULL, extra_headers={"X-Request-Id": request_id})
    tell("retry", request_id=request_id, attempts=attempts, finish_reason=answer.choices[0].finish_reason)


def timeout(client: OpenAI) -> None:
    """Wait no longer than so; the worker stops within two steps."""
    request_id = "openai_python-timeout"
    hurried = client.with_options(timeout=SHORT_S, max_retries=0)
    try:
        hurried.chat.completions.create(**LONG, extra_headers={"X-Request-Id": request_id})
    except APITimeoutError as error:  # The package heard nothing of the request, so it can't name it.
        tell("timeout", request_id=request_id, **of_error(error))


def deadline(client: OpenAI) -> None:
    """Let the server take no longer than so. The package knows from the answer that it is no use to ask again."""
    headers = {"X-Request-Id": "openai_python-deadline", "X-Request-Timeout": str(SHORT_S)}
    try:
        client.chat.completions.create(**LONG, extra_headers=headers)
    except APIStatusError as error:
        tell("deadline", **of_status(error))


def broken_stream(client: OpenAI) -> None:
    """The same in mid-stream, where there is no status any more."""
    pieces = 0
    try:
        for _ in client.chat.completions.create(**LONG, stream=True, extra_headers={"X-Request-Timeout": str(SHORT_S)}):
            pieces += 1
    except APIError as error:
        tell("broken_stream", pieces=pieces, **of_error(error))


def of_error(error: APIError) -> dict[str, Any]:
    """What an error tells: a class for each kind, `code` for programs, `message` for people."""
    return {"error": type(error).__name__, "code": error.code, "param": error.param, "message": error.message}


def of_status(error: APIStatusError) -> dict[str, Any]:
    """The same, where it is all that was answered."""
    told = {"status": error.status_code, "request_id": error.request_id}
    return {**of_error(error), **told, "retry_after": error.response.headers.get("retry-after")}


def tell(step: str, **fields: Any) -> None:
    """Print what came of a step."""
    print(json.dumps({"step": step, **fields}), flush=True)


if __name__ == "__main__":
    main()
