"""The tokens that a client has: another worker continues after them."""

import sys
from array import array
from collections.abc import Callable

from services.core.interface import Delta, Sink, TokenLogprobs
from services.core.request import Continuation, Request


class Recorder:
    """Records delivered tokens on their way to the client.

    Above `seq_len_max` tokens of prompt and answer together it stops recording and frees what it has. `position`: of
    the next token, in the whole continuation. `logprobs`: of the recorded tokens, if they are recorded too.
    """

    __slots__ = (
        "_always",
        "_begin",
        "_on_exceeded",
        "_on_next",
        "_on_told",
        "_sink",
        "_tracked_end",
        "is_tracking",
        "logprobs",
        "position",
        "token_ids",
    )

    def __init__(
        self,
        sink: Sink,
        request: Request,
        seq_len_max: int | None,
        on_exceeded: Callable[[], None],
        *,
        records_logprobs: bool = False,
        on_tokens: Callable[[], None] | None = None,
        on_told: Callable[[Continuation], None] | None = None,
    ) -> None:
        """`on_tokens`: called just before the first token is delivered, and before the next one after each move.
        `on_told`: called with what the answer has lost by moving.
        """
        self._sink = sink
        self._begin = self.position = len(request.generated_token_ids)
        self._on_exceeded = on_exceeded
        self._always = self._on_next = on_tokens
        self._tracked_end = sys.maxsize if seq_len_max is None else seq_len_max - len(request.prompt_token_ids)
        self._on_told = on_told
        self.is_tracking = True
        self.token_ids = array("I")
        self.logprobs: list[TokenLogprobs] | None = [] if records_logprobs and request.logprobs is not None else None
        if self.position > self._tracked_end:
            self._stop_tracking()

    @property
    def count(self) -> int:
        """How many tokens were delivered."""
        return self.position - self._begin

    def on_next(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` once, just before the next token is delivered; None removes the callback."""
        always = self._always
        if callback is None or always is None:
            self._on_next = callback or always
            return

        def both() -> None:
            callback()
            always()

        self._on_next = both

    def deliver(self, delta: Delta) -> None:
        token_ids = delta.token_ids
        assert delta.position == self.position, f"tokens start at position {delta.position}, expected {self.position}"
        if self._on_next is not None:
            callback, self._on_next = self._on_next, None
            callback()
        self.position += len(token_ids)
        if self.is_tracking:
            if len(token_ids) == 1:
                self.token_ids.append(token_ids[0])  # Nearly always: `extend` takes twice as long.
            else:
                self.token_ids.extend(token_ids)
            if self.logprobs is not None:
                self.logprobs.extend(delta.logprobs or ())
            if self.position > self._tracked_end:
                self._stop_tracking()
        self._sink.deliver(delta)

    def tell(self, continuation: Continuation) -> None:
        """Tell how the answer continues, in a delta without tokens."""
        if self._on_told is not None:
            self._on_told(continuation)
        self._sink.deliver(Delta(self.position, (), continuation=continuation))

    def _stop_tracking(self) -> None:
        self.is_tracking, self.logprobs = False, None
        self.token_ids = array("I")
        self._on_exceeded()
