"""What an engine is: it makes tokens for many requests at a time, in steps."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from services.core.errors import Failure
from services.core.interface import TokenLogprobs
from services.core.model_card import ModelCard
from services.core.request import FinishReason, Request


class Output(Struct):
    """What one step did for one request: tokens, then maybe its end. The end token itself is not among the tokens.

    logprobs: one for each token, if asked. After a `finish` or a `failure` the engine has forgotten the key.
    """

    key: int
    token_ids: Sequence[int] = ()
    finish: FinishReason | None = None
    failure: Failure | None = None
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Load of one data-parallel rank: of requests submitted that have neither ended nor been cancelled.

    kv_blocks_used: key-value cache blocks that are spoken for: of a whole prompt from the start on, of an answer as it
    grows. kv_blocks_total: those that requests can fill; `used` never exceeds it. active_prefill_tokens: tokens that
    requests brought, or have to compute again, and that are still to be computed before their next can be drawn.
    dp_rank: which rank, from 0.
    """

    kv_blocks_used: int
    kv_blocks_total: int
    active_prefill_tokens: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine is doing. `steps` grows by one for each step and never stands still while sequences run.

    ranks: those that have reported, each once. The others count since the start, what nobody wanted any more included:
    prefill_tokens, tokens computed of prompts and of what continued requests bring; generated_tokens, tokens drawn, end
    tokens not counted; tokens_after_cancel, those of either kind whose computing ended after the request's `cancel`, a
    piece of a prompt being one whole.
    """

    steps: int
    ranks: tuple[RankLoad, ...]
    prefill_tokens: int = 0
    generated_tokens: int = 0
    tokens_after_cancel: int = 0


Emit = Callable[[Sequence[Output]], None]
"""Takes the outputs of one step. Called on the event loop, in the order of the steps. Never raises."""


class Engine(Protocol):
    """Makes tokens. All methods are called on the event loop and none blocks it.

    An engine continues a request after its `generated_token_ids` exactly as it would have gone on itself, within what
    `card.resume` says; limits are over the whole continuation. A request whose limits are met already finishes at the
    next step without a token.
    """

    @property
    def card(self) -> ModelCard:
        """What it serves. Known once `ready` is set."""
        ...

    @property
    def request_limit(self) -> int:
        """The most requests that may be submitted at a time."""
        ...

    def tokenizer_content(self) -> bytes:
        """What `card.tokenizer.sha256` is the checksum of."""
        ...

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        """Load, set `ready`, and step until cancelled. Raises Failure(ENGINE_DEAD) when it cannot go on."""
        ...

    def submit(self, key: int, request: Request) -> None:
        """Start a request, which check.py has held to the card. Raises Failure if it can't be run all the same."""
        ...

    def cancel(self, key: int) -> None:
        """Stop a request: at most the step that is under way still works on it, and nothing of it is emitted any more.

        Idempotent; an unknown key is ignored.
        """
        ...

    def load(self) -> EngineLoad:
        """What it is doing now."""
        ...
