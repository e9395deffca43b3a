"""Converts protobuf messages to our own types and back. No other module knows both, except step.py for token columns.

Malformed messages raise Failure.
"""

from functools import lru_cache

from google.protobuf import duration_pb2

from services.core.errors import Failure, Reason, invalid
from services.core.interface import Delta, TokenLogprobs
from services.core.model_card import ModelCard, Resume, TokenizerRef
from services.core.request import Continuation, FinishReason, Guided, GuidedKind, Message, Request, Sampling, Stop
from services.core.tenant import TENANT_NAME_CHARACTERS_MAX, WEIGHT_MAX, WEIGHT_MIN, Tenant
from services.stubs import inference_pb2, worker_pb2

TENANTS_KEPT = 1024
"""How many tenants a worker keeps, as they came with requests, so that most requests build none."""

_FINISH_TO_WIRE = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_CONTINUATION_TO_WIRE = {Continuation.PREFIX: inference_pb2.CONTINUATION_PREFIX}
_CONTINUATION_FROM_WIRE: dict[int, Continuation] = {
    number: continuation for continuation, number in _CONTINUATION_TO_WIRE.items()
}
_FINISH_FROM_WIRE: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_TO_WIRE.items()}


def request_from_wire(message: inference_pb2.GenerateRequest) -> Request:
    """Decode a request. Raises INVALID_ARGUMENT for a field that this version cannot honour, and names it.

    `[:]`, here and below, copies a list, because iterating over a message's own list takes twice as long.
    """
    _refuse_later_fields(message)
    kind = message.WhichOneof("prompt")
    request = Request(
        model=message.model,
        text=message.text if kind == "text" else None,
        messages=tuple(Message(turn.role, turn.content, turn.name) for turn in message.chat.messages)
        if kind == "chat"
        else None,
        token_ids=tuple(message.tokens.ids[:]) if kind == "tokens" else None,
        generated_token_ids=tuple(message.generated_token_ids[:]),
        n=message.n if message.HasField("n") else 1,
        choice=message.choice,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        guided=_guided_from_wire(message.guided) if message.HasField("guided") else None,
        sampling=_sampling_from_wire(message.sampling),
        stop=_stop_from_wire(message.stop),
    )
    return _continued(request, message) if message.generated_choices else request


def _continued(request: Request, message: inference_pb2.GenerateRequest) -> Request:
    """The request with the tokens of each choice. Raises INVALID_ARGUMENT."""
    if message.generated_token_ids:
        raise invalid("generated_choices", "generated_choices and generated_token_ids are both given: send one of them")
    return request.continued(
        tuple(None if one.complete else tuple(one.token_ids[:]) for one in message.generated_choices)
    )


def _refuse_later_fields(message: inference_pb2.GenerateRequest) -> None:
    if message.session_id:
        raise invalid("session_id", "session_id is not supported in this version: leave it out")
    if message.priority:
        raise invalid("priority", "priority is not supported in this version: leave it at 0")


def _guided_from_wire(message: inference_pb2.Guided) -> Guided:
    kind = message.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not message.json_object):
        raise invalid("guided", "guided is given without a kind: set one, or leave guided out")
    if kind == "choice":
        return Guided(GuidedKind.CHOICE, tuple(message.choice.texts))
    return Guided(GuidedKind(kind), () if kind == "json_object" else (getattr(message, kind),))


def _put_guided(message: inference_pb2.Guided, guided: Guided) -> None:
    if guided.kind is GuidedKind.CHOICE:
        message.choice.texts.extend(guided.texts)
    else:
        setattr(message, guided.kind, guided.texts[0] if guided.texts else True)


def _sampling_from_wire(message: inference_pb2.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())) if message.logit_bias else (),
    )


def _stop_from_wire(message: inference_pb2.Stop) -> Stop:
    return Stop(
        strings=tuple(message.strings[:]),
        token_ids=tuple(message.token_ids[:]),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
    )


