"""What travels through the plane: a request goes down through layers, tokens come back up through sinks.

Every step of a request, in the frontend, in a worker and in a test double, has the one signature `Layer`. A layer is an
`async` call; a token is a plain synchronous call of `Sink.deliver`. So there is no generator to close, no timer and no
task switch per token.

Requests and calls are msgspec's structs: a layer that changes one copies it, and a frozen dataclass costs 20 times as
much to copy.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace


class FinishReason(StrEnum):
    """Why an answer ended well, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Sampling(Struct, frozen=True, kw_only=True, gc=False):
    """How a token is drawn: see `Sampling` in inference.proto for ranges.

    Below preprocess `temperature` is never None, and `seed` only where the engine draws from none: see `Resume`.
    """

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """The likeliest token always, below preprocess."""
        assert self.temperature is not None, "preprocess sets the temperature"
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Stop(Struct, frozen=True, kw_only=True, gc=False):
    """When an answer ends. `max_tokens` is never None below preprocess; all counts are over the whole continuation."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None


class GuidedKind(StrEnum):
    """The forms that an answer can be held to: names of fields of `Guided` in inference.proto."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


class Guided(Struct, frozen=True, gc=False):
    """Holds an answer to a form. texts: the schema, expression or grammar; for CHOICE the answers; else empty."""

    kind: GuidedKind
    texts: tuple[str, ...] = ()


class Message(Struct, frozen=True, gc=False):
    """One turn of a conversation. name: of who speaks, where there are several of a role."""

    role: str
    content: str
    name: str = ""


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """What is asked, in the client's own terms: limits and seed mean the whole answer, however often it moves.

    Exactly one of text, messages, token_ids and parts is set; below preprocess it is token_ids or parts, and below
    prompts token_ids. parts: the request once for each of several prompts. generated_token_ids are the
    tokens that exist already: the answer goes on after them, and every engine derives from them what it needs (tokens
    left, penalty counts, position of the randomness). n: how many answers; below choices it is 1, and `choice` says
    which. logprobs: how many rivals' log probabilities to give beside each token's own; None: none at all.
    """

    model: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    parts: tuple["Request", ...] = ()
    generated_token_ids: tuple[int, ...] = ()
    n: int = 1
    choice: int = 0
    logprobs: int | None = None
    guided: Guided | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = field(default_factory=Stop)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt, below preprocess."""
        assert self.token_ids is not None, "only preprocess sees a prompt without token ids"
        return self.token_ids

    @property
    def token_count(self) -> int:
        """Of the prompt and what there is of the answer, below preprocess: what an engine has to read first."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def max_tokens(self) -> int:
        """The limit, below preprocess."""
        assert self.stop.max_tokens is not None, "preprocess sets max_tokens"
        return self.stop.max_tokens

    def after(self, token_ids: Sequence[int]) -> "Request":
        """The same request, to go on after `token_ids` more tokens."""
        if not token_ids:
            return self
        return replace(self, generated_token_ids=self.generated_token_ids + tuple(token_ids))
