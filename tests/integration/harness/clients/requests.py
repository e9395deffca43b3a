"""The requests of the integration tests, independent of the protocol, and their form in each protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.core.request import Guided, GuidedKind
from services.stubs import inference_pb2

PROTOCOLS = ("grpc", "stream", "unary")
REQUEST_S_MAX = 180.0


@dataclass(frozen=True)
class Request:
    """A request.

    `protocol`: one of PROTOCOLS; "stream" and "unary" are HTTP. `headers`: for HTTP only. `timeout_s`: its deadline.
    """

    protocol: str = "stream"
    is_chat: bool = False
    temperature: float = 0.0
    prompt: str = "Say something"
    max_tokens: int = 60
    stop: str | None = None
    model: str = "mocker"
    ignore_eos: bool = True
    seed: int | None = 7
    request_id: str = ""
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    json_schema: str | None = None
    guided: Guided | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None

    def __str__(self) -> str:
        """Return the part of a test's id that describes the request."""
        kind, draw = "chat" if self.is_chat else "text", "seeded" if self.temperature else "greedy"
        return f"{self.protocol}-{kind}-{draw}"

    def named(self, request_id: str, **fields: Any) -> "Request":
        return replace(self, request_id=request_id, **fields)


# HTTP


def path_of(request: Request) -> str:
    return "/v1/chat/completions" if request.is_chat else "/v1/completions"


def headers_of(request: Request) -> dict[str, str]:
    given = dict(request.headers)
    if request.request_id:
        given["X-Request-Id"] = request.request_id
    if request.timeout_s is not None:
        given["X-Request-Timeout"] = str(request.timeout_s)
    return given


def json_body(request: Request) -> dict[str, Any]:
    """Return the JSON body of the request over HTTP."""
    same = ("model", "max_tokens", "temperature", "seed", "ignore_eos", "stop", "n", "min_tokens")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    fields: dict[str, Any] = {name: getattr(request, name) for name in (*same, *penalties)}
    fields["stop_token_ids"] = list(request.stop_token_ids)
    fields["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    if request.is_chat:
        fields["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        fields["prompt"] = request.prompt
    if request.logprobs is not None:
        fields |= (
            {"logprobs": True, "top_logprobs": request.logprobs} if request.is_chat else {"logprobs": request.logprobs}
        )
    if request.json_schema is not None:
        fields["guided_json"] = request.json_schema
    if request.guided is not None:
        fields |= _guided_fields(request.guided)
    if request.protocol == "stream":
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _guided_fields(guided: Guided) -> dict[str, Any]:
    [text, *_] = guided.texts
    match guided.kind:
        case GuidedKind.CHOICE:
            return {"guided_choice": guided.texts}
        case GuidedKind.JSON_SCHEMA:
            return {"structured_outputs": {"json": text}}
        case GuidedKind.REGEX:
            return {"structured_outputs": {"regex": text}}
    return {"guided_grammar": text}


# gRPC


def grpc_message(request: Request) -> inference_pb2.GenerateRequest:
    """Return the message of the request over gRPC."""
    message = inference_pb2.GenerateRequest(model=request.model, request_id=request.request_id)
    if request.is_chat:
        message.chat.messages.add(role="user", content=request.prompt)
    else:
        message.text = request.prompt
    if request.n != 1:
        message.n = request.n
    if request.logprobs is not None:
        message.logprobs = request.logprobs
    if request.json_schema is not None:
        message.guided.json_schema = request.json_schema
    if request.guided is not None and request.guided.kind is GuidedKind.CHOICE:
        message.guided.choice.texts.extend(request.guided.texts)
    elif request.guided is not None:
        setattr(message.guided, request.guided.kind, request.guided.texts[0])
    _set_sampling(message.sampling, request)
    _set_stop(message.stop, request)
    return message


def _set_sampling(sampling: inference_pb2.Sampling, request: Request) -> None:
    sampling.temperature = request.temperature
    if request.seed is not None:
        sampling.seed = request.seed
    sampling.presence_penalty, sampling.frequency_penalty = request.presence_penalty, request.frequency_penalty
    sampling.repetition_penalty = request.repetition_penalty
    for token, bias in request.logit_bias.items():
        sampling.logit_bias[token] = bias


def _set_stop(stop: inference_pb2.Stop, request: Request) -> None:
    stop.max_tokens, stop.min_tokens, stop.ignore_eos = request.max_tokens, request.min_tokens, request.ignore_eos
    stop.token_ids.extend(request.stop_token_ids)
    if request.stop is not None:
        stop.strings.append(request.stop)
