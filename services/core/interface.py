"""The interface of every step of a request: requests go down through layers, tokens come back up through sinks.

Five fields of `Call` carry data that travels neither way. There are no other side channels.

| field of `Call` | from | to | what it carries |
| --- | --- | --- | --- |
| `ending` | stream writers, `Gate` | `Accept`, `Observe` | a failure from outside the request's task, and its cause |
| `told` | `Preprocess`, `Validate` | stream writers | the seed, and the prompts in token ids, before the first token |
| `told` | `Limit` | the headers of answers | what the client's tenant has left of its rates |
| `attempt` | `Route` | `Transport`, `Migrate` | the session that the attempt goes on, and that a later attempt avoids |
| `attempt` | the session | `Migrate` | two events between tokens: the engine has begun, the worker leaves |
| `kept` | `Keep`, the resumption | `Route`, `Transport` | who has a choice already, and what becomes of its stream |
| `choice_group` | `Choices` | `Route`, the session | one reservation for all choices, which run in separate tasks |

`Migrate` takes a choice out of its group as soon as the choice goes its own way. In a worker the same fields carry the
same facts: `Execute` reports to the worker's session that the engine has begun, takes the places that a choice group
reserves, and reads in `ending` why the session cancelled a stream.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from services.core.call import Call
from services.core.request import Continuation, FinishReason, Request


class Usage(Struct, frozen=True, gc=False):
    """Token counts as the client sees them."""

    prompt_tokens: int
    completion_tokens: int


class TokenLogprobs(Struct, gc=False, frozen=True):
    """Natural logarithm of a token's probability. `top`: ids and values of the likeliest tokens, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Struct, gc=False):
    """New tokens of one choice; `position` is the index of the first one in the choice's continuation.

    `logprobs`: one for each token, if the request asked for them. Above `Detokenize`, the last delta of a choice has
    its `finish_reason` and `continuation`, and the last delta of the request has the `usage` of the whole request.
    Below it, `continuation` comes in a delta without tokens when a move is known to lose something. `prompt_tokens`: of
    the choice's prompt, set above `Detokenize` if `Call.counts_prompt`.
    """

    position: int
    token_ids: Sequence[int]
    text: str = ""
    choice: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_tokens: int = 0
    continuation: Continuation | None = None

    @property
    def weight(self) -> int:
        """The memory it takes, counted in tokens: each log probability counts as one more, alternatives included."""
        if self.logprobs is None:
            return len(self.token_ids)
        return len(self.token_ids) + sum(1 + len(one.top) for one in self.logprobs)


class Finish(Struct, frozen=True, gc=False):
    """The end of a request that did not fail. `usage` is None below `Detokenize`, which counts what the client gets."""

    reason: FinishReason
    usage: Usage | None = None


class Sink(Protocol):
    """Receives tokens. Never blocks, never awaits, never raises."""

    def deliver(self, delta: Delta, /) -> None: ...


class Layer(Protocol):
    """Runs one request to its end and passes its tokens to `sink` as they come. Raises only Failure."""

    async def __call__(self, request: Request, call: Call, sink: Sink, /) -> Finish: ...
