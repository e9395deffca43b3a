"""The headers of Unbroken and of OpenAI's API that this client reads and writes."""

import re
from email.utils import parsedate_to_datetime
from time import time

import httpx

from unbroken_client.events import error_of

ON_DISCONNECT = "x-on-disconnect"
REQUEST_ID = "x-request-id"
GENERATION_ID = "x-unbroken-generation-id"
SEED = "x-unbroken-seed"
LAST_EVENT_ID = "last-event-id"
REQUEST_TIMEOUT = "x-request-timeout"
SHOULD_RETRY = "x-should-retry"

RETRIED = frozenset({408, 429, 502, 503, 504})
"""Statuses that are worth another attempt if the server does not say whether they are."""
_RANDOM_ID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def is_random_id(name: str) -> bool:
    """Whether the plane takes this request id for that of the answer as well."""
    return _RANDOM_ID.fullmatch(name) is not None


def duration_s(given: str) -> float | None:
    """A time such as `30`, `30s` or `500ms`, in seconds; None if it is none."""
    match = _DURATION.fullmatch(given.strip())
    return None if match is None else float(match[1]) * _UNIT_S[match[2] or "s"]


def is_retryable(response: httpx.Response) -> bool:
    """Whether the same request may be sent again. What the server says counts for more than the status."""
    told: str = response.headers.get(SHOULD_RETRY, "").lower()
    if told in {"true", "false"}:
        return told == "true"
    retryable = error_of(response.content).get("retryable")
    return retryable if isinstance(retryable, bool) else response.status_code in RETRIED


def retry_after_s(response: httpx.Response) -> float:
    """The time that the server asks for before the next attempt; 0.0 if it asks for none."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        given = response.headers.get(name, "")
        try:
            return max(0.0, float(given) * unit_s)
        except ValueError:
            continue
    try:
        return max(0.0, parsedate_to_datetime(response.headers["retry-after"]).timestamp() - time())
    except (KeyError, ValueError):
        return 0.0
