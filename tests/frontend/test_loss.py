"""How a session was lost, as gRPC tells it."""

import grpc
import pytest

from services.errors import Reason
from services.frontend.loss import loss_of


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", Reason.DISCONNECTED),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", Reason.DISCONNECTED),
        (grpc.StatusCode.INTERNAL, "bad frame", Reason.PROTOCOL_VIOLATION),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max", Reason.PROTOCOL_VIOLATION),
    ],
)
def test_a_connection_that_breaks_while_we_write_is_no_fault_of_a_message(
    code: grpc.StatusCode, details: str, reason: Reason
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    assert loss_of(error, "127.0.0.1:1").reason is reason
