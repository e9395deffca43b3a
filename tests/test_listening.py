"""Where a process listens: what can't be had is told in one sentence, before and after it was tried."""

import errno
import socket

import pytest

from services.lifetime import StartupError
from services.listening import bind_error, cannot_listen, split_listen


def test_a_port_that_somebody_has_cannot_be_had_and_any_other_can() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = bind_error(address)
    assert error is not None
    assert error.errno == errno.EADDRINUSE
    assert bind_error(address) is None, "it was let go of"
    assert bind_error("127.0.0.1:0") is None


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_a_host_of_another_machine_or_of_none_cannot_be_had(address: str) -> None:
    error = bind_error(address)

    assert error is not None
    assert f"cannot listen for gRPC on {address}: " in str(cannot_listen("gRPC", address, error, option="--listen"))


def test_a_port_in_use_comes_with_what_to_do() -> None:
    error = OSError(errno.EADDRINUSE, "as asyncio words it")

    assert str(cannot_listen("HTTP", "h:1", error, option="--http-port")) == (
        "cannot listen for HTTP on h:1: the port is in use; stop what holds it, or give another --http-port"
    )


def test_what_is_no_address_is_told_in_a_sentence() -> None:
    assert split_listen("[::1]:0") == ("[::1]", 0)
    with pytest.raises(StartupError, match="cannot listen on 8001: '8001' is not host:port"):
        split_listen("8001")
