"""Stands for `grpc.aio.insecure_channel`, with which the processes of the plane call each other.

`tests/simulation/test_grpc_contract.py` holds both to the same behaviour. Not simulated: reconnects and keepalive of a
channel, since each call here has a connection of its own.
"""

import asyncio
import base64
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import unquote

import grpc

from services.runtime.address import split_address
from simulation.grpc.client_rpc import ClientRpc

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Channel:
    """A channel, with a connection for each call."""

    def __init__(self, address: str, **_: Any) -> None:
        self._address = address
        self._calls: list[Call] = []

    def _method(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any = None, *, timeout: float | None = None, **_: Any) -> Call:
            made = Call(self._address, path, request_serializer, response_deserializer, request, timeout)
            self._calls.append(made)
            return made

        return call

    unary_unary = unary_stream = stream_unary = stream_stream = _method

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()


class Call:
    """A call with one request, or with a stream of them. A call with one response can be awaited."""

    def __init__(
        self, address: str, path: str, encode: Any, decode: Any, request: Any, timeout_s: float | None
    ) -> None:
        """`request`: None for a stream."""
        self._encode = encode
        self._decode = decode
        self._rpc = ClientRpc()
        loop = asyncio.get_running_loop()
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
        self._has_expired = False
        self._opening = loop.create_task(self._open(address, path, request))

    async def _open(self, address: str, path: str, request: Any) -> None:
        try:
            await self._rpc.open(*split_address(address))
        except OSError as error:
            raise _failure(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        self._rpc.begin(path, {})
        if request is not None:
            self._rpc.send(self._encode(request), is_last=True)

    def _expire(self) -> None:
        self._has_expired = True
        self._rpc.abort()

    async def _opened(self) -> None:
        await asyncio.wait([self._opening])
        self._opening.result()

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def write(self, message: Any) -> None:
        """Raises InvalidStateError if the rpc is over, and AioRpcError if it has not begun."""
        await self._opened()
        if self._rpc.is_over:
            raise asyncio.InvalidStateError("the rpc is over")
        self._rpc.send(self._encode(message), is_last=False)

    async def read(self) -> Any:
        """The next response, or EOF. Raises AioRpcError. To cancel it cancels the call."""
        try:
            await self._opened()
            message = await self._rpc.next()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._rpc.take()
        if message is not None:
            return self._decode(message)
        self._stop_timer()
        if self._has_expired:
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if self._rpc.trailers is None:
            raise _failure(grpc.StatusCode.UNAVAILABLE, self._rpc.lost)
        code = _CODES[int(self._rpc.trailers["grpc-status"])]
        if code is not grpc.StatusCode.OK:
            raise _failure(code, unquote(self._rpc.trailers.get("grpc-message", "")), self._rpc.trailers)
        return grpc.aio.EOF

    def cancel(self) -> None:
        """Hang up."""
        self._stop_timer()
        self._opening.cancel()
        self._rpc.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _failure(code: grpc.StatusCode, details: str, trailers: Mapping[str, str] | None = None) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    for name, value in (trailers or {}).items():
        is_binary = name.endswith("-bin")
        metadata.add(name, base64.b64decode(value + "=" * (-len(value) % 4)) if is_binary else value)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
