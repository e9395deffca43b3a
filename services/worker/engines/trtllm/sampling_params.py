"""What a request becomes for TensorRT-LLM 1.2: pure, from values to keyword arguments.

| of the request | becomes |
| --- | --- |
| token_ids, generated_token_ids | the prompt, one list of ids |
| max_tokens, min_tokens | what is left of them after generated_token_ids |
| temperature 0 | `top_k=1` alone, since without any of the three the engine is greedy and says so |
| temperature, top_p, top_k | themselves, all three, since one that is missing has another default |
| a temperature below TEMPERATURE_MIN | TEMPERATURE_MIN, at which the likeliest token is drawn but for a near tie |
| the model's end ids, stop.token_ids | `end_id`, `stop_token_ids`: the engine ends there, and the cursor looks, too |
| ignore_eos | `ignore_eos`, and no end id among the stop ids |
| logprobs k | `logprobs` of at least 1, for 0 means none; the cursor cuts what is too many |
| logit_bias | a vector over the vocabulary |
| guided | GuidedDecodingParams; a choice becomes an expression |
| strings, n, choice, text, messages, parts | nothing: settled above the worker |
| seed, penalties, min_p | refused unless neutral: the sampler of 1.2 takes them and does nothing with them |

Raises INVALID_ARGUMENT for what the engine would ignore, or might not survive. Never names `stop`: the engine would
look for strings by ids of its own making.
"""

from dataclasses import dataclass
from typing import Any

from services.core.errors import invalid
from services.core.request import Guided, GuidedKind, Request, Sampling

TEMPERATURE_MIN = 0.01
"""Scores divided by much less are infinite in the engine's arithmetic, and what it draws from then may end it for all.
Source of the number: vLLM's sampling parameters.
"""
_META = frozenset(r"\.+*?()|[]{}^$")
"""What means something in an expression. Python's `re.escape` escapes more, which not every dialect reads."""
_KINDS = {
    "xgrammar": tuple(GuidedKind),
    "llguidance": tuple(kind for kind in GuidedKind if kind is not GuidedKind.GRAMMAR),
}
"""A grammar of ours is in GBNF. xgrammar reads that, llguidance only a language of its own."""
_NEUTRAL: dict[str, float] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the mapping has to know. end_ids: the model's own, the tokeniser's first. guided_backend: if one is on."""

    context_length: int
    vocab_size: int
    end_ids: tuple[int, ...]
    guided_backend: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArguments:
    """For `generate_async`. sampling: of SamplingParams, but for two that have classes of their own.

    guided: of GuidedDecodingParams. bias: what is added to the scores of which token, for `embedding_bias`.
    """

    token_ids: list[int]
    sampling: dict[str, Any]
    guided: dict[str, Any] | None = None
    bias: tuple[tuple[int, float], ...] = ()


def guided_kinds(backend: str | None) -> tuple[GuidedKind, ...]:
    """The forms that a backend for guided decoding keeps, for the model card."""
    return () if backend is None else _KINDS[backend]


def generate_arguments(request: Request, facts: ModelFacts) -> GenerateArguments:
    """The whole mapping, of a request that has tokens left. Raises Failure(INVALID_ARGUMENT)."""
    assert tokens_left(request, facts.context_length) > 0, "it has ended already"
    _refuse_ignored(request.sampling)
    return GenerateArguments(
        token_ids=[*request.prompt_token_ids, *request.generated_token_ids],
        sampling={
            "detokenize": False,
            "max_tokens": tokens_left(request, facts.context_length),
            **_drawing(request.sampling, facts.vocab_size),
            **_ending(request, facts.end_ids),
            **({} if request.logprobs is None else {"logprobs": max(request.logprobs, 1)}),
        },
        guided=None if request.guided is None else _guided(request, request.guided, facts.guided_backend),
        bias=request.sampling.logit_bias,
    )


def tokens_left(request: Request, context_length: int) -> int:
    """How many more tokens the answer may have."""
    by_limit = request.max_tokens - len(request.generated_token_ids)
    return max(0, min(by_limit, context_length - request.token_count))


def answer_end_ids(request: Request, end_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end this answer, and are not part of it."""
    return frozenset(request.stop.token_ids + (() if request.stop.ignore_eos else end_ids))


def _refuse_ignored(sampling: Sampling) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(sampling, name) != neutral:
            raise invalid(name, f"{name} has no effect in TensorRT-LLM 1.2: leave it out")
    if sampling.seed is not None and not sampling.is_greedy:
        raise invalid("seed", "TensorRT-LLM 1.2 draws from no seed: leave seed out, or set temperature to 0")


def _drawing(sampling: Sampling, vocab_size: int) -> dict[str, Any]:
    """How a token is drawn."""
    if sampling.is_greedy:
        return {"top_k": 1}
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    assert sampling.temperature is not None, "preprocess sets the temperature"
    return {"temperature": max(sampling.temperature, TEMPERATURE_MIN), "top_p": sampling.top_p, "top_k": top_k}


def _ending(request: Request, end_ids: tuple[int, ...]) -> dict[str, Any]:
    """Where the answer ends. An `end_id` is given always: without one the engine would ask for a tokeniser."""
    first, *more = end_ids
    stop = request.stop
    stop_ids = sorted(answer_end_ids(request, end_ids) - (frozenset() if stop.ignore_eos else {first}))
    ending = {"end_id": first, "pad_id": first, "ignore_eos": stop.ignore_eos, "stop_token_ids": stop_ids or None}
    min_left = stop.min_tokens - len(request.generated_token_ids)
    if min_left > 0 and (stop_ids or not stop.ignore_eos):
        if stop_ids:
            raise invalid("min_tokens", _held_off_one(stop.token_ids, more))
        ending["min_tokens"] = min_left
    return ending


def _held_off_one(stop_ids: tuple[int, ...], more_ends: list[int]) -> str:
    other = "stop_token_ids" if stop_ids else f"the model's further end tokens {more_ends}"
    return f"TensorRT-LLM holds off one end token until min_tokens, and not {other}: leave min_tokens out"


def _guided(request: Request, guided: Guided, backend: str | None) -> dict[str, Any]:
    """The form. Ends that are held off may leave a form without any token, of which the whole engine dies."""
    if guided.kind not in guided_kinds(backend):
        raise invalid("guided", f"this worker can't do guided.{guided.kind}: see --guided-decoding-backend")
    if request.stop.ignore_eos or request.stop.min_tokens > len(request.generated_token_ids):
        raise invalid("guided", "guided goes with neither ignore_eos nor min_tokens here: leave them out")
    match guided.kind:
        case GuidedKind.JSON_OBJECT:
            return {"json_object": True}
        case GuidedKind.JSON_SCHEMA:
            return {"json": guided.texts[0]}
        case GuidedKind.REGEX:
            return {"regex": guided.texts[0]}
        case GuidedKind.GRAMMAR:
            return {"grammar": guided.texts[0]}
        case GuidedKind.CHOICE:
            return {"regex": "(" + "|".join(map(_escaped, guided.texts)) + ")"}


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in _META else character for character in text)
