"""The protocol of an engine, which makes tokens for many requests at a time, in steps."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from services.core.errors import Failure
from services.core.interface import TokenLogprobs
from services.core.model_card import ModelCard
from services.core.request import FinishReason, Request
from services.isolation.losses import Loss


class Output(Struct):
    """The output of one step for one request: tokens, and possibly the end of the answer.

    The tokens do not include the end token. `logprobs`: one for each token, if requested. After an output with a
    `finish` or a `failure`, the engine has removed the key.
    """

    key: int
    token_ids: Sequence[int] = ()
    finish: FinishReason | None = None
    failure: Failure | None = None
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one data-parallel rank by its requests: those submitted that have neither ended nor been cancelled.

    `kv_blocks_used`: blocks of the key-value cache, for the whole prompt from the start and for the answer as it grows.
    `kv_blocks_total`: blocks that requests can fill; `used` never exceeds it. `active_prefill_tokens`: tokens of
    prompts, and tokens that must be computed again, that are not computed yet. `dp_rank`: number of the rank, from 0.
    """

    kv_blocks_used: int
    kv_blocks_total: int
    active_prefill_tokens: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of the engine, and its totals since the start, which include requests that were cancelled later.

    `steps`: grows by one with each step, and keeps growing while sequences run. `ranks`: those that have reported, each
    once. `prefill_tokens`: tokens computed of prompts and of the generated tokens of continued requests.
    `generated_tokens`: tokens drawn, without end tokens. `tokens_after_cancel`: tokens of either kind whose computation
    ended after the request's `cancel`; a prompt chunk counts as a whole. `helpers_lost`: helper processes lost with a
    guided form or answer.
    """

    steps: int
    ranks: tuple[RankLoad, ...]
    prefill_tokens: int = 0
    generated_tokens: int = 0
    tokens_after_cancel: int = 0
    helpers_lost: Mapping[Loss, int] = field(default_factory=dict)


Emit = Callable[[Sequence[Output]], None]
"""Receives the outputs of one step. Called on the event loop, in the order of the steps. Never raises."""


class Engine(Protocol):
    """Makes tokens. All methods are called on the event loop, and none blocks it.

    An engine continues a request after its `generated_token_ids` exactly as if it had drawn them itself, as far as
    `card.resume` promises. Limits count the whole continuation. A request that is already at a limit finishes at the
    next step without a token.
    """

    @property
    def card(self) -> ModelCard:
        """The model card. Known once `ready` is set."""
        ...

    @property
    def request_limit(self) -> int:
        """The largest number of requests that may run at a time."""
        ...

    def tokenizer_content(self) -> bytes:
        """The content of the tokenizer; `card.tokenizer.sha256` is its checksum."""
        ...

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        """Load the model, set `ready`, and step until cancelled. Raises Failure(ENGINE_DEAD) if it cannot continue."""
        ...

    def submit(self, key: int, request: Request) -> None:
        """Start a request that validate.py has checked against the card. Raises Failure if it still cannot run."""
        ...

    def cancel(self, key: int) -> None:
        """Stop a request. At most the step in progress still works on it, and it emits no further output.

        Idempotent. An unknown key is ignored.
        """
        ...

    def load(self) -> EngineLoad:
        """The load at this moment."""
        ...
