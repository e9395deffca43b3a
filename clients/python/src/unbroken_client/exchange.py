"""Decides what is sent for one request of the user, and what of the answers the user gets. It does no I/O.

The step says what the next request is:

    SEND      the user's request: at first, and as long as the user has nothing of the answer and the plane has nothing
    RESUME    the plane may have the answer: `GET /v1/streams/{id}`, from the last event that the user has
    CONTINUE  the plane has lost the answer, but its tokens are known: the request with `generated_token_ids`
"""

import json
from enum import Enum, auto
from typing import Any
from uuid import uuid4

import httpx

from unbroken_client.addresses import Addresses
from unbroken_client.events import Event, EventCutter, error_of, json_object
from unbroken_client.headers import (
    GENERATION_ID,
    LAST_EVENT_ID,
    ON_DISCONNECT,
    REQUEST_ID,
    REQUEST_TIMEOUT,
    SEED,
    SHOULD_RETRY,
    duration_s,
    is_random_id,
    is_retryable,
    retry_after_s,
)
from unbroken_client.journal import Journal
from unbroken_client.retries import Retries, RetryPolicy

GENERATIONS = ("/v1/completions", "/v1/chat/completions")
EVENTS_TYPE = "text/event-stream"
BROKEN = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
"""What a lost server looks like. Other errors are the user's own."""
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
"""The server cannot have got the request."""
GONE = frozenset({404, 405, 410})
"""Statuses of a plane that does not have an answer, and of other servers."""


def is_generation(method: str, path: str) -> bool:
    """Whether a request asks for an answer that can be resumed. `path`: below the base URL."""
    return method == "POST" and path.partition("?")[0] in GENERATIONS


class Step(Enum):
    """See the module."""

    SEND = auto()
    RESUME = auto()
    CONTINUE = auto()