def put_request(message: inference_pb2.GenerateRequest, request: Request) -> None:
    """Fill an empty message, which `request_from_wire` decodes.

    It is filled in place, because assigning one message to another serialises and parses it.
    """
    message.model, message.n, message.choice = request.model, request.n, request.choice
    _put_sampling(message.sampling, request.sampling)
    _put_stop(message.stop, request.stop)
    if request.generated_token_ids:
        message.generated_token_ids.extend(request.generated_token_ids)
    for token_ids in request.generated_choices:
        message.generated_choices.add(token_ids=token_ids or (), complete=token_ids is None)
    if request.logprobs is not None:
        message.logprobs = request.logprobs
    if request.guided is not None:
        _put_guided(message.guided, request.guided)
    if request.token_ids is not None:
        message.tokens.ids.extend(request.token_ids)
    elif request.messages is not None:
        message.chat.SetInParent()
        for turn in request.messages:
            message.chat.messages.add(role=turn.role, content=turn.content, name=turn.name)
    elif request.text is not None:
        message.text = request.text


def _put_sampling(message: inference_pb2.Sampling, sampling: Sampling) -> None:
    message.top_p, message.top_k, message.min_p = sampling.top_p, sampling.top_k, sampling.min_p
    message.repetition_penalty = sampling.repetition_penalty
    message.presence_penalty = sampling.presence_penalty
    message.frequency_penalty = sampling.frequency_penalty
    if sampling.temperature is not None:
        message.temperature = sampling.temperature
    if sampling.seed is not None:
        message.seed = sampling.seed
    if sampling.logit_bias:
        message.logit_bias.update(sampling.logit_bias)


def _put_stop(message: inference_pb2.Stop, stop: Stop) -> None:
    message.ignore_eos, message.min_tokens = stop.ignore_eos, stop.min_tokens
    if stop.strings:
        message.strings.extend(stop.strings)
    if stop.token_ids:
        message.token_ids.extend(stop.token_ids)
    if stop.max_tokens is not None:
        message.max_tokens = stop.max_tokens


def delta_to_wire(
    delta: Delta, seed: int | None = None, generation_id: str = "", cursor: str = ""
) -> inference_pb2.GenerateResponse:
    """Encode one item of a `Generate` stream. `seed`, `generation_id`: see Told; of the first item only."""
    message = inference_pb2.Delta(
        choice=delta.choice, position=delta.position, token_ids=delta.token_ids, text=delta.text
    )
    if delta.logprobs is not None:
        message.logprobs.extend(map(logprobs_to_wire, delta.logprobs))
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_TO_WIRE[delta.finish_reason]
    if delta.continuation is not None:
        message.continuation = _CONTINUATION_TO_WIRE[delta.continuation]
    if delta.usage is not None:
        message.usage.prompt_tokens = delta.usage.prompt_tokens
        message.usage.completion_tokens = delta.usage.completion_tokens
    return inference_pb2.GenerateResponse(delta=message, seed=seed, generation_id=generation_id, cursor=cursor)


def logprobs_to_wire(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """Encode the log probabilities of one token."""
    return inference_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )


def logprobs_from_wire(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    """Decode the log probabilities of one token. Slices, since to iterate over a message's own list takes longer."""
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids[:], message.top_logprobs[:], strict=False)))


def continuation_to_wire(continuation: Continuation) -> inference_pb2.Continuation:
    """Encode what a choice lost by moving."""
    return _CONTINUATION_TO_WIRE[continuation]


def continuation_from_wire(number: int) -> Continuation | None:
    """Decode what a choice lost by moving; None: nothing, or something that only a later version knows."""
    return _CONTINUATION_FROM_WIRE.get(number)


def finish_reason_to_wire(reason: FinishReason) -> inference_pb2.FinishReason:
    """Encode the finish reason of a `StreamEnd`."""
    return _FINISH_TO_WIRE[reason]


def finish_reason_from_wire(number: int) -> FinishReason | None:
    """Decode a finish reason; None if it is unspecified. Raises PROTOCOL_VIOLATION for an unknown number."""
    if number == inference_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if number not in _FINISH_FROM_WIRE:
        raise Failure(Reason.PROTOCOL_VIOLATION, f"unknown finish reason {number}")
    return _FINISH_FROM_WIRE[number]


def error_to_wire(failure: Failure) -> worker_pb2.Error:
    """Encode a failure inside a session."""
    retry_after = None if failure.retry_after_s is None else seconds_to_wire(failure.retry_after_s)
    return worker_pb2.Error(
        reason=failure.reason,
        detail=failure.detail,
        param=failure.param or "",
        metadata=failure.metadata,
        retry_after=retry_after,
    )


