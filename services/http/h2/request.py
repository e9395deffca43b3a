"""What every request over HTTP/2 has: a task that answers it, which starts when it is its turn, and ends with its
stream.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from services.core.common_layers import bug_failure
from services.http.h2.stream import Stream
from services.http.h2.wire.frames import ErrorCode
from services.http.server.context import ConnectionContext

HEADS_BYTES_MAX = 16 * 1024 * 1024
"""Memory for the heads of a connection's requests: until their answers begin, and for rpcs until they end."""


class Host(Protocol):
    """The connection that requests come on.

    `tasks`: those that answer requests. `heads_size`: bytes of the heads of all requests that need them.
    `bodies_size`: bytes of their bodies that were not used, at most as many as one body may have. `has_probe`: one of
    them is a health check that did not wait for its turn.
    """

    context: ConnectionContext
    transport: asyncio.Transport
    tasks: set[asyncio.Task[None]]
    heads_size: int
    bodies_size: int
    has_probe: bool

    def on_begun(self, stream: Stream) -> None:
        """The request is complete, or will be answered without the rest."""
        ...

    def on_answered(self, stream: Stream) -> None:
        """The answer is sent, the request not complete. The receiver's `on_late` is called if it does not end."""
        ...

    def drain(self) -> None:
        """Take no further requests."""
        ...


class Request(ABC):
    """One request. It is the receiver of its stream."""

    __slots__ = ("_has_begun", "_head_size", "_host", "_is_probe", "_stream", "_task")

    def __init__(self, host: Host, stream: Stream, head_size: int) -> None:
        """`head_size`: bytes of its head. If all heads would be too large together, the stream is reset."""
        self._host = host
        self._stream = stream
        self._task: asyncio.Task[None] | None = None
        self._has_begun = self._is_probe = False
        self._head_size = 0
        if host.heads_size + head_size > HEADS_BYTES_MAX:
            stream.reset(ErrorCode.REFUSED_STREAM)  # It may come again.
        else:
            self._head_size = head_size
            host.heads_size += head_size

    def _forget_head(self) -> None:
        """Idempotent."""
        self._host.heads_size -= self._head_size
        self._head_size = 0

    def _forget_probe(self) -> None:
        """Idempotent."""
        if self._is_probe:
            self._is_probe = self._host.has_probe = False

    @abstractmethod
    async def answer(self) -> None:
        """Send the answer, and end the stream."""

    def begin(self, *, at_once: bool = False) -> None:
        """Answer when it is the request's turn.

        `at_once`: it is a probe, and waits for none, unless another probe of its connection is under way: as over
        HTTP/1.1, a client that sends many does not get before all others.
        """
        self._has_begun = True
        self._host.on_begun(self._stream)
        if at_once and not self._host.has_probe:
            self._is_probe = self._host.has_probe = True
            self._start()
        else:
            self._host.context.start_limiter.start(self._start)

    def _start(self) -> None:
        if self._host.context.clients.is_closing:
            self.on_closing()
        if self._stream.is_closed:
            return
        self._task = task = self._host.context.group.create_task(self._run())
        self._host.tasks.add(task)
        task.add_done_callback(self._host.tasks.discard)

    async def _run(self) -> None:
        """Never raises an Exception: it would end the task group, and with it all other answers."""
        try:
            await self.answer()
        except asyncio.CancelledError:
            self._stream.reset(ErrorCode.CANCEL)
            raise
        except Exception as error:
            bug_failure(error, "(any) over HTTP/2")
            self._stream.reset(ErrorCode.INTERNAL_ERROR)
        finally:
            self._forget_head()
            self._forget_probe()
            self._task = None  # Breaks a reference cycle: task, frames, request.
        if not self._stream.is_closed and not self._stream.is_remote_ended:
            self._leave_rest()

    def _leave_rest(self) -> None:
        """The answer is sent, and the rest of the request is not needed."""
        self._stream.reset(ErrorCode.NO_ERROR)  # RFC 9113, section 8.1.

    async def _wait_sent(self) -> None:
        """Wait until nothing waits for the client any more, or the stream is closed."""
        sent = asyncio.Event()
        self._stream.on_sent = sent.set
        await sent.wait()

    def on_closing(self) -> None:
        """See Receiver."""
        if self._task is None and not self._stream.is_ended:
            self._stream.reset(ErrorCode.REFUSED_STREAM)  # It may be sent again: RFC 9113, section 8.7.

    def on_reset(self) -> None:
        """See Receiver."""
        self._forget_head()
        self._forget_probe()
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