class Exchange:
    """One request of the user, from its first attempt to the end of its answer."""

    def __init__(self, request: httpx.Request, path: str, addresses: Addresses, policy: RetryPolicy) -> None:
        """`request`: its content has been read. `path`: below the base URL."""
        self._request = request
        self._path = path
        self._addresses = addresses
        self._address = addresses.current
        self._headers = httpx.Headers([item for item in request.headers.multi_items() if item[0].lower() != "host"])
        self._headers["accept-encoding"] = "identity"  # Events are cut at their borders.
        self._is_generation = is_generation(request.method, path)
        body = json_object(request.content) if self._is_generation else {}
        self.is_streamed = body.get("stream") is True
        self._is_cancelled_by_leaving = False
        self._journal: Journal | None = None
        self._generation_id: str | None = None
        if self._is_generation:
            self._prepare(body)
        told_s = duration_s(self._headers.get(REQUEST_TIMEOUT, ""))
        timeout_s = request.extensions.get("timeout", {}).get("read") if told_s is None else told_s
        self._is_deadline_told = told_s is not None
        self._extensions = request.extensions
        if self.is_streamed and policy.silence_s_max is not None:
            timeout = {**request.extensions.get("timeout", {}), "read": policy.silence_s_max}
            self._extensions = {**request.extensions, "timeout": timeout}
        self._retries = Retries(policy, timeout_s, is_absolute=self._is_deadline_told)
        self._step = Step.SEND
        self._cutter = EventCutter()
        self._cursor: str | None = None
        self._has_delivered = False
        self._held = b""
        self._failure: bytes | None = None
        self.has_stream = False
        self.is_complete = False

    def _prepare(self, body: dict[str, Any]) -> None:
        headers = self._headers
        headers[REQUEST_ID] = headers.get(REQUEST_ID) or str(uuid4())
        self._is_cancelled_by_leaving = ON_DISCONNECT not in headers
        headers.setdefault(ON_DISCONNECT, "continue")
        if headers[ON_DISCONNECT].lower() == "continue" and is_random_id(headers[REQUEST_ID]):
            self._generation_id = headers[REQUEST_ID]
        if self.is_streamed and body.get("return_token_ids") is True:
            self._journal = Journal(body, is_chat="chat" in self._path)

    # Requests

    def next_request(self) -> httpx.Request:
        """The next request to send."""
        self._address = self._addresses.current
        headers = self._headers.copy()
        if self._is_deadline_told:
            headers[REQUEST_TIMEOUT] = f"{max(1e-3, self._retries.remaining_s):.3f}"
        if self._step is Step.RESUME:
            return self._resume(headers)
        content = self._request.content
        if self._step is Step.CONTINUE:
            assert self._journal is not None
            content = json.dumps(self._journal.continuation()).encode()
            headers.pop("content-length", None)
        return self._to(self._request.method, self._path, headers, content)

    def _resume(self, headers: httpx.Headers) -> httpx.Request:
        for name in ("content-length", "content-type", "transfer-encoding"):
            headers.pop(name, None)
        headers["accept"] = EVENTS_TYPE if self.is_streamed else "application/json"
        if self._cursor is not None:
            headers[LAST_EVENT_ID] = self._cursor
        return self._to("GET", f"/v1/streams/{self._generation_id}", headers, None)

    def cancel_request(self) -> httpx.Request | None:
        """The request that ends an answer which the user has abandoned; None if it ends by itself or is to go on."""
        if not self._is_cancelled_by_leaving or self._generation_id is None or self.is_complete:
            return None
        headers = httpx.Headers({name: self._headers[name] for name in ("authorization",) if name in self._headers})
        # A name is known to one server, the id of the answer to all: a balancer may send the cancel anywhere.
        name = self._headers[REQUEST_ID] if is_random_id(self._headers[REQUEST_ID]) else self._generation_id
        return self._to("POST", f"/v1/requests/{name}/cancel", headers, b"")

    def _to(self, method: str, path: str, headers: httpx.Headers, content: bytes | None) -> httpx.Request:
        address, extensions = self._address, self._extensions
        return httpx.Request(method, address + path, headers=headers, content=content, extensions=extensions)

    # What came of them

    def lost(self, error: httpx.TransportError) -> float | None:
        """No response came, or only a part of one that is not streamed. How long to pause; None: give up."""
        if not isinstance(error, BROKEN):
            return None
        self._leave()
        if not isinstance(error, UNSENT) and not self._turn():
            return None
        return self._retries.pause_s(free_count=len(self._addresses) - 1)

    def answered(self, response: httpx.Response) -> float | None:
        """A complete response came. How long to pause before the next request; None: it is the user's."""
        if self._step is Step.RESUME and response.status_code in GONE | {409} and self._begin_anew(response):
            return 0.0
        if response.is_success or not is_retryable(response):
            self.is_complete = True
            return None
        self._leave()
        is_leaving = error_of(response.content).get("code") == "DRAINING"
        pause_s = self._retries.pause_s(
            at_least_s=0.0 if is_leaving and len(self._addresses) > 1 else retry_after_s(response),
            free_count=len(self._addresses) - 1 if is_leaving else 0,
        )
        if pause_s is None:
            response.headers[SHOULD_RETRY] = "false"  # Enough has been tried.
            self.is_complete = True
        return pause_s

    def _leave(self) -> None:
        self._addresses.leave(self._address)
        self._address = self._addresses.current

    def _turn(self) -> bool:
        """Decide how to get what is missing. Returns whether there is a way."""
        if self._generation_id is not None:
            self._step = Step.RESUME
        elif self._has_delivered:
            return self._continue()
        elif self._step is not Step.CONTINUE:
            self._step = Step.SEND
        return True

    def _begin_anew(self, response: httpx.Response) -> bool:
        """The plane does not have the answer. Returns whether the rest can be had all the same."""
        is_diverged = error_of(response.content).get("code") == "RESUME_DIVERGED"
        if response.status_code == 409 and not is_diverged:
            return False
        if self._has_delivered and not self._continue():
            return False
        if not self._has_delivered:
            self._step = Step.SEND
        elif is_diverged:
            self._headers[REQUEST_ID] = self._generation_id = str(uuid4())
        return True

    def _continue(self) -> bool:
        if self._journal is None or not self._journal.can_continue:
            return False
        self._step = Step.CONTINUE
        return True

    # The stream

    def begins_stream(self, response: httpx.Response) -> bool:
        """Whether the response is a stream of events. If so, `feed` takes its body."""
        kind = response.headers.get("content-type", "")
        self.has_stream = self._is_generation and response.is_success and kind.startswith(EVENTS_TYPE)
        if not self.has_stream:
            return False
        self._cutter, self._held, self._failure = EventCutter(), b"", None
        if self._step is not Step.RESUME:
            self._generation_id = response.headers.get(GENERATION_ID)
            self._cursor = None
        if self._journal is not None:
            self._journal.told_seed(response.headers.get(SEED))
        return True

    def feed(self, piece: bytes) -> bytes:
        """The bytes that the user gets: whole events, each of them once."""
        return b"".join(map(self._take, self._cutter.feed(piece)))

    def _take(self, event: Event) -> bytes:
        if self.is_complete or self._failure is not None or event.data is None:
            return b""
        if event.is_error and self._heals(error_of(event.data)):
            self._failure = event.raw
            return b""
        self.is_complete = event.is_done or event.is_error
        if event.id is None and self._generation_id is not None and not self.is_complete:
            self._held += event.raw  # Usage: it would come again if the end of the stream is lost.
            return b""
        if event.id is not None:
            self._cursor = event.id
        if self._journal is not None:
            self._journal.add(json_object(event.data))
        self._has_delivered = True
        self._retries.progressed()
        held, self._held = self._held, b""
        return held + event.raw

    def _heals(self, error: dict[str, Any]) -> bool:
        if not (error.get("retryable") is True or error.get("code") == "SLOW_CLIENT"):
            return False
        return self._generation_id is not None or not self._has_delivered or self._can_continue

    @property
    def _can_continue(self) -> bool:
        return self._journal is not None and self._journal.can_continue

    @property
    def is_broken(self) -> bool:
        """Whether the stream has ended with a failure from which the rest can be had."""
        return self._failure is not None

    def closed(self) -> httpx.TransportError | None:
        """The server has closed the stream. None: that was its end, and the user gets `rest`."""
        if self.is_complete or not (self.is_broken or self._generation_id is not None or self._can_continue):
            self.is_complete = True
            return None
        return httpx.RemoteProtocolError("the stream has ended without its last event")

    def rest(self) -> bytes:
        """The last bytes of the stream of another server, which ends as it likes."""
        return self._held + self._cutter.rest()

    def broke(self, error: httpx.TransportError) -> float | None:
        """The stream has broken off. How long to pause before the next request; None: give up."""
        if not isinstance(error, BROKEN):
            return None
        self._leave()
        if not self._turn():
            return None
        return self._retries.pause_s(free_count=len(self._addresses) - 1)

    def last_words(self, error: httpx.TransportError, response: httpx.Response | None = None) -> bytes:
        """The event with which a stream ends that cannot go on. Raises `error` if no server has said why."""
        told = {} if response is None else error_of(response.content)
        if self._failure is None and not told:
            raise error
        self.is_complete = True
        return self._failure or b"event: error\ndata: " + json.dumps({"error": told}).encode() + b"\n\n"
