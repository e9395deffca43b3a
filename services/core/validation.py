"""The rules for requests, the same in frontends and workers, over gRPC and HTTP.

Every refusal names the field and says what to change.
"""

import math
import random
import re
import sys
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from services.core.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    OPENAI_CODE,
    Failure,
    Reason,
    invalid,
    quoted,
    shown,
)
from services.core.json.keys import check_keys
from services.core.json.text import syntax_fault
from services.core.model_card import ModelCard
from services.core.request import ROLES, Guided, GuidedKind, Message, Request, Sampling, Stop

NAME_FORM = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Request ids that clients may choose: safe in logs, headers and trailers."""
STOP_STRINGS_MAX = 64
STOP_STRING_CHARACTERS_MAX = 1024
STOP_TOKENS_MAX = 256
LOGIT_BIASES_MAX = 1024
LOGIT_BIAS_MAX = 100
MESSAGES_MAX = 4096
NAME_CHARACTERS_MAX = 256
SPEAKER_FORM = re.compile(r"[^\u0000-\u001f\u007f-\u009f\u2028\u2029]*")
"""Names of speakers: one line without control characters."""
SEED_MAX = 2**64 - 1
COUNT_MAX = 2**32 - 1
MIGRATION_LIMIT = "X-Migration-Limit"
MIGRATION_LIMIT_DIGITS_MAX = 9
SEED_USED = "x-unbroken-seed"
"""The header of a response that has the seed of the request, the client's own or the one that was chosen for it."""
REQUEST_TIMEOUT = "X-Request-Timeout"
GRPC_TIMEOUT = "grpc-timeout"
"""Of gRPC clients it never arrives here: gRPC itself reads it. Gateways keep it in requests over HTTP."""
REQUEST_TIMEOUT_S_MAX = 86_400.0
"""One day. The bound keeps the deadline from overflowing on the way to the worker."""
_DURATION_FORM = "a number of seconds, or a duration such as 30s, 500ms or 1m"
_GRPC_FORM = "at most 8 digits and one of the units H, M, S, m, u and n, such as 30S"
UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
GRPC_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
CHOICES_MAX = 64
ANSWERS_MAX = 256
"""Answers to one request: its prompts times `n`."""
LOGPROBS_MAX = 20
GUIDED_CHARACTERS_MAX = 65_536

_DIGITS = r"(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)"  # Possessive: a long header costs no more than its length.
_NUMBER = re.compile(rf"{_DIGITS}(?:e[+-]?[0-9]+)?")
_PART = re.compile(rf"({_DIGITS})\s*(ms|us|ns|s|m|h)")
_DURATION = re.compile(rf"(?:{_PART.pattern}\s*)+")
_GRPC_DURATION = re.compile(r"([0-9]{1,8})([HMSmun])")

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, math.inf),
}
ABOVE_ZERO = ("repetition_penalty",)
_ENDS = [
    (name, math.nextafter(0, 1) if name in ABOVE_ZERO else least, min(most, sys.float_info.max))
    for name, (least, most) in RANGES.items()
]
"""The least and the greatest value of each range. Infinity and NaN are outside every range."""

FLOAT32_LEAST = 2.0**-126
FLOAT32_GREATEST = (2 - 2.0**-23) * 2.0**127
"""The range of a `float` between frontend and worker: a value outside would arrive as 0 or as infinity."""


def checked_request_id(given: str) -> str:
    """Check the request id that a client chose. Raises INVALID_ARGUMENT."""
    if not NAME_FORM.fullmatch(given):
        raise invalid("request_id", "request_id must be 1 to 128 letters, digits, '-', '_', '.' or ':'")
    return given


def migration_limit_of(given: str | None) -> int | None:
    """Parse the X-Migration-Limit header or metadata: how often a request may move. None if the client sets none.

    Raises INVALID_ARGUMENT unless it is a whole number of at most MIGRATION_LIMIT_DIGITS_MAX digits.
    """
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= MIGRATION_LIMIT_DIGITS_MAX):
        raise invalid(MIGRATION_LIMIT, f"the header {MIGRATION_LIMIT} must be a whole number of moves, 0 for none")
    return int(given)


