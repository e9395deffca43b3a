"""What a session is about to send: requests and cancels, joined into one message for each turn of the loop."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.request import Request
from services.rpc.codec import put_request, seconds_to_wire
from services.rpc.framing import FrameConnection
from services.rpc.status import MESSAGE_BYTES_MAX, time_left_s
from services.stubs import worker_pb2

SUBMIT_BYTES_MAX = MESSAGE_BYTES_MAX // 2
"""The largest request, and all the requests that travel in one message: a larger message would cost all streams."""
KEEPALIVE_S = 5.0
"""The longest silence of a frontend that lives: its worker waits three times as long."""
UNTAKEN_S_MAX = 3 * KEEPALIVE_S
"""How long a worker may take nothing of what waits here for it: by then it has not heard of us for as long."""
TIMEOUT_S_MAX = 1e9
"""More than a client can mean: what a Duration holds is bounded, too."""


@dataclass(slots=True)
class CancelCounts:
    """For all workers of a frontend. signals: cancels sent. late_tokens: that came for streams cancelled before."""

    signals: int = 0
    late_tokens: int = 0


class SessionWriter:
    """Messages to one worker, sent in order: those of one turn of the loop in the next, while the worker takes them."""

    def __init__(self, cancels: CancelCounts) -> None:
        self._cancels = cancels
        self._loop = asyncio.get_running_loop()
        self._connection: FrameConnection[worker_pb2.WorkerMessage] | None = None
        self._messages: deque[worker_pb2.FrontendMessage] = deque()
        self._begin_message()
        self._is_due = False
        self._sent_at = 0.0

    def connect(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        """Where they go, from now on."""
        self._connection = connection
        self._sent_at = self._loop.time()

    def submit(self, stream_id: int, request: Request, call: Call, choices: int = 1) -> None:
        """Start the request, so many choices from its own on: with the next message, or with one more where that would
        become too large.

        Or where that has cancels: they would be read after it, and it may need the room that they make. Raises
        INVALID_ARGUMENT for a request that is too large to send.
        """
        if self._has_cancels:
            self._begin_message()
        message = self._messages[-1]
        submit = message.submits.add()  # In its place: to copy a message serialises and parses it.
        try:
            submit.stream_id, submit.choices = stream_id, choices
            size = _put(submit, request, call)
        except Exception:
            del message.submits[-1]
            self._messages[-1] = (
                worker_pb2.FrontendMessage()
            )  # What is deleted keeps its memory while the message lives.
            self._messages[-1].CopyFrom(message)
            raise
        if self._bytes + size > SUBMIT_BYTES_MAX:
            self._begin_message()
            self._messages[-1].submits.append(submit)
            del message.submits[-1]
        self._bytes += size
        self._send_soon()

    def _begin_message(self) -> None:
        self._messages.append(worker_pb2.FrontendMessage())
        self._bytes = 0  # Of its requests.
        self._has_cancels = False  # It itself; to ask it takes longer.

    def cancel(self, stream_id: int) -> None:
        self._messages[-1].cancels.append(stream_id)
        self._has_cancels = True
        self._cancels.signals += 1
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.send)

    def send(self) -> None:
        """All that there is, unless the worker is slow to take what it got: then when it has."""
        self._is_due = False
        if self._connection is not None and self._connection.is_writable:
            for message in self.take():
                self._connection.send(message)
            self._sent_at = self._loop.time()

    def take(self) -> Iterable[worker_pb2.FrontendMessage]:
        """What is to be sent, once."""
        messages, self._messages = self._messages, deque()
        self._begin_message()
        return messages

    def keep_alive(self, now: float) -> None:
        """Say that we are there, after a long silence. Called at every look, and so up to KEEPALIVE_S late."""
        if now - self._sent_at >= KEEPALIVE_S:
            self.send()

    def stuck_at(self) -> float:
        """When the worker will have taken nothing for too long, whatever it says. Ask after `keep_alive`."""
        return math.inf if self._connection is None else self._sent_at + UNTAKEN_S_MAX


def _put(submit: worker_pb2.Submit, request: Request, call: Call) -> int:
    """Fill it in. Returns its size in bytes. Raises INVALID_ARGUMENT if that is too large to send."""
    message = submit.request
    put_request(message, request)
    message.request_id = call.request_id
    if (left_s := time_left_s(call.deadline)) is not None:
        submit.timeout.CopyFrom(seconds_to_wire(min(left_s, TIMEOUT_S_MAX)))
    size = submit.ByteSize()
    if size > SUBMIT_BYTES_MAX:
        raise Failure(Reason.INVALID_ARGUMENT, f"the request is larger than {SUBMIT_BYTES_MAX} bytes: shorten it")
    return size
