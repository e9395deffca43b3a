"""The routes of the OpenAI API, and those that end requests by name."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace

from services.core.bounded_executor import BoundedExecutor
from services.core.call import Call
from services.core.errors import Failure, Reason, quoted
from services.core.interface import Layer
from services.core.request import Request
from services.core.validation import MIGRATION_LIMIT, checked_request_id, migration_limit_of
from services.frontend.api.health import State
from services.frontend.api.openai.bodies import Body
from services.frontend.api.openai.responses import Answer, model_list, model_object
from services.frontend.api.openai.sse import SseStream
from services.frontend.api.openai.unary import Collector, Echo
from services.frontend.control import FrontendControl
from services.http.decompress import body_of
from services.http.errors import error_response, json_response
from services.http.headers import deadline_of, wants_partial
from services.http.server.config import HttpConfig
from services.http.server.connection import Connection
from services.http.server.messages import HttpRequest, Response

LARGE_BODY_BYTES = 256 * 1024
"""A larger body is parsed in a thread, so that it does not stop the other streams."""

OnRefused = Callable[[str, str, Failure], None]
"""Is told the endpoint and the request's id, too."""


class Served(State, Protocol):
    """What this frontend serves."""

    def token_bytes_of(self, model: str) -> Sequence[bytes]:
        """The bytes of each token id of a model that has answered."""
        ...


class Gateway:
    def __init__(
        self,
        pipeline: Layer,
        served: Served,
        whole: FrontendControl,
        config: HttpConfig,
        on_refused: OnRefused,
    ) -> None:
        self._pipeline = pipeline
        self._on_refused = on_refused
        self._served = served
        self._whole = whole
        self._config = config
        self._created = int(time.time())
        self._executor = BoundedExecutor()

    async def serve(
        self,
        endpoint: str,
        parse: Callable[[bytes], Body],
        answer_type: type[Answer],
        request: HttpRequest,
        connection: Connection,
    ) -> Response | None:
        """Completions, of either kind."""
        try:
            call = _call_of(request, endpoint, self._config)
            has_partial = wants_partial(request)
            content = await body_of(request, self._config.body_bytes_max, self._executor)
            is_large = len(content) > LARGE_BODY_BYTES
            body, asked = await self._executor.run(_parsed, parse, content) if is_large else _parsed(parse, content)
        except Failure as failure:
            self._on_refused(endpoint, request.id, failure)
            raise
        request.forget_content()
        token_bytes = partial(self._served.token_bytes_of, asked.model)
        answer = answer_type(
            request_id=call.request_id,
            model=body.model,
            includes_usage=body.includes_usage,
            echo=Echo(asked, token_bytes) if body.is_echoed else None,
        )
        if body.is_streamed:
            stream = SseStream(request, connection, answer, self._config, token_bytes)
            await stream.serve(self._pipeline, asked, call, body.spellings())
            return None
        return await self._answer(body, asked, replace(call, is_streamed=False), answer, has_partial=has_partial)

    async def _answer(self, body: Body, asked: Request, call: Call, answer: Answer, *, has_partial: bool) -> Response:
        """The whole answer, or its failure. has_partial: tell what had come before it."""
        collector = Collector()
        try:
            finish = await self._pipeline(asked, call, collector)
        except Failure as failure:
            failure.param = body.spellings().get(failure.param, failure.param)
            if not (has_partial and collector.choices):
                raise
            partial_ = answer.partial(collector.choices)
            status = self._config.overload_status
            return error_response(failure, call.request_id, partial=partial_, overload_status=status)
        assert finish.usage is not None, "present sets usage"
        token_bytes = () if asked.logprobs is None else self._served.token_bytes_of(asked.model)
        return json_response(answer.body(collector.choices, finish.usage, token_bytes))

    async def models(self, request: HttpRequest, connection: Connection) -> Response:
        return json_response(model_list(self._served.models(), self._created))

    async def model(self, request: HttpRequest, connection: Connection) -> Response:
        name = request.arguments["model"]
        for card in self._served.models():
            if card.model == name:
                return json_response(msgspec.json.encode(model_object(card, self._created)))
        raise Failure(Reason.MODEL_NOT_FOUND, f"the model {quoted(name)} is not served here", param="model")

    async def cancel(self, request: HttpRequest, connection: Connection) -> Response:
        """End requests by their name; again and again, if need be."""
        request_id = checked_request_id(request.arguments["request_id"])
        cancelled = await self._whole.cancel(request_id)
        return json_response(msgspec.json.encode({"id": request_id, "cancelled": cancelled}))


def _parsed(parse: Callable[[bytes], Body], content: bytes) -> tuple[Body, Request]:
    """What is asked. Raises Failure."""
    body = parse(content)
    return body, body.to_request()


def _call_of(request: HttpRequest, endpoint: str, config: HttpConfig) -> Call:
    """What the headers say. Raises Failure(INVALID_ARGUMENT)."""
    return Call(
        request_id=request.id,
        deadline=deadline_of(request, config),
        endpoint=endpoint,
        migration_limit=migration_limit_of(request.headers.get(MIGRATION_LIMIT.lower())),
    )
