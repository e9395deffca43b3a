"""One request on a session: validates each item that the worker sends for it."""

import asyncio
from collections.abc import Sequence

from services.core.call import Attempt
from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Sink, TokenLogprobs
from services.core.request import Request
from services.core.tenant import EVERYBODY, Tenant
from services.rpc.codec import error_from_wire, finish_reason_from_wire
from services.stubs import worker_pb2


class _HoldingSink:
    """The sink of a stream before its request joins it: keeps the tokens."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def deliver(self, delta: Delta) -> None:
        self.deltas.append(delta)


class Stream:
    """One request on a session. What arrives before the request has joined is kept for it.

    `ended`: its finish or its failure. `is_complete`: the worker has ended it well. `position`: of the next token.
    """

    __slots__ = (
        "_choice",
        "_finish",
        "_has_logprobs",
        "_sink",
        "_vocab_size",
        "attempt",
        "ended",
        "id",
        "is_complete",
        "position",
        "tenant",
    )

    def __init__(
        self,
        stream_id: int,
        request: Request,
        vocab_size: int,
        ended: asyncio.Future[Finish],
        tenant: Tenant = EVERYBODY,
    ) -> None:
        self.id = stream_id
        self.tenant = tenant
        self.attempt = Attempt()
        self.ended = ended
        self._sink: Sink = _HoldingSink()
        self._vocab_size = vocab_size
        self._choice = request.choice
        self._has_logprobs = request.logprobs is not None
        self.position = len(request.generated_token_ids)
        self._finish: Finish | None = None
        self.is_complete = False

    def join(self, attempt: Attempt, sink: Sink) -> None:
        """Deliver to `sink` what has arrived and what follows, and report to `attempt`. Call it once."""
        held, self._sink = self._sink, sink
        assert isinstance(held, _HoldingSink), "the stream has been joined already"
        if self.attempt.has_begun:
            attempt.begin()
        self.attempt = attempt
        for delta in held.deltas:
            sink.deliver(delta)

    def on_tokens(
        self, position: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> None:
        """Deliver tokens. Raises PROTOCOL_VIOLATION if they do not continue the stream."""
        if position != self.position or self._finish is not None or not token_ids:
            why = "after the finish" if self._finish is not None else f"instead of at position {self.position}"
            raise Failure(Reason.PROTOCOL_VIOLATION, f"{len(token_ids)} tokens at position {position} {why}")
        if self._has_logprobs and (logprobs is None or len(logprobs) != len(token_ids)):
            raise Failure(Reason.PROTOCOL_VIOLATION, "the number of log probabilities is not that of the tokens")
        if max(token_ids) >= self._vocab_size:
            raise Failure(
                Reason.PROTOCOL_VIOLATION, f"token {max(token_ids)} is not in the vocabulary of {self._vocab_size}"
            )
        self.position += len(token_ids)
        try:
            self._sink.deliver(Delta(position, token_ids, "", self._choice, logprobs))
        except Exception as error:  # A bug: sinks must not raise. The other streams go on.
            self.fail(bug_failure(error, "(see above)"))

    def on_end(self, end: worker_pb2.StreamEnd) -> None:
        """End the stream, or note its finish reason. Raises PROTOCOL_VIOLATION for an empty end or a second reason."""
        if end.HasField("error"):
            self.fail(error_from_wire(end.error))
            return
        reason = finish_reason_from_wire(end.finish_reason)
        if reason is not None and self._finish is not None:
            raise Failure(Reason.PROTOCOL_VIOLATION, "a second finish reason")
        if reason is None and not end.complete_final:
            raise Failure(Reason.PROTOCOL_VIOLATION, "an end with neither finish reason nor complete_final")
        if reason is not None:
            self._finish = Finish(reason)
        if end.complete_final:
            self.complete()

    def complete(self) -> None:
        """End the stream with its finish reason. Ignored if the stream has ended."""
        if self._finish is None:
            self.fail(Failure(Reason.ENGINE_ERROR, "the engine ended the stream without a finish reason"))
            return
        self.is_complete = True
        if not self.ended.done():
            self.ended.set_result(self._finish)

    def fail(self, failure: Failure) -> None:
        """End the stream with the failure, or with its finish reason if it has one. Ignored if the stream has ended."""
        if self.ended.done():
            return
        if self._finish is not None:
            self.ended.set_result(self._finish)
        else:
            self.ended.set_exception(failure)
