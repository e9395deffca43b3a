"""How a session was lost, from the error that its stream ended with."""

import grpc
import structlog

from services.errors import Failure, Reason
from services.rpc import failure_of

log = structlog.get_logger()

UNREADABLE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""What gRPC ends a stream with, on our side of it, when a message has no sound frame or is above the bound."""
WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says, under INTERNAL, when the connection was gone as we wrote: that is no fault of a message."""


def loss_of(error: grpc.aio.AioRpcError, worker: str) -> Failure:
    """What a session to `worker` is lost for when its stream ends with `error`.

    Clients see it, so the addresses that gRPC speaks of are only in the log.
    """
    log.info("connection broke", worker=worker, code=error.code().name, why=error.details())
    is_unreadable = error.code() in UNREADABLE and error.details() != WRITE_FAILED
    failure = failure_of(error, otherwise=Reason.PROTOCOL_VIOLATION if is_unreadable else Reason.DISCONNECTED)
    return Failure(failure.reason, f"the connection to {worker} broke")
