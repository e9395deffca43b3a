"""The request: what a client asks for, in its own terms.

A layer that changes a request passes on a changed copy. Requests and calls are msgspec structs, because copying a
frozen dataclass costs 20 times as much.
"""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

GREEDY_TEMPERATURE = 1e-5
"""Up to this temperature the likeliest token is taken: scores of a model that differ do so by about as much.

Source of the number: vLLM's sampler.
"""
GREEDY_TOP_P = 2.0**-20
"""Up to this `top_p` only the likeliest token is kept: of 2^20 tokens, the most in a vocabulary, it is as likely."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages. Models whose template has no `developer` get `system` instead."""


class FinishReason(StrEnum):
    """Why an answer ended well. The values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


class Continuation(StrEnum):
    """How an answer went on after a move, if not exactly as without the move.

    PREFIX: after the tokens that the client had, drawn from the same distribution, but not the same tokens.
    """

    PREFIX = "prefix"


class Sampling(Struct, frozen=True, kw_only=True, gc=False):
    """How tokens are sampled. The ranges are in `Sampling` of inference.proto.

    Below `Preprocess`, `temperature` is never None, and `seed` is None only if the engine uses no seeds (see `Resume`).
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
        """Whether the likeliest token is always taken: the limit of four settings. Known below `Preprocess`."""
        assert self.temperature is not None, "Preprocess sets the temperature"
        return (
            self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p <= GREEDY_TOP_P or self.min_p >= 1
        )

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Stop(Struct, frozen=True, kw_only=True, gc=False):
    """When an answer ends. Counts are over the whole continuation. Below `Preprocess`, `max_tokens` is never None.

    `max_tokens_default`: the API's own limit for clients that give none. It gives way to the context and `min_tokens`.
    """

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    max_tokens_default: int | None = None


class GuidedKind(StrEnum):
    """The kinds of constraint on an answer: names of fields of `Guided` in inference.proto."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


class Guided(Struct, frozen=True, gc=False):
    """A constraint on an answer. `texts`: the schema, expression or grammar; for CHOICE the answers; else empty."""

    kind: GuidedKind
    texts: tuple[str, ...] = ()


class Message(Struct, frozen=True, gc=False):
    """One turn of a conversation. `name`: tells speakers with the same role apart."""

    role: str
    content: str
    name: str = ""


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """One request. Limits and seed refer to the whole answer, however often it moves.

    Exactly one of `text`, `messages`, `token_ids` and `parts` is set: below `Preprocess` `token_ids` or `parts`, below
    `Prompts` always `token_ids`. `parts`: one request for each of several prompts. `generated_token_ids`: tokens that
    exist already; the answer continues after them, and the engine derives its state from them (tokens left, penalty
    counts, position of the random numbers). `generated_choices`: the same for each of `n` answers, where they differ;
    None for an answer that is complete already; empty below `Choices`. `n`: how many answers; below `Choices` it is 1,
    and `choice` is the number of the answer. `logprobs`: how many alternatives to give with each token's own log
    probability; None: no log probabilities.
    """

    model: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    parts: tuple["Request", ...] = ()
    generated_token_ids: tuple[int, ...] = ()
    generated_choices: tuple[tuple[int, ...] | None, ...] = ()
    n: int = 1
    choice: int = 0
    logprobs: int | None = None
    guided: Guided | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = field(default_factory=Stop)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt. Known below `Preprocess`."""
        assert self.token_ids is not None, "below Preprocess every prompt has token ids"
        return self.token_ids

    @property
    def token_count(self) -> int:
        """Tokens of the prompt and of the answer so far, which an engine has to prefill. Known below `Preprocess`."""
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    @property
    def max_tokens(self) -> int:
        """The limit of the answer. Known below `Preprocess`."""
        assert self.stop.max_tokens is not None, "Preprocess sets max_tokens"
        return self.stop.max_tokens

    @property
    def open_choices(self) -> Sequence[int]:
        """The numbers of the answers to generate: all but those that are complete already."""
        if not self.generated_choices:
            return range(self.n)
        return [index for index, token_ids in enumerate(self.generated_choices) if token_ids is not None]

    @property
    def together_count(self) -> int:
        """How many answers start together on one worker. Answers that continue after different tokens start alone."""
        return 1 if self.generated_choices else self.n

    def generated_of(self, choice: int) -> tuple[int, ...]:
        """The tokens that exist already of one of the `n` answers."""
        return (self.generated_choices[choice] or ()) if self.generated_choices else self.generated_token_ids

    def single(self, choice: int) -> "Request":
        """The request for one of the `n` answers alone."""
        generated = self.generated_of(choice)
        return replace(self, n=1, choice=choice, generated_token_ids=generated, generated_choices=())

    def continued(self, generated: tuple[tuple[int, ...] | None, ...]) -> "Request":
        """The same request, to be continued after the tokens of each of its `n` answers."""
        if len(generated) == self.n and len(set(generated)) == 1 and generated[0] is not None:
            return replace(self, generated_token_ids=generated[0])
        return replace(self, generated_choices=generated)

    def after(self, token_ids: Sequence[int]) -> "Request":
        """The same request, to be continued after these further tokens."""
        if not token_ids:
            return self
        return replace(self, generated_token_ids=self.generated_token_ids + tuple(token_ids))
