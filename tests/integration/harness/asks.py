"""What the clients of the tests ask, in the terms that both protocols have."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.stubs import inference_pb2

PROTOCOLS = ("grpc", "stream", "unary")
REQUEST_S_MAX = 90.0


@dataclass(frozen=True)
class Ask:
    """A request. protocol: one of PROTOCOLS; the last two are HTTP. headers: of HTTP alone. timeout_s: its deadline."""

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
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None

    def __str__(self) -> str:
        """What a test's id says of it."""
        kind, draw = "chat" if self.is_chat else "text", "seeded" if self.temperature else "greedy"
        return f"{self.protocol}-{kind}-{draw}"

    def named(self, request_id: str, **fields: Any) -> "Ask":
        return replace(self, request_id=request_id, **fields)


# HTTP


def path(ask: Ask) -> str:
    return "/v1/chat/completions" if ask.is_chat else "/v1/completions"


def headers(ask: Ask) -> dict[str, str]:
    given = dict(ask.headers)
    if ask.request_id:
        given["X-Request-Id"] = ask.request_id
    if ask.timeout_s is not None:
        given["X-Request-Timeout"] = str(ask.timeout_s)
    return given


def body(ask: Ask) -> dict[str, Any]:
    """The JSON body."""
    same = ("model", "max_tokens", "temperature", "seed", "ignore_eos", "stop", "n", "min_tokens")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    fields: dict[str, Any] = {name: getattr(ask, name) for name in (*same, *penalties)}
    fields["stop_token_ids"] = list(ask.stop_token_ids)
    fields["logit_bias"] = {str(token): bias for token, bias in ask.logit_bias.items()}
    if ask.is_chat:
        fields["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        fields["prompt"] = ask.prompt
    if ask.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": ask.logprobs} if ask.is_chat else {"logprobs": ask.logprobs}
    if ask.json_schema is not None:
        fields["guided_json"] = ask.json_schema
    if ask.protocol == "stream":
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


# gRPC


def request(ask: Ask) -> inference_pb2.GenerateRequest:
    """The message."""
    message = inference_pb2.GenerateRequest(model=ask.model, request_id=ask.request_id)
    if ask.is_chat:
        message.chat.messages.add(role="user", content=ask.prompt)
    else:
        message.text = ask.prompt
    if ask.n != 1:
        message.n = ask.n
    if ask.logprobs is not None:
        message.logprobs = ask.logprobs
    if ask.json_schema is not None:
        message.guided.json_schema = ask.json_schema
    _set_sampling(message.sampling, ask)
    _set_stop(message.stop, ask)
    return message


def _set_sampling(sampling: inference_pb2.Sampling, ask: Ask) -> None:
    sampling.temperature = ask.temperature
    if ask.seed is not None:
        sampling.seed = ask.seed
    sampling.presence_penalty, sampling.frequency_penalty = ask.presence_penalty, ask.frequency_penalty
    sampling.repetition_penalty = ask.repetition_penalty
    for token, bias in ask.logit_bias.items():
        sampling.logit_bias[token] = bias


def _set_stop(stop: inference_pb2.Stop, ask: Ask) -> None:
    stop.max_tokens, stop.min_tokens, stop.ignore_eos = ask.max_tokens, ask.min_tokens, ask.ignore_eos
    stop.token_ids.extend(ask.stop_token_ids)
    if ask.stop is not None:
        stop.strings.append(ask.stop)
