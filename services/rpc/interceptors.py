"""Answers a request that cannot be decoded with INVALID_ARGUMENT, because it is the client's fault.

gRPC itself answers UNKNOWN and logs a traceback, as if the server had a bug.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.core.errors import Failure, Reason
from services.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
_DETAIL = "the request cannot be decoded: send a message of the type that the .proto file names"


async def read(context: Context) -> Any:
    """Read the next request of a stream, or `grpc.aio.EOF`. Raises INVALID_ARGUMENT if it cannot be decoded."""
    try:
        return await context.read()
    except DecodeError:
        raise Failure(Reason.INVALID_ARGUMENT, _DETAIL) from None


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """Ends a unary-request rpc with INVALID_ARGUMENT if its request cannot be decoded.

    Rpcs with a stream of requests pass: their handlers call `read`.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        if handler.response_streaming:
            behaviour, build = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            behaviour, build = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        return build(_checked(behaviour), _lenient(handler.request_deserializer), handler.response_serializer)


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return the error in place of the message: gRPC takes an exception of a deserialiser for a bug."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return read


def _checked(behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def serve(request: Any, context: Context) -> Any:
        if isinstance(request, DecodeError):
            await abort(context, Failure(Reason.INVALID_ARGUMENT, _DETAIL))
        return await behaviour(request, context)

    return serve
