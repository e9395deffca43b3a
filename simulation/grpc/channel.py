"""Stands for `grpc.aio.insecure_channel`, with which the processes of the plane call each other."""

import asyncio
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
        def call(request: Any = None, **_: Any) -> Call:
            made = Call(self._address, path, request_serializer, response_deserializer, request)
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
    """A call with one request, or with a stream of them."""

    def __init__(self, address: str, path: str, encode: Any, decode: Any, request: Any) -> None:
        """`request`: None for a stream."""
        self._encode = encode
        self._decode = decode
        self._rpc = ClientRpc()
        self._opening = asyncio.get_running_loop().create_task(self._open(address, path, request))

    async def _open(self, address: str, path: str, request: Any) -> None:
        try:
            await self._rpc.open(*split_address(address))
        except OSError as error:
            raise _failure(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        self._rpc.begin(path, {})
        if request is not None:
            self._rpc.send(self._encode(request), is_last=True)

    async def _opened(self) -> None:
        await asyncio.wait([self._opening])
        self._opening.result()

    async def write(self, message: Any) -> None:
        """Raises InvalidStateError if the rpc is over, and AioRpcError if it has not begun."""
        await self._opened()
        if self._rpc.is_over:
            raise asyncio.InvalidStateError("the rpc is over")
        self._rpc.send(self._encode(message), is_last=False)

    async def read(self) -> Any:
        """The next response, or EOF. Raises AioRpcError."""
        await self._opened()
        message = await self._rpc.next()
        self._rpc.take()
        if message is not None:
            return self._decode(message)
        if self._rpc.trailers is None:
            raise _failure(grpc.StatusCode.UNAVAILABLE, self._rpc.lost)
        code = _CODES[int(self._rpc.trailers["grpc-status"])]
        if code is not grpc.StatusCode.OK:
            raise _failure(code, unquote(self._rpc.trailers.get("grpc-message", "")))
        return grpc.aio.EOF

    def cancel(self) -> None:
        """Hang up."""
        self._opening.cancel()
        self._rpc.abort()


def _failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
