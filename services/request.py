"""What travels through the plane: a request goes down through layers, tokens come back up through sinks.

Every step of a request, in the frontend, in a worker and in a test double, has the one signature `Layer`. A layer is an
`async` call; a token is a plain synchronous call of `Sink.deliver`. So there is no generator to close, no timer and no
task switch per token.

Requests and calls are msgspec's structs: a layer that changes one copies it, and a frozen dataclass costs 20 times as
much to copy.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from services.card import ModelCard
from services.errors import Failure
from services.party import Party


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


def _ignore(*_: object) -> None:
    """Not everybody has to know."""


class Phase(StrEnum):
    """How far a request has come in a worker. PREFILL: the engine has it, and there is no token yet."""

    QUEUED = "queued"
    PREFILL = "prefill"
    RUNNING = "running"
    ENDED = "ended"


class Attempt(Struct):
    """One try of a call on one worker. worker: the session, named by route. has_begun: the engine works on it.

    phase: how far it has come, kept by workers alone. on_begun: called when it begins. on_leaving: called with the
    seconds that are left when the worker says it leaves.
    """

    worker: str | None = None
    has_begun: bool = False
    phase: Phase = Phase.QUEUED
    on_begun: Callable[[], None] = _ignore
    on_leaving: Callable[[float], None] = _ignore

    def begin(self) -> None:
        """The engine works on it from now on."""
        self.has_begun, self.phase = True, Phase.PREFILL
        self.on_begun()

    def release(self) -> None:
        """It has ended, and calls nobody any more."""
        self.on_begun = self.on_leaving = _ignore


class Cause(StrEnum):
    """Why a request was ended before its answer was complete, by somebody who did not want it any more.

    The last three are a worker's: its frontend cancelled the stream, or hung up; a bug on the way of its tokens.
    """

    CLIENT_DISCONNECT = "client_disconnect"
    EXPLICIT = "explicit"
    DEADLINE = "deadline"
    SLOW_CLIENT = "slow_client"
    DRAIN = "drain"
    SIGNAL = "signal"
    SESSION_LOST = "session_lost"
    INTERNAL = "internal"


class Ending:
    """Ends a request from outside of its own task: for a sink whose client does not read, a process that leaves, and a
    client that cancels by name.

    The first failure counts, and the first cause. `Accept` listens, so that the request fails below whatever counts
    outcomes.
    """

    __slots__ = ("_on_failed", "cause", "failure")

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.cause: Cause | None = None
        self._on_failed: Callable[[], None] | None = None

    def listen(self, on_failed: Callable[[], None] | None) -> None:
        """Who is told of the failure; None: nobody any more."""
        self._on_failed = on_failed

    def fail(self, failure: Failure, cause: Cause) -> None:
        """The request is to fail with this, unless it has failed or ended already. Never raises."""
        if self.failure is None:
            self.failure, self.cause = failure, self.cause or cause
            if self._on_failed is not None:
                self._on_failed()


class Call(Struct, frozen=True, kw_only=True):
    """This asking of a request: who, until when, and what has been tried.

    deadline: absolute, in the event loop's time. endpoint: for metrics. migration_limit: the client's own, at most the
    frontend's. ending: for who has to end it from outside. card: the model's, from preprocess on; only workers with
    this very card may answer. attempt: the one under way. excluded: sessions that this request must not go on any more.
    replacement_deadline: until when it may wait for a worker; None: not at all. party: of a choice whose first attempt
    goes to one worker with the others'.
    """

    request_id: str
    deadline: float | None = None
    endpoint: str = "generate"
    is_streamed: bool = True
    migration_limit: int | None = None
    ending: Ending = field(default_factory=Ending)
    card: ModelCard | None = None
    attempt: Attempt = field(default_factory=Attempt)
    excluded: frozenset[str] = frozenset()
    replacement_deadline: float | None = None
    party: Party | None = None

    @property
    def worker(self) -> str | None:
        """The session that the attempt under way goes on."""
        return self.attempt.worker


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
