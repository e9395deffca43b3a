"""The routes of the OpenAI API, health and metrics, and the one place where failures become responses."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from services.aside import Aside
from services.card import ModelCard
from services.errors import Failure, Reason
from services.frontend.http.answers import Answer, ChatAnswer, CompletionAnswer, model_list, model_object
from services.frontend.http.collector import Collector
from services.frontend.http.config import HttpConfig
from services.frontend.http.errors import error_response, json_response, routing_response
from services.frontend.http.headers import (
    REQUEST_ID,
    deadline_of,
    request_id_of,
    wants_partial,
)
from services.frontend.http.openai import Body, parse_chat, parse_completion
from services.frontend.http.sending import finish_sending
from services.frontend.http.sse import SseStream
from services.layers import bug_failure
from services.request import Call, Layer, Request
from services.validate import MIGRATION_LIMIT, migration_limit_of

CONFIG = web.AppKey("config", HttpConfig)
LARGE_BODY_BYTES = 256 * 1024
"""A larger body is parsed in a thread, so that it does not stop the other streams."""
_ID = web.RequestKey("request_id", str)

OnRefused = Callable[[str, Failure], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Served(Protocol):
    """What this frontend can serve."""

    def models(self) -> Sequence[ModelCard]:
        """Those that can be served now."""
        ...

    def token_bytes_of(self, model: str) -> Sequence[bytes]:
        """The bytes of each token id of a model that has answered."""
        ...

    @property
    def is_draining(self) -> bool: ...


def build_app(
    pipeline: Layer,
    served: Served,
    metrics: CollectorRegistry,
    config: HttpConfig,
    on_refused: OnRefused,
) -> web.Application:
    """The application; `start_http` serves it. on_refused: told of requests that are too broken for the pipeline."""
    gateway = _Gateway(pipeline, served, metrics, config, on_refused)
    app = web.Application(client_max_size=config.body_bytes_max, middlewares=[gateway.respond])
    app[CONFIG] = config
    app.add_routes(
        [
            web.get("/v1/models", gateway.models),
            web.get("/v1/models/{model:.+}", gateway.model),
            web.post("/v1/completions", gateway.completions),
            web.post("/v1/chat/completions", gateway.chat_completions),
            web.get("/live", gateway.live),
            web.get("/health", gateway.health),
            web.get("/metrics", gateway.metrics),
        ]
    )
    return app


class _Gateway:
    def __init__(
        self,
        pipeline: Layer,
        served: Served,
        metrics: CollectorRegistry,
        config: HttpConfig,
        on_refused: OnRefused,
    ) -> None:
        self._pipeline = pipeline
        self._on_refused = on_refused
        self._served = served
        self._metrics = metrics
        self._config = config
        self._created = int(time.time())
        self._aside = Aside()

    @web.middleware
    async def respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id and every failure its response. Streams send themselves; the rest is sent here."""
        request_id = request[_ID] = request_id_of(request)
        try:
            response = await handler(request)
        except Failure as failure:
            response = error_response(failure, request_id, overload_status=self._config.overload_status)
        except web.HTTPException as error:
            response = routing_response(request, error, request_id)
        except Exception as error:
            if request.writer.output_size:
                raise  # In the midst of a stream there is no status left to give: aiohttp logs it and hangs up.
            response = error_response(bug_failure(error, request_id), request_id)
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id
            if self._served.is_draining:
                response.force_close()
            await finish_sending(request, response, self._config, request_id)
        return response

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "completions", parse_completion, CompletionAnswer)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "chat_completions", parse_chat, ChatAnswer)

    async def _serve(
        self, request: web.Request, endpoint: str, parse: Callable[[bytes], Body], answer_type: type[Answer]
    ) -> web.StreamResponse:
        try:
            call = _call_of(request, endpoint, self._config)
            has_partial = wants_partial(request)
            body, asked = await self._parse(parse, await self._read(request))
        except Failure as failure:
            self._on_refused(endpoint, failure)
            raise
        answer = answer_type(request_id=call.request_id, model=body.model, includes_usage=body.includes_usage)
        try:
            if body.is_streamed:
                return await self._stream(request, asked, call, answer)
            return await self._answer(asked, replace(call, is_streamed=False), answer, has_partial=has_partial)
        except Failure as failure:
            failure.param = body.spelling_of(failure.param)
            raise

    async def _stream(self, request: web.Request, asked: Request, call: Call, answer: Answer) -> web.StreamResponse:
        token_bytes = partial(self._served.token_bytes_of, asked.model)
        stream = SseStream(request, answer, self._config, token_bytes, is_last=self._served.is_draining)
        return await stream.serve(self._pipeline, asked, call)

    async def _answer(self, asked: Request, call: Call, answer: Answer, *, has_partial: bool) -> web.Response:
        """The whole answer, or its failure. has_partial: tell what had come before it."""
        collector = Collector()
        try:
            finish = await self._pipeline(asked, call, collector)
        except Failure as failure:
            if not (has_partial and collector.choices):
                raise
            partial_ = answer.partial(collector.choices)
            status = self._config.overload_status
            return error_response(failure, call.request_id, partial=partial_, overload_status=status)
        assert finish.usage is not None, "present sets usage"
        token_bytes = () if asked.logprobs is None else self._served.token_bytes_of(asked.model)
        return json_response(answer.body(collector.choices, finish.usage, token_bytes))

    async def _parse(self, parse: Callable[[bytes], Body], content: bytes) -> tuple[Body, Request]:
        """What is asked. Raises Failure."""

        def parsed() -> tuple[Body, Request]:
            body = parse(content)
            return body, body.to_request()

        return parsed() if len(content) <= LARGE_BODY_BYTES else await self._aside.run(parsed)

    async def _read(self, request: web.Request) -> bytes:
        """The body. Raises Failure when it is too large, too slow or broken."""
        bytes_max = self._config.body_bytes_max
        too_large = Failure(Reason.BODY_TOO_LARGE, f"the body is larger than {bytes_max} bytes: send a smaller one")
        if (request.content_length or 0) > bytes_max:
            raise too_large
        try:
            async with asyncio.timeout(self._config.body_read_s_max):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error
        except web.RequestPayloadError as error:
            raise Failure(
                Reason.INVALID_ARGUMENT, f"the body broke off or is not as its headers say: {error}"
            ) from error
        except TimeoutError as error:
            detail = f"the body did not arrive within {self._config.body_read_s_max:g} s"
            raise Failure(Reason.DEADLINE_EXCEEDED, detail) from error

    async def models(self, request: web.Request) -> web.Response:
        return json_response(model_list(self._served.models(), self._created))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for card in self._served.models():
            if card.model == name:
                return json_response(msgspec.json.encode(model_object(card, self._created)))
        raise Failure(Reason.MODEL_NOT_FOUND, f"the model {name[:200]!r} is not served here", param="model")

    async def live(self, request: web.Request) -> web.Response:
        return json_response(b'{"status":"live"}')

    async def health(self, request: web.Request) -> web.Response:
        """Ready for requests? 503 says why not."""
        if self._served.is_draining:
            raise Failure(Reason.DRAINING, "this frontend is leaving and takes no new requests")
        if not (cards := self._served.models()):
            raise Failure(Reason.NO_WORKERS, "no model can be served: there is no worker at the moment")
        return json_response(msgspec.json.encode({"status": "ready", "models": [card.model for card in cards]}))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _call_of(request: web.Request, endpoint: str, config: HttpConfig) -> Call:
    """What the headers say. Raises Failure(INVALID_ARGUMENT)."""
    return Call(
        request_id=request[_ID],
        deadline=deadline_of(request, config),
        endpoint=endpoint,
        migration_limit=migration_limit_of(request.headers.get(MIGRATION_LIMIT)),
    )
