"""One answer in the making."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from ..executor.request import GenerationRequest, Logprob, Response
from ..sampling_params import SamplingParams
from .guided import Guide
from .kv_cache import Lease
from .model import Model, State


class DeadEndError(RuntimeError):
    """No token may follow. 1.2.1 does not survive it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """All the answers to one request. open_count: how many have not ended. max_tokens: what is left of the context.

    error_after, lost_after: after how many tokens it fails, or nothing is told of it any more.
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
    """One of them: a slot of the batch. prefill_left: tokens of the prompt to be read before the first is drawn."""

    answer: Answer
    index: int
    state: State
    prefill_left: int
    stops: list[tuple[str | int, list[int]]]
    guide: Guide | None = None
    lease: Lease | None = None
    generated: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    unsent_logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.answer.request.sampling_params

    @property
    def token_count(self) -> int:
        """Tokens that take room in the cache."""
        return len(self.answer.request.prompt_token_ids) + len(self.generated)

    def draw(self, model: Model, random: Random) -> int:
        """The next token, which becomes part of the answer. Raises DeadEndError."""
        logits = self._logits(model)
        if not logits:
            raise DeadEndError("no token is allowed")
        token = draw(logits, self.params, random)
        if self.params.logprobs:
            self.unsent_logprobs.append(logprobs_of(token, logits, model.normaliser(logits), self.params.logprobs))
        if self.guide is not None:
            self.guide.take(token)
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
        """(why, what stopped it, how many tokens are cut off) if the token is the last.

        Where several ends come together an end token goes first, and the limit before a stop word, which then stays.
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
        """What has not been sent yet, and the end if that is it."""
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
    """By the sampler's own rule, under which an untouched object is greedy and one with a temperature is not."""
    given = (params.temperature, params.top_p, params.top_k)
    return given == (None, None, None) or params.top_k == 1 or params.top_p == 0 or params.temperature == 0


def draw(logits: Mapping[int, float], params: SamplingParams, random: Random) -> int:
    """The likeliest, or one by chance; seed and penalties do not matter."""
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    if is_greedy(params):
        return ranked[0]
    temperature = params.temperature or 1.0
    kept = ranked[: params.top_k or None]
    weights = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in kept]
    count = _nucleus(weights, params.top_p or 1.0)
    return random.choices(kept[:count], weights[:count])[0]


def _nucleus(weights: Iterable[float], top_p: float) -> int:
    """How many of the likeliest together have a share of top_p."""
    values = list(weights)
    total, reached = sum(values), 0.0
    for count, weight in enumerate(values, start=1):
        reached += weight / total
        if reached >= top_p:
            return count
    return len(values)


def logprobs_of(drawn: int, logits: Mapping[int, float], normaliser: float, count: int) -> dict[int, Logprob]:
    """The `count` likeliest, before temperature, and after them the token that was drawn if it is another one."""
    ranked = sorted(logits, key=lambda token: (-logits[token], token))
    ranks = {token: rank for rank, token in enumerate(ranked, start=1)}
    return {token: Logprob(logits[token] - normaliser, ranks[token]) for token in [*ranked[:count], drawn]}