def error_from_wire(message: worker_pb2.Error) -> Failure:
    """Decode a failure. An unknown reason becomes ENGINE_ERROR."""
    reason = Reason(message.reason) if message.reason in Reason.__members__ else Reason.ENGINE_ERROR
    return Failure(
        reason,
        message.detail,
        param=message.param or None,
        retry_after_s=seconds_from_wire(message.retry_after) if message.HasField("retry_after") else None,
        metadata=dict(message.metadata),
    )


def card_to_wire(card: ModelCard) -> worker_pb2.ModelCard:
    """Encode the model card of a `Welcome`, without a limit of moves."""
    return worker_pb2.ModelCard(
        model=card.model,
        engine=card.engine,
        context_length=card.context_length,
        vocab_size=card.vocab_size,
        tokenizer=worker_pb2.TokenizerRef(kind=card.tokenizer.kind, sha256=card.tokenizer.sha256),
        chat_template=card.chat_template,
        bos_token=card.bos_token,
        eos_token=card.eos_token,
        default_temperature=card.default_temperature,
        guided=card.guided,
        logprobs=card.has_logprobs,
        resume=worker_pb2.Resume(
            sampling=card.resume.sampling,
            penalties=card.resume.penalties,
            guided=card.resume.guided,
            logprobs=card.resume.logprobs,
        ),
    )


def card_from_wire(message: worker_pb2.ModelCard) -> ModelCard:
    """Decode the model card of a `Welcome`, without its limit of moves, in which workers of one model may differ."""
    return ModelCard(
        model=message.model,
        engine=message.engine,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        tokenizer=TokenizerRef(message.tokenizer.kind, message.tokenizer.sha256),
        chat_template=message.chat_template,
        bos_token=message.bos_token,
        eos_token=message.eos_token,
        default_temperature=message.default_temperature,
        guided=tuple(message.guided),
        has_logprobs=message.logprobs,
        resume=Resume(
            sampling=message.resume.sampling,
            penalties=message.resume.penalties,
            guided=message.resume.guided,
            logprobs=message.resume.logprobs,
        ),
    )


def put_tenant(message: worker_pb2.Tenant, tenant: Tenant) -> None:
    """Fill an empty message with what a worker needs to know, which `tenant_from_wire` decodes."""
    message.name, message.weight = tenant.name, tenant.weight
    if tenant.queue_timeout_s is not None:
        put_seconds(message.queue_timeout, tenant.queue_timeout_s)


def tenant_from_wire(message: worker_pb2.Tenant) -> Tenant:
    """Decode a tenant. Raises INVALID_ARGUMENT."""
    has_timeout = message.HasField("queue_timeout")
    return _tenant(message.name, message.weight, seconds_from_wire(message.queue_timeout) if has_timeout else None)


@lru_cache(maxsize=TENANTS_KEPT)
def _tenant(name: str, weight: float, queue_timeout_s: float | None) -> Tenant:
    if not 1 <= len(name) <= TENANT_NAME_CHARACTERS_MAX:
        raise invalid("tenant.name", f"tenant.name must have 1 to {TENANT_NAME_CHARACTERS_MAX} characters")
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # Also false for NaN.
        raise invalid("tenant.weight", f"tenant.weight must be from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, not {weight:g}")
    if queue_timeout_s is not None and queue_timeout_s < 0:
        raise invalid("tenant.queue_timeout", "tenant.queue_timeout must not be negative")
    return Tenant(name=name, weight=weight, queue_timeout_s=queue_timeout_s)


def seconds_to_wire(seconds: float) -> duration_pb2.Duration:
    """Encode a duration, rounded to nanoseconds."""
    duration = duration_pb2.Duration()
    put_seconds(duration, seconds)
    return duration


def put_seconds(duration: duration_pb2.Duration, seconds: float) -> None:
    """Set a duration, rounded to nanoseconds. Faster than to encode one and copy it. `seconds`: not negative."""
    duration.seconds, duration.nanos = divmod(round(seconds * 1e9), 1_000_000_000)


def seconds_from_wire(duration: duration_pb2.Duration) -> float:
    """Decode a duration, in seconds."""
    return float(duration.seconds) + float(duration.nanos) * 1e-9
