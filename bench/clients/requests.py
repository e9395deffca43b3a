"""The requests of the bench: answers have an exact number of tokens, each one character, so that each is an event."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from bench.clients.wires import GrpcWire, HttpWire, SseWire, Wire, http_message
from services.stubs import inference_pb2

PATH = "/v1/completions"
KEPT_HEADERS = "X-On-Disconnect: continue\r\n"
"""Lines of a request whose answer can be resumed."""
GRPC_PATH = "/unbroken.v1.Inference/Generate"
MODEL = "mocker"
PROMPT = "The capital of France is"
SPLIT_CHARACTERS = (0xC3, 0xD0, 0xD7, 0xE5, 0xE6, 0xE8, 0xF0)
"""First bytes of the characters that the mocker would split into several tokens.

A frontend holds an incomplete character back. Such text would arrive in fewer events than the peer's, and a token would
seem to cost less.
"""


def request_body(tokens: int, prompt: str = PROMPT, **more: Any) -> bytes:
    """Return the HTTP body of a streamed completion. `more`: further fields of the API."""
    asked: Mapping[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "stop_token_ids": SPLIT_CHARACTERS,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps({**asked, **more}).encode()


def grpc_request(tokens: int) -> inference_pb2.GenerateRequest:
    """Return the same request for gRPC."""
    stop = inference_pb2.Stop(max_tokens=tokens, min_tokens=tokens, token_ids=SPLIT_CHARACTERS, ignore_eos=True)
    return inference_pb2.GenerateRequest(model=MODEL, text=PROMPT, stop=stop)


def wire_of(kind: str, tokens: int) -> Callable[[], Wire]:
    """Return what makes a connection that asks for answers of this many tokens. `kind`: http1, http2 or grpc."""
    if kind == "grpc":
        message = grpc_request(tokens).SerializeToString()
        return lambda: GrpcWire(GRPC_PATH, message)
    body = request_body(tokens)
    if kind == "http2":
        return lambda: SseWire(PATH, body)
    request = http_message(PATH, body)
    return lambda: HttpWire(request)