def timeout_s_of(headers: Mapping[str, str]) -> float | None:
    """How long the client waits for the whole answer, by its headers or metadata (in lower case), in seconds.

    The lowest of several counts. None if there is none. Raises INVALID_ARGUMENT for one that is not a duration above 0,
    up to REQUEST_TIMEOUT_S_MAX.
    """
    given = [
        _checked_seconds(name, text, REQUEST_TIMEOUT_S_MAX)
        for name in (REQUEST_TIMEOUT, GRPC_TIMEOUT)
        if (texts := headers.get(name.lower())) is not None
        for text in texts.split(",")
    ]
    return min(given, default=None)


def duration_s_of(headers: Mapping[str, str], name: str, seconds_max: float) -> float | None:
    """A header that is a number of seconds or a duration, as X-Request-Timeout is; None if there is none.

    Raises INVALID_ARGUMENT unless it is above 0 and up to `seconds_max`.
    """
    given = headers.get(name.lower())
    return None if given is None else _checked_seconds(name, given, seconds_max)


def _checked_seconds(name: str, text: str, seconds_max: float) -> float:
    is_grpc = name == GRPC_TIMEOUT
    seconds = _grpc_seconds(text) if is_grpc else _seconds(text)
    if not 0 < seconds <= seconds_max:  # False for NaN as well.
        form = _GRPC_FORM if is_grpc else _DURATION_FORM
        raise invalid(name, f"the header {name} must be {form}, above 0, up to {seconds_max:.0f} s")
    return seconds


def _seconds(text: str) -> float:
    """A number of seconds, or numbers with units, as Go prints durations (1m30s). NaN if it is neither."""
    bare = text.strip().lower()
    if _NUMBER.fullmatch(bare):
        return float(bare)
    if not _DURATION.fullmatch(bare):
        return math.nan
    return sum(float(number) * UNITS_S[unit] for number, unit in _PART.findall(bare))


def _grpc_seconds(text: str) -> float:
    """A number of at most 8 digits with its unit. NaN if it is neither. Source: gRPC over HTTP2, "Requests"."""
    found = _GRPC_DURATION.fullmatch(text.strip())
    return math.nan if found is None else int(found[1]) * GRPC_UNITS_S[found[2]]


def check_request(request: Request) -> None:
    """Check all that does not depend on the model. Raises INVALID_ARGUMENT."""
    if not request.model:
        raise invalid("model", "model is missing: name one of those in /v1/models")
    given = [prompt for prompt in (request.text, request.messages, request.token_ids) if prompt is not None]
    if not given:
        raise invalid("prompt", "the request has no prompt: give text, chat messages or token ids")
    if request.messages is not None and not request.messages:
        raise invalid("messages", "messages is empty: give at least one")
    if not all(given):
        raise invalid("prompt", "the prompt is empty: give at least one token")
    if len(request.messages or ()) > MESSAGES_MAX:
        raise invalid("messages", f"messages has more than {MESSAGES_MAX} messages: leave the oldest out")
    for index, message in enumerate(request.messages or ()):
        _check_message(message, f"messages[{index}]")
    _check_answers(request)
    if request.guided is not None:
        _check_guided(request.guided)
    _check_sampling(request.sampling)
    _check_stop(request.stop)


def _check_answers(request: Request) -> None:
    if not 1 <= request.n <= CHOICES_MAX:
        raise invalid("n", f"n is {shown(request.n)}: it must be from 1 to {CHOICES_MAX}")
    if request.generated_choices and len(request.generated_choices) != request.n:
        asked = f"tokens of {len(request.generated_choices)} choices are given, but n is {request.n}"
        raise invalid("generated_choices", f"{asked}: give the tokens of each choice")
    if request.logprobs is not None and not 0 <= request.logprobs <= LOGPROBS_MAX:
        raise invalid("logprobs", f"logprobs is {shown(request.logprobs)}: it must be from 0 to {LOGPROBS_MAX}")


def _check_message(message: Message, path: str) -> None:
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise invalid(f"{path}.role", f"{path}.role is {quoted(message.role)}: it must be one of {known}")
    if len(message.name) > NAME_CHARACTERS_MAX or not SPEAKER_FORM.fullmatch(message.name):
        asked = f"one line of at most {NAME_CHARACTERS_MAX} characters, without control characters"
        raise invalid(f"{path}.name", f"{path}.name must be {asked}: shorten it, or write it into the content")


