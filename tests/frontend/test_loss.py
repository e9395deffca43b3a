"""How a session was lost, as gRPC tells it."""

import grpc
import pytest
from structlog.testing import capture_logs

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

    assert loss_of(error, "worker w1").reason is reason


def test_clients_learn_no_addresses_and_the_log_does() -> None:
    why = "ipv4:10.0.0.7:7000: Connection reset by peer"
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), why)

    with capture_logs() as logs:
        failure = loss_of(error, "worker w1")

    assert failure.detail == "the connection to worker w1 broke"
    assert [line["why"] for line in logs] == [why]
