"""The interface of every step of a request: requests go down through layers, tokens come back up through sinks."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from services.core.call import Call
from services.core.request import FinishReason, Request


class Usage(Struct, frozen=True, gc=False):
    """Tokens as the client asked and got them."""

    prompt_tokens: int
    completion_tokens: int


class TokenLogprobs(Struct, gc=False, frozen=True):
    """Natural logarithm of a token's probability. top: ids and values of the likeliest tokens, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Struct, gc=False):
    """Tokens that were added to one choice; `position` is the index of the first in the choice's continuation.

    logprobs: one for each token, where asked. Above present the last delta of a choice has its finish_reason, and the
    last of all choices the usage of the whole request.
    """

    position: int
    token_ids: Sequence[int]
    text: str = ""
    choice: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def weight(self) -> int:
        """What it takes to keep it, in tokens: a log probability is one more, and each rival's as well."""
        if self.logprobs is None:
            return len(self.token_ids)
        return len(self.token_ids) + sum(1 + len(one.top) for one in self.logprobs)


class Finish(Struct, frozen=True, gc=False):
    """A request ended well. `usage` is None below present, which alone knows what the client asked."""

    reason: FinishReason
    usage: Usage | None = None


class Sink(Protocol):
    """Takes tokens. Never blocks, never awaits, never raises."""

    def deliver(self, delta: Delta, /) -> None: ...


class Layer(Protocol):
    """Runs one request to its end; tokens go to `sink` as they come. Raises Failure, and nothing else."""

    async def __call__(self, request: Request, call: Call, sink: Sink, /) -> Finish: ...
