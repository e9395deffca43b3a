"""Sends requests and cancels to a worker, gathered into one message for each turn of the event loop."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.kept import Kept
from services.core.request import Request
from services.core.tenant import EVERYBODY
from services.rpc.codec import continuation_to_wire, logprobs_to_wire, put_request, put_seconds, put_tenant
from services.rpc.framing import FrameConnection
from services.rpc.status import MESSAGE_BYTES_MAX, time_left_s
from services.stubs import worker_pb2

SUBMIT_BYTES_MAX = MESSAGE_BYTES_MAX // 2
"""The largest size of a request, and of all requests in one message. A larger message would end the whole session."""
KEEPALIVE_S = 5.0
"""The longest silence of a healthy frontend. A worker drops the session after three times as long."""
UNTAKEN_S_MAX = 3 * KEEPALIVE_S
"""How long a worker may read nothing that is sent to it. A worker that hears nothing for as long drops the session."""
TIMEOUT_S_MAX = 1e9
"""Longer timeouts are shortened to this one, because a Duration is bounded."""


@dataclass(slots=True)
class CancelCounts:
    """Counts over all workers of a frontend. `signals`: cancels sent. `late_tokens`: tokens received after a cancel."""

    signals: int = 0
    late_tokens: int = 0


class SessionWriter:
    """The messages to one worker, in order.

    What is submitted in one turn of the event loop is sent in the next, unless the worker is slow to read.
    """

    def __init__(self, cancels: CancelCounts) -> None:
        self._cancels = cancels
        self._loop = asyncio.get_running_loop()
        self._connection: FrameConnection[worker_pb2.WorkerMessage] | None = None
        self._messages: deque[worker_pb2.FrontendMessage] = deque()
        self._begin_message()
        self._messages[0].reads_logprob_columns = True
        self._is_due = False
        self._sent_at = 0.0

    def connect(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        """Set the connection to send on."""
        self._connection = connection
        self._sent_at = self._loop.time()

    def submit(self, stream_id: int, request: Request, call: Call, choices: int = 1) -> None:
        """Send the request for its own choice and the `choices - 1` that follow.

        It starts a new message if it would make the last one too large, or if that one has cancels or stops: a worker
        reads them after submits, and the request may need the room that they free. Raises INVALID_ARGUMENT for a
        request that is too large to send.
        """
        if self._frees_room:
            self._begin_message()
        message = self._messages[-1]
        submit = message.submits.add()  # Filled in place: to copy a message serialises and parses it.
        try:
            submit.stream_id, submit.choices = stream_id, choices
            size = _put(submit, request, call)
        except Exception:
            del message.submits[-1]
            # A deleted item keeps its memory while its message lives, so the others move to a new message.
            self._messages[-1] = worker_pb2.FrontendMessage()
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
        self._bytes = 0  # The size of the requests in the last message.
        self._frees_room = self._has_adopts = False  # Faster than asking the message.

    def _ending(self) -> worker_pb2.FrontendMessage:
        """The message for the end of a stream: one after its adoption, as a worker reads adoptions last."""
        if self._has_adopts:
            self._begin_message()
        self._send_soon()
        return self._messages[-1]

    def cancel(self, stream_id: int) -> None:
        """Send a cancel of the stream."""
        self._ending().cancels.append(stream_id)
        self._frees_room = True
        self._cancels.signals += 1

    def stop(self, stream_id: int) -> None:
        """Send that the stream needs no more tokens."""
        self._ending().stops.append(stream_id)
        self._frees_room = True
        self._cancels.signals += 1

    def let_go(self, stream_id: int) -> None:
        """Send that this frontend needs the stream no more, though another one may."""
        self._ending().detaches.append(stream_id)

    def locate(self, query: int, generation_id: bytes, *, cancels: bool) -> None:
        """Ask for the generations of an answer."""
        self._messages[-1].locates.add(query=query, generation_id=generation_id, cancels=cancels)
        self._send_soon()

    def adopt(self, stream_id: int, generation_id: bytes, index: int, epoch: int) -> None:
        """Take a generation over."""
        adopt = worker_pb2.Adopt(stream_id=stream_id, generation_id=generation_id, index=index, epoch=epoch)
        self._messages[-1].adopts.append(adopt)
        self._has_adopts = True
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.send)

    def send(self) -> None:
        """Send everything. If the worker is slow to read, nothing: the connection calls again when it has read."""
        self._is_due = False
        if self._connection is not None and self._connection.is_writable:
            for message in self.pop_messages():
                self._connection.send(message)
            self._sent_at = self._loop.time()

    def pop_messages(self) -> Iterable[worker_pb2.FrontendMessage]:
        """Remove and return everything that is to be sent."""
        messages, self._messages = self._messages, deque()
        self._begin_message()
        return messages

    def keep_alive(self, now: float) -> None:
        """Send an empty message after a long silence. Called at every check, so it may be up to KEEPALIVE_S late."""
        if now - self._sent_at >= KEEPALIVE_S:
            self.send()

    def stuck_at(self) -> float:
        """The time at which the worker will have read nothing for UNTAKEN_S_MAX. Call it after `keep_alive`."""
        return math.inf if self._connection is None else self._sent_at + UNTAKEN_S_MAX


def _put_generation(message: worker_pb2.Generation, request: Request, kept: Kept) -> None:
    generation = kept.generation
    message.id, message.epoch, message.presentation = generation.id, generation.epoch, generation.presentation
    message.index, message.base = kept.index_of(request.choice), kept.base
    put_seconds(message.grace, generation.grace_s)
    if (continuation := generation.continuations.get(message.index)) is not None:
        message.continuation = continuation_to_wire(continuation)
    if kept.prior_logprobs:
        message.prior_logprobs.extend(map(logprobs_to_wire, kept.prior_logprobs))


def _put(submit: worker_pb2.Submit, request: Request, call: Call) -> int:
    """Fill in the submit and return its size in bytes. Raises INVALID_ARGUMENT if it is too large to send."""
    message = submit.request
    put_request(message, request)
    message.request_id = call.request_id
    if call.tenant is not EVERYBODY:
        put_tenant(submit.tenant, call.tenant)
    if call.kept is not None:
        _put_generation(submit.generation, request, call.kept)
    if (left_s := time_left_s(call.deadline)) is not None:
        put_seconds(submit.timeout, min(left_s, TIMEOUT_S_MAX))
    size = submit.ByteSize()
    if size > SUBMIT_BYTES_MAX:
        raise Failure(Reason.INVALID_ARGUMENT, f"the request is larger than {SUBMIT_BYTES_MAX} bytes: shorten it")
    return size
