"""The transports that send what an `Exchange` decides, for `httpx.Client` and for `httpx.AsyncClient`."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import httpx

from unbroken_client.addresses import Addresses
from unbroken_client.exchange import Exchange, is_generation
from unbroken_client.retries import RetryPolicy

CANCEL_S_MAX = 2.0
"""How long a client that abandons an answer waits for the plane to hear of it."""
_OF_THE_BODY = frozenset({"content-encoding", "content-length", "transfer-encoding"})
_CANCEL_TIMEOUT = httpx.Timeout(CANCEL_S_MAX).as_dict()


def httpx_client(
    base_urls: Sequence[str],
    *,
    policy: RetryPolicy | None = None,
    transport: httpx.BaseTransport | None = None,
    **options: Any,
) -> httpx.Client:
    """A client whose streams outlive their server: `OpenAI(base_url=…, http_client=httpx_client([url1, url2]))`.

    `base_urls`: of the frontends, with or without `/v1`. `transport`: what sends the requests, `httpx.HTTPTransport()`
    by default. `options`: of `httpx.Client`.
    """
    healing = HealingTransport(base_urls, policy=policy, transport=transport)
    return httpx.Client(transport=healing, **{"follow_redirects": True, **options})


def async_httpx_client(
    base_urls: Sequence[str],
    *,
    policy: RetryPolicy | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    **options: Any,
) -> httpx.AsyncClient:
    """The same for `AsyncOpenAI`; see `httpx_client`."""
    healing = AsyncHealingTransport(base_urls, policy=policy, transport=transport)
    return httpx.AsyncClient(transport=healing, **{"follow_redirects": True, **options})


class _Healing:
    """What the two transports have in common."""

    def __init__(self, base_urls: Sequence[str], policy: RetryPolicy | None) -> None:
        self._addresses = Addresses(base_urls)
        self._policy = policy or RetryPolicy()

    def _path_of(self, request: httpx.Request) -> str | None:
        """The path of a request that may be sent again; None if it is passed on as it is."""
        path = self._addresses.path_of(request.url)
        is_list = request.method == "GET" and path is not None and path.startswith("/v1/models")
        return path if path is not None and (is_list or is_generation(request.method, path)) else None

    def _exchange(self, request: httpx.Request, path: str) -> Exchange:
        return Exchange(request, path, self._addresses, self._policy)


class HealingTransport(_Healing, httpx.BaseTransport):
    """Sends requests to one of several servers, and goes on with their answers on another one."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        policy: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """See `httpx_client`."""
        super().__init__(base_urls, policy)
        self._transport = transport or httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = self._path_of(request)
        if path is None:
            return self._transport.handle_request(request)
        request.read()
        exchange = self._exchange(request, path)
        response = self.open(exchange)
        return _response_of(response, _Stream(self, exchange, response) if exchange.has_stream else None)

    def open(self, exchange: Exchange) -> httpx.Response:
        """The next response that is a stream, or final and complete. Raises httpx.TransportError."""
        try:
            while True:
                try:
                    response = self._transport.handle_request(exchange.next_request())
                    if exchange.begins_stream(response):
                        return response
                    response.read()
                except httpx.TransportError as error:
                    if (pause_s := exchange.lost(error)) is None:
                        raise
                else:
                    if (pause_s := exchange.answered(response)) is None:
                        return response
                time.sleep(pause_s)
        except BaseException:
            self.cancel(exchange)
            raise

    def cancel(self, exchange: Exchange) -> None:
        """Tell the plane that nobody wants the answer any more."""
        if (request := exchange.cancel_request()) is not None:
            request.extensions = {"timeout": _CANCEL_TIMEOUT}
            with suppress(httpx.TransportError):
                self._transport.handle_request(request).close()

    def close(self) -> None:
        self._transport.close()


class _Stream(httpx.SyncByteStream):
    """The events of an answer, from as many responses as it takes."""

    def __init__(self, transport: HealingTransport, exchange: Exchange, response: httpx.Response) -> None:
        self._transport = transport
        self._exchange = exchange
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        while not exchange.is_complete:
            try:
                for piece in self._response.iter_raw():
                    if events := exchange.feed(piece):
                        yield events
                    if exchange.is_complete or exchange.is_broken:
                        break
                error = exchange.closed()
            except httpx.TransportError as lost:
                error = lost
            last = exchange.rest() if error is None else self._resume(error)
            if last:
                yield last

    def _resume(self, error: httpx.TransportError) -> bytes:
        """Open the next response. Returns the last event if the answer cannot go on. Raises httpx.TransportError."""
        self._response.close()
        if (pause_s := self._exchange.broke(error)) is None:
            return self._exchange.last_words(error)
        time.sleep(pause_s)
        try:
            self._response = self._transport.open(self._exchange)
        except httpx.TransportError as lost:
            return self._exchange.last_words(lost)
        return b"" if self._exchange.has_stream else self._exchange.last_words(error, self._response)

    def close(self) -> None:
        self._transport.cancel(self._exchange)
        self._response.close()


class AsyncHealingTransport(_Healing, httpx.AsyncBaseTransport):
    """The same for `httpx.AsyncClient`."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        policy: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """See `httpx_client`."""
        super().__init__(base_urls, policy)
        self._transport = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = self._path_of(request)
        if path is None:
            return await self._transport.handle_async_request(request)
        await request.aread()
        exchange = self._exchange(request, path)
        response = await self.open(exchange)
        return _response_of(response, _AsyncStream(self, exchange, response) if exchange.has_stream else None)

    async def open(self, exchange: Exchange) -> httpx.Response:
        """The next response that is a stream, or final and complete. Raises httpx.TransportError."""
        try:
            while True:
                try:
                    response = await self._transport.handle_async_request(exchange.next_request())
                    if exchange.begins_stream(response):
                        return response
                    await response.aread()
                except httpx.TransportError as error:
                    if (pause_s := exchange.lost(error)) is None:
                        raise
                else:
                    if (pause_s := exchange.answered(response)) is None:
                        return response
                await anyio.sleep(pause_s)
        except BaseException:
            await self.cancel(exchange)
            raise

    async def cancel(self, exchange: Exchange) -> None:
        """Tell the plane that nobody wants the answer any more."""
        if (request := exchange.cancel_request()) is not None:
            request.extensions = {"timeout": _CANCEL_TIMEOUT}
            with anyio.CancelScope(shield=True), suppress(httpx.TransportError):
                await (await self._transport.handle_async_request(request)).aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


class _AsyncStream(httpx.AsyncByteStream):
    """See `_Stream`."""

    def __init__(self, transport: AsyncHealingTransport, exchange: Exchange, response: httpx.Response) -> None:
        self._transport = transport
        self._exchange = exchange
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        while not exchange.is_complete:
            try:
                async for piece in self._response.aiter_raw():
                    if events := exchange.feed(piece):
                        yield events
                    if exchange.is_complete or exchange.is_broken:
                        break
                error = exchange.closed()
            except httpx.TransportError as lost:
                error = lost
            last = exchange.rest() if error is None else await self._resume(error)
            if last:
                yield last

    async def _resume(self, error: httpx.TransportError) -> bytes:
        await self._response.aclose()
        if (pause_s := self._exchange.broke(error)) is None:
            return self._exchange.last_words(error)
        await anyio.sleep(pause_s)
        try:
            self._response = await self._transport.open(self._exchange)
        except httpx.TransportError as lost:
            return self._exchange.last_words(lost)
        return b"" if self._exchange.has_stream else self._exchange.last_words(error, self._response)

    async def aclose(self) -> None:
        await self._transport.cancel(self._exchange)
        await self._response.aclose()


def _response_of(response: httpx.Response, stream: _Stream | _AsyncStream | None) -> httpx.Response:
    """The response that the user gets. `stream`: its body; None: what has been read."""
    headers = httpx.Headers([item for item in response.headers.multi_items() if item[0].lower() not in _OF_THE_BODY])
    content = None if stream else response.content
    return httpx.Response(
        response.status_code, headers=headers, content=content, stream=stream, extensions=response.extensions
    )
