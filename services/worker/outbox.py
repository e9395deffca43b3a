"""Gathers what a worker has not sent to one frontend yet."""

from collections.abc import Callable

from services.core.errors import Failure
from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason
from services.rpc.codec import error_to_wire, finish_reason_to_wire, seconds_to_wire
from services.rpc.step import Entries, put_entries
from services.stubs import worker_pb2

TOKEN_BYTES = 4
"""The size of a token id. An end counts as many tokens as its size has room for."""


class Outbox:
    """The next message to one frontend. A frontend that reads slowly gets fewer messages with larger entries.

    `token_count`: the size of the tokens, ends and begun streams in the outbox, in tokens. A log probability counts as
    one token (`Delta.weight`), a stream that has begun as one, an end by its size. `has_columns`: the frontend reads
    log probabilities in columns.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change`: called whenever something is added."""
        self._on_change = on_change
        self._message = worker_pb2.WorkerMessage()
        self._entries: Entries = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # By stream id, if the request asked for them.
        self.token_count = 0
        self.has_columns = False

    def add_tokens(self, stream_id: int, delta: Delta) -> None:
        """Add tokens that follow those of the same stream."""
        entry = self._entries.get(stream_id)
        if entry is None:
            self._entries[stream_id] = (delta.position, list(delta.token_ids))
        else:
            assert delta.position == entry[0] + len(entry[1]), "a gap between deltas"
            entry[1].extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.setdefault(stream_id, []).extend(delta.logprobs)
        self._grow(delta.weight)

    def add_finish(self, stream_id: int, reason: FinishReason) -> None:
        """Add the end of a successful stream."""
        end = self._message.ends.add()
        end.stream_id, end.finish_reason, end.complete_final = stream_id, finish_reason_to_wire(reason), True
        self._grow_by_end(end)

    def add_failure(self, stream_id: int, failure: Failure) -> None:
        """Add the end of a failed stream."""
        self._grow_by_end(self._message.ends.add(stream_id=stream_id, error=error_to_wire(failure)))

    def _grow_by_end(self, end: worker_pb2.StreamEnd) -> None:
        self._grow(-(-end.ByteSize() // TOKEN_BYTES))

    def _grow(self, token_count: int) -> None:
        self.token_count += token_count
        self._on_change()

    def add_begun(self, stream_id: int) -> None:
        """Add that the engine has the request of a stream."""
        self._message.begun.append(stream_id)
        self._grow(1)

    def add_located(self, located: worker_pb2.Located) -> int:
        """Add the answer to a question about generations. Returns its size, in tokens, which `token_count` leaves out.

        Call it while the frontend reads: one answer may be as large as all that a frontend may leave unread.
        """
        self._message.located.append(located)
        self._on_change()
        return -(-located.ByteSize() // TOKEN_BYTES)

    def set_welcome(self, welcome: worker_pb2.Welcome) -> None:
        self._message.welcome.CopyFrom(welcome)
        self._on_change()

    def set_load(self, load: worker_pb2.Load) -> None:
        self._message.load.CopyFrom(load)
        self._on_change()

    def set_goaway(self, grace_s: float) -> None:
        self._message.goaway.grace.CopyFrom(seconds_to_wire(grace_s))
        self._on_change()

    @property
    def is_empty(self) -> bool:
        return not self._entries and not self._message.ByteSize()

    @property
    def has_ends(self) -> bool:
        """Whether the next message has the end of a stream."""
        return bool(self._message.ends)

    def pop_message(self) -> worker_pb2.WorkerMessage:
        """Remove everything there is to send and return it as one message."""
        message, self._message = self._message, worker_pb2.WorkerMessage()
        self.token_count = 0
        if self._entries:
            entries, self._entries = self._entries, {}
            logprobs, self._logprobs = self._logprobs, {}
            put_entries(message.step, entries, logprobs, has_columns=self.has_columns)
        return message
