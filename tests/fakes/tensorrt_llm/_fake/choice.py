"""One answer while it is being generated."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from ..executor.request import GenerationRequest, Logprob, Response
from ..sampling_params import SamplingParams
from .guided import Guide
from .kv_cache import Allocation
from .model import Model, State


class DeadEndError(RuntimeError):
    """No token may follow. 1.2.1 crashes in this case."""


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """All answers to one request.

    `max_tokens`: bounded by the context. `open_count`: answers that have not ended. `error_after`, `lost_after`: the
    number of tokens after which the request fails, or its responses get lost.
    """

    request: GenerationRequest
    max_tokens: int
    open_count: int
    cancel_at: int | None = None
    error_after: int | None = None
    lost_after: int | None = None
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Choice:
    """One of the answers, in a slot of the batch. `prefill_left`: prompt tokens that are not computed yet."""

    answer: Answer
    index: int
    state: State
    prefill_left: int
    stops: list[tuple[str | int, list[int]]]
    guide: Guide | None = None
    allocation: Allocation | None = None
    generated: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    unsent_logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.answer.request.sampling_params

    @property
    def token_count(self) -> int:
        """Tokens in the cache."""
        return len(self.answer.request.prompt_token_ids) + len(self.generated)

    def draw(self, model: Model, random: Random) -> int:
        """Draw the next token and add it to the answer. Raises DeadEndError."""
        logits = self._logits(model)
        if not logits:
            raise DeadEndError("no token is allowed")
        token = draw(logits, self.params, random)
        if self.params.logprobs:
            self.unsent_logprobs.append(logprobs_of(token, logits, model.normaliser(logits), self.params.logprobs))
        if self.guide is not None:
            self.guide.accept_token(token)
        self.state = self.state.after((token,))
        self.generated.append(token)
        self.unsent.append(token)
        return token

    def _logits(self, model: Model) -> dict[int, float]:
        params = self.params
        banned = set(params.bad_token_ids or ())
        if len(self.generated) < (params.min_tokens or 0) and params.end_id is not None:
            banned.add(params.end_id)
        logits = model.likely(self.state)
        if self.guide is not None:
            logits = model.among(self.state, self.guide.allowed())
        if params.embedding_bias is not None:
            bias = params.embedding_bias.tolist()
            allowed = range(len(bias)) if self.guide is None else logits
            logits = {token: value + bias[token] for token, value in model.among(self.state, allowed).items()}
        return {token: value for token, value in logits.items() if token not in banned}

    def end(self, token: int) -> tuple[str, str | int | None, int] | None:
        """If the token is the last: the finish reason, the stop reason, and how many tokens are removed from the end.

        An end token takes precedence over the limit, and the limit over a stop word, which is then kept.
        """
        if token == self.params.end_id and not self.params.ignore_eos:
            return "stop", None, 0
        if len(self.generated) >= self.answer.max_tokens:
            return "length", None, 0
        for reason, words in self.stops:
            if self.generated[-len(words) :] == words:
                return "stop", reason, 0 if self.params.include_stop_str_in_output else len(words)
        return None

    def response(self, step: int, end: tuple[str, str | int | None, int] | None = None) -> Response:
        """The response with the tokens that are not sent yet, and the end if there is one."""
        finish, stop_reason, cut_count = end or (None, None, 0)
        if finish is not None:
            self.answer.open_count -= 1
        token_ids, self.unsent = tuple(self.unsent), []
        logprobs, self.unsent_logprobs = tuple(self.unsent_logprobs), []
        return Response(
            id=self.answer.request.id,
            sequence_index=self.index,
            token_ids=token_ids,
            logprobs=logprobs if self.params.logprobs else None,
            finish=finish,
            stop_reason=stop_reason,
            cut_count=cut_count,
            is_final=self.answer.open_count == 0,
            decoding_iter=step,
            cached_tokens=self.answer.cached_tokens,
        )


def is_greedy(params: SamplingParams) -> bool:
    """The sampler's own rule: parameters with defaults are greedy, and a temperature alone makes them sampled."""
    given = (params.temperature, params.top_p, params.top_k)
    return given == (None, None, None) or params.top_k == 1 or params.top_p == 0 or params.temperature == 0


def draw(logits: Mapping[int, float], params: SamplingParams, random: Random) -> int:
    """Draw the likeliest token, or a random one. Seed and penalties have no effect."""
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    if is_greedy(params):
        return ranked[0]
    temperature = params.temperature or 1.0
    kept = ranked[: params.top_k or None]
    weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in kept]
    count = _nucleus(weights, params.top_p or 1.0)
    return random.choices(kept[:count], weights[:count])[0]


def _nucleus(weights: Iterable[float], top_p: float) -> int:
    """The number of likeliest tokens whose probabilities add up to top_p."""
    values = list(weights)
    total, reached = sum(values), 0.0
    for count, weight in enumerate(values, start=1):
        reached += weight / total
        if reached >= top_p:
            return count
    return len(values)


def logprobs_of(drawn: int, logits: Mapping[int, float], normaliser: float, count: int) -> dict[int, Logprob]:
    """The `count` likeliest tokens, before temperature, and then the drawn token unless it is one of them."""
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    ranks = {token: rank for rank, token in enumerate(ranked, start=1)}
    return {token: Logprob(logits[token] - normaliser, ranks[token]) for token in [*ranked[:count], drawn]}
