"""Handlers of the OpenAI endpoints, and of the one that cancels requests by id."""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace

from services.core.bounded_executor import BoundedExecutor
from services.core.call import Call
from services.core.common_layers import bug_failure
from services.core.errors import Failure
from services.core.generation.cursor import Cursor
from services.core.generation.kept import Kept
from services.core.generation.presentation import resumed_call
from services.core.interface import Layer
from services.core.model_card import ModelCard
from services.core.request import Request
from services.core.tenant import Tenant
from services.core.validation import checked_request_id
from services.frontend.api.health import FrontendState
from services.frontend.api.openai.bodies import Body
from services.frontend.api.openai.form import decode_form, encode_form
from services.frontend.api.openai.responses import Answer, Brought, Echo, model_list, model_object
from services.frontend.api.openai.schemas import Cancelled
from services.frontend.api.openai.sse.stream import NameFields, SseStream
from services.frontend.api.openai.unary import Collector
from services.frontend.api.request_headers import (
    LAST_EVENT_ID,
    call_of,
    deadline_of,
    is_done,
    lost_answer_of,
    resume_of,
    wants_events,
    wants_partial,
)
from services.frontend.api.response_headers import allowance_headers, told_headers
from services.frontend.control import Canceller
from services.frontend.model_catalog import NO_VIEW
from services.frontend.resume.finder import GenerationFinder
from services.frontend.routing.rejection import no_workers, of_registered
from services.http.decompress import body_of
from services.http.errors import error_response, json_response
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response
from services.models.tokenizers import Vocabulary

LARGE_BODY_BYTES = 32 * 1024
"""Larger bodies are parsed in a thread, so that streams on the event loop continue: a body of this size that is made
for it takes 5 ms. As a text, it is tokenised by a helper process anyway.
"""

RESUME = "resume"
"""The endpoint of answers that cannot be resumed: that of their first request is not known."""

OnRefused = Callable[[str, str, Failure], None]
"""Called with the endpoint, the request's id and the failure."""


class ServedModels(FrontendState, Protocol):
    """The models of this frontend."""

    def model(self, name: str, tenant: Tenant) -> ModelCard:
        """A model that can be served to the tenant now.

        Raises Failure(NO_WORKERS), or MODEL_NOT_FOUND if it certainly is none.
        """
        ...

    def vocabulary_of(self, model: str) -> Vocabulary:
        """The vocabulary of a model that has answered."""
        ...