def check_count(request: Request) -> None:
    """Check the number of answers to a request with several prompts. Raises INVALID_ARGUMENT."""
    if len(request.parts) * request.n > ANSWERS_MAX:
        asked = f"{len(request.parts)} prompts with n of {shown(request.n)}"
        detail = f"{asked} are too many: ask for {ANSWERS_MAX} answers at most"
        raise invalid("prompt", detail)


def check_open(request: Request) -> None:
    """Check that some choice is left to generate. Raises INVALID_ARGUMENT."""
    if not any(part.open_choices for part in request.parts or (request,)):
        detail = "the client has all choices complete: there is nothing to generate, so do not send the request"
        raise invalid("generated_choices", detail)


def _check_guided(guided: Guided) -> None:
    if guided.kind is not GuidedKind.JSON_OBJECT and not guided.texts:
        raise invalid("guided", f"guided.{guided.kind} is empty: give at least one")
    if any(not text for text in guided.texts):
        raise invalid("guided", f"guided.{guided.kind} has an empty text: leave it out")
    if sum(map(len, guided.texts)) > GUIDED_CHARACTERS_MAX:
        raise invalid("guided", f"guided.{guided.kind} has more than {GUIDED_CHARACTERS_MAX} characters: shorten it")
    if guided.kind is GuidedKind.JSON_SCHEMA:
        _check_schema(guided.texts[0])


