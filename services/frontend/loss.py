"""How a session was lost, from the error that its stream ended with."""

import grpc

from services.errors import Failure, Reason
from services.rpc import failure_of

UNREADABLE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""What gRPC ends a stream with, on our side of it, when a message has no sound frame or is above the bound."""
WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says, under INTERNAL, when the connection was gone as we wrote: that is no fault of a message."""


def loss_of(error: grpc.aio.AioRpcError, address: str) -> Failure:
    """What a session is lost for when its stream ends with `error`."""
    is_unreadable = error.code() in UNREADABLE and error.details() != WRITE_FAILED
    failure = failure_of(error, otherwise=Reason.PROTOCOL_VIOLATION if is_unreadable else Reason.DISCONNECTED)
    return Failure(failure.reason, f"the connection to {address} broke: {failure.detail}")