class OpenAiEndpoints:
    """The handlers. They share the pipeline, and a thread each for compressed bodies and for large ones."""

    def __init__(
        self,
        pipeline: Layer,
        served: ServedModels,
        canceller: Canceller,
        config: HttpConfig,
        on_refused: OnRefused,
        finder: GenerationFinder,
    ) -> None:
        self._pipeline = pipeline
        self._finder = finder
        self._on_refused = on_refused
        self._served = served
        self._canceller = canceller
        self._config = config
        self._created = int(time.time())
        self._decompressing = BoundedExecutor()
        self._parsing = BoundedExecutor()

    async def serve(
        self,
        endpoint: str,
        parse: Callable[[bytes], Body],
        answer_type: type[Answer],
        http_request: HttpRequest,
        exchange: Exchange,
    ) -> Response | None:
        """Answer a completion or a chat completion, streamed or whole. Raises Failure."""
        if http_request.headers.get(LAST_EVENT_ID.lower()):
            return await self._resume(resume_of, http_request, exchange)
        try:
            call = call_of(http_request, endpoint, self._config)
            returns_partial = wants_partial(http_request)
            content = await body_of(http_request, self._config.body_bytes_max, self._decompressing)
            size = len(content)
            is_large = size > LARGE_BODY_BYTES
            parsed = self._parsing.run(_parsed, parse, content, size=size) if is_large else None
            body, request = _parsed(parse, content) if parsed is None else await parsed
        except Exception as error:
            raise self._refused(endpoint, http_request, error) from None
        http_request.forget_content()
        vocabulary = partial(self._served.vocabulary_of, request.model)
        answer = answer_type(
            request_id=call.request_id,
            model=body.model,
            n=request.n,
            includes_usage=body.includes_usage,
            has_usage_in_events=body.has_usage_in_events,
            returns_token_ids=bool(body.return_token_ids),
            told=call.told,
            echo=Echo(request, vocabulary) if body.is_echoed else None,
            brought=Brought(request) if body.generated_token_ids else None,
        )
        if call.kept is not None:
            answer.generation_id = call.kept.generation.name
            call = replace(call, kept=replace(call.kept, form=encode_form(answer)))
        if body.is_streamed:
            stream = SseStream(http_request, exchange, answer, self._config, vocabulary)
            if body.has_usage_in_events:
                call = replace(call, counts_prompt=True)
            await stream.serve(self._pipeline, request, call, body.name_fields)
            return None
        call = replace(call, is_streamed=False)
        try:
            return await self._respond(body.name_fields, request, call, answer, returns_partial=returns_partial)
        finally:
            if call.told.allowances:  # Errors have them, too.
                http_request.shared = {**http_request.shared, **allowance_headers(call.told.allowances)}

    async def resume(self, http_request: HttpRequest, exchange: Exchange) -> Response | None:
        """Go on with an answer that its client has lost. Raises Failure."""
        return await self._resume(lost_answer_of, http_request, exchange)

    async def _resume(
        self,
        asked: Callable[[HttpRequest], tuple[bytes, Cursor | None]],
        http_request: HttpRequest,
        exchange: Exchange,
    ) -> Response | None:
        """Send an answer from the client's cursor on, or whole if it wants no events. Raises Failure.

        `asked`: returns the id of the answer, and the cursor. Status 204 tells an EventSource not to come back again:
        the HTML standard, section 9.2.3.
        """
        try:
            generation_id, cursor = asked(http_request)
            if is_done(http_request):
                return Response(b"", 204)
            deadline, accepted = deadline_of(http_request, self._config), http_request.headers.get("accept", "")
            presentation, generation = await self._finder.find(generation_id, http_request.tenant)
            request = presentation.request
            call = resumed_call(presentation, generation, cursor, deadline, http_request.tenant)
            vocabulary = partial(self._served.vocabulary_of, request.model)
            answer = decode_form(presentation, generation.name, call.told, vocabulary)
        except Exception as error:
            raise self._refused(RESUME, http_request, error) from None
        if wants_events(accepted, otherwise=presentation.is_streamed):
            stream = SseStream(http_request, exchange, answer, self._config, vocabulary)
            await stream.serve(self._pipeline, request, call, _as_they_are)
            return None
        call = replace(call, is_streamed=False, kept=Kept(generation=generation, form=presentation.form))
        return await self._respond(_as_they_are, request, call, answer, returns_partial=False)

    def _refused(self, endpoint: str, http_request: HttpRequest, error: Exception) -> Failure:
        """Report a request that does not reach the pipeline. Returns what its client is told."""
        failure = error if isinstance(error, Failure) else bug_failure(error, http_request.id)
        self._on_refused(endpoint, http_request.id, failure)
        return failure

    async def _respond(
        self, name_fields: NameFields, request: Request, call: Call, answer: Answer, *, returns_partial: bool
    ) -> Response:
        """The response to a request without `stream`. Raises Failure.

        `returns_partial`: an error includes the answer up to the failure.
        """
        collector = Collector(keeps_token_ids=answer.returns_token_ids)
        try:
            finish = await self._pipeline(request, call, collector)
        except Failure as failure:
            name_fields(failure)
            if not (returns_partial and collector.choices):
                raise
            partial_ = answer.partial(collector.choices)
            status = self._config.overload_status
            response = error_response(failure, call.request_id, partial=partial_, overload_status=status)
            response.headers |= told_headers(call.told)
            return response
        assert finish.usage is not None, "the detokenize layer sets usage"
        vocabulary = None if request.logprobs is None else self._served.vocabulary_of(request.model)
        response = json_response(msgspec.json.encode(answer.body(collector.choices, finish.usage, vocabulary)))
        response.headers |= told_headers(call.told)
        return response

    async def models(self, request: HttpRequest, exchange: Exchange) -> Response:
        """All models that can be served now. Raises Failure(NO_WORKERS) while this frontend cannot know them."""
        if not self._served.has_view:
            raise no_workers(NO_VIEW)
        if not (cards := self._served.models()) and (count := self._served.unreached_count):
            raise no_workers(f"no worker is connected {of_registered(count)}")
        cards = [card for card in cards if request.tenant.may_use(card.model)]
        return json_response(msgspec.json.encode(model_list(cards, self._created)))

    async def model(self, request: HttpRequest, exchange: Exchange) -> Response:
        """One model that can be served now. Raises Failure; see `ServedModels.model`."""
        card = self._served.model(request.arguments["model"], request.tenant)
        return json_response(msgspec.json.encode(model_object(card, self._created)))

    async def cancel(self, request: HttpRequest, exchange: Exchange) -> Response:
        """Cancel all running requests with an id, or the one whose answer has it. Idempotent."""
        request_id = checked_request_id(request.arguments["request_id"])
        cancelled = await self._canceller.cancel(request_id, request.tenant)
        return json_response(msgspec.json.encode(Cancelled(id=request_id, cancelled=cancelled)))


def _as_they_are(failure: Failure) -> None:
    """Name no field: a client that resumes an answer sends none."""


def _parsed(parse: Callable[[bytes], Body], content: bytes) -> tuple[Body, Request]:
    """The body and the request that it describes. Raises Failure."""
    body = parse(content)
    return body, body.to_request()