def _check_schema(text: str) -> None:
    """Raises INVALID_ARGUMENT if the text is not JSON, or a key is given twice in it."""
    encoded = text.encode()
    try:
        msgspec.json.decode(encoded, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        detail = f"guided.json_schema is not valid JSON: {syntax_fault(encoded, error)}"
        raise invalid("guided", detail) from error
    except RecursionError as error:
        raise invalid("guided", "guided.json_schema is nested too deeply: send a flatter schema") from error
    check_keys(encoded, "guided.json_schema")


def _check_sampling(sampling: Sampling) -> None:
    for name, least, greatest in _ENDS:
        value = getattr(sampling, name)
        if value is not None and not least <= value <= greatest:
            raise _out_of_range(name, value)
    if not 0 <= sampling.top_k <= COUNT_MAX:
        raise invalid("top_k", f"top_k is {shown(sampling.top_k)}: it must be from 0 (off) to {COUNT_MAX}")
    if sampling.seed is not None and not 0 <= sampling.seed <= SEED_MAX:
        raise invalid("seed", f"seed is {shown(sampling.seed)}: it must fit into 64 bits")
    if len(sampling.logit_bias) > LOGIT_BIASES_MAX:
        raise invalid("logit_bias", f"logit_bias has more than {LOGIT_BIASES_MAX} tokens: leave some out")
    for token, bias in sampling.logit_bias:
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX or token < 0:
            bounds = f"from {-LOGIT_BIAS_MAX} to {LOGIT_BIAS_MAX}"
            raise invalid("logit_bias", f"logit_bias of token {token} is {bias}: it must be {bounds}")


def _out_of_range(name: str, value: float) -> Failure:
    least, most = RANGES[name]
    above = "above" if name in ABOVE_ZERO else "from"
    bounds = f"{above} {least}" + (f" to {most}" if math.isfinite(most) else "")
    return invalid(name, f"{name} is {value}: it must be {bounds}")


def _check_stop(stop: Stop) -> None:
    if len(stop.strings) > STOP_STRINGS_MAX:
        raise invalid("stop", f"{len(stop.strings)} stop strings are too many: give at most {STOP_STRINGS_MAX}")
    if any(not 1 <= len(string) <= STOP_STRING_CHARACTERS_MAX for string in stop.strings):
        raise invalid("stop", f"a stop string must have 1 to {STOP_STRING_CHARACTERS_MAX} characters")
    if len(stop.token_ids) > STOP_TOKENS_MAX:
        raise invalid("stop_token_ids", f"stop_token_ids has more than {STOP_TOKENS_MAX} tokens: leave some out")
    if stop.max_tokens is not None and stop.max_tokens < 1:
        raise invalid("max_tokens", f"max_tokens is {shown(stop.max_tokens)}: it must be at least 1")
    most = stop.max_tokens or COUNT_MAX
    if not 0 <= stop.min_tokens <= most:
        bound = f"max_tokens, which is {shown(most)}" if stop.max_tokens else str(most)
        raise invalid("min_tokens", f"min_tokens is {shown(stop.min_tokens)}: it must be from 0 to {bound}")


def settle(request: Request, card: ModelCard, rng: random.Random) -> Request:
    """Check the request against the model, and set once what the client left open, so that all workers sample alike.

    Raises INVALID_ARGUMENT and PROMPT_TOO_LONG.
    """
    max_tokens = max_tokens_of(request, card.context_length)  # First: it bounds the checks of tokens.
    _check_tokens(request, card.vocab_size)
    if request.logprobs is not None and not card.has_logprobs:
        raise invalid("logprobs", f"the engine of {card.model!r} gives no log probabilities: leave logprobs out")
    if request.guided is not None and request.guided.kind not in card.guided:
        known = ", ".join(card.guided) or "none"
        problem = f"is not supported by the engine of {card.model!r}, which can do: {known}"
        raise invalid("guided", f"guided.{request.guided.kind} {problem}")
    if (request.generated_token_ids or request.generated_choices) and (lacking := card.resume.lacking_for(request)):
        detail = f"the engine of {card.model!r} cannot continue an answer with {lacking}: leave one of them out"
        raise invalid("generated_choices" if request.generated_choices else "generated_token_ids", detail)
    sampling = request.sampling
    seed = sampling.seed
    if seed is None and card.resume.sampling:  # Other engines use no seeds.
        seed = rng.getrandbits(64)
    temperature = card.default_temperature if sampling.temperature is None else sampling.temperature
    return replace(
        request,
        stop=replace(request.stop, max_tokens=max_tokens, max_tokens_default=None),
        sampling=replace(
            sampling,
            seed=seed,
            temperature=temperature,
            top_p=_within_float32(sampling.top_p),
            repetition_penalty=_within_float32(sampling.repetition_penalty),
        ),
    )


def _within_float32(value: float) -> float:
    """The nearest positive number that a worker can be sent. Workers of version 0.1.0 refuse a `top_p` of 0."""
    return min(max(value, FLOAT32_LEAST), FLOAT32_GREATEST)


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Check that all token ids are in the vocabulary. Raises INVALID_ARGUMENT."""
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("generated_token_ids", request.generated_token_ids),
        *(("generated_choices", token_ids) for token_ids in request.generated_choices),
        ("stop_token_ids", request.stop.token_ids),
        ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise invalid(name, f"{name} has a token id that the model lacks: ids are from 0 to {vocab_size - 1}")


def max_tokens_of(request: Request, context_length: int) -> int:
    """The limit of the answer. Raises INVALID_ARGUMENT or PROMPT_TOO_LONG if it does not fit the context.

    Only a client's own numbers are refused; a default is fitted to them.
    """
    prompt = len(request.prompt_token_ids)
    room = context_length - prompt
    asked = request.stop.max_tokens
    if not prompt:
        raise invalid("prompt", "the prompt is empty: give at least one token")
    if room < 1:
        # Stock clients look for these words.
        maximum = f"this model's maximum context length is {context_length} tokens"
        detail = f"the prompt has {prompt} tokens, but {maximum}, prompt and answer together"
        raise Failure(Reason.PROMPT_TOO_LONG, detail, param="prompt")
    for name, number in (("max_tokens", asked), ("min_tokens", request.stop.min_tokens)):
        if number is not None and number > room:
            left = f"the prompt's {prompt} tokens leave {room} of the context of {context_length}"
            exceeded = {OPENAI_CODE: CONTEXT_LENGTH_EXCEEDED}
            detail = f"{name} is {shown(number)}: {left}"
            raise Failure(Reason.INVALID_ARGUMENT, detail, param=name, metadata=exceeded)
    limit = asked or min(room, _default_limit(request.stop, room))
    name = "generated_choices" if request.generated_choices else "generated_token_ids"
    if max(len(request.generated_of(choice)) for choice in request.open_choices or (0,)) > limit:
        bound = "there is room for" if asked is None else "max_tokens allows"
        raise invalid(name, f"more tokens are given as generated already than {bound}: at most {limit}")
    return limit


def _default_limit(stop: Stop, room: int) -> int:
    return room if stop.max_tokens_default is None else max(stop.max_tokens_default, stop.min_tokens)
