"""Listening sockets: unavailable addresses are explained in one sentence, and ports can be reserved and shared."""

import errno
import socket
from contextlib import ExitStack

import pytest

from services.runtime.listen import (
    bind_error,
    cannot_listen,
    listening_socket,
    listening_sockets,
    reserve,
    split_listen,
)
from services.runtime.process import StartupError
from tests.support.clock import WAIT_S


def test_bind_error_reports_a_port_in_use_and_nothing_for_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = bind_error(address)
    assert error is not None
    assert error.errno == errno.EADDRINUSE
    assert bind_error(address) is None, "the port was released"
    assert bind_error("127.0.0.1:0") is None


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no-such-host.invalid:0"])
def test_bind_error_reports_a_host_of_another_machine(address: str) -> None:
    error = bind_error(address)

    assert error is not None
    assert f"cannot listen for gRPC on {address}: " in str(cannot_listen("gRPC", address, error, option="--listen"))


def test_port_in_use_is_explained_with_a_remedy() -> None:
    error = OSError(errno.EADDRINUSE, "as asyncio words it")

    assert str(cannot_listen("HTTP", "h:1", error, option="--http-port")) == (
        "cannot listen for HTTP on h:1: the port is in use; stop the program that uses it, or give another --http-port"
    )


def test_split_listen_explains_an_invalid_address() -> None:
    assert split_listen("[::1]:0") == ("[::1]", 0)
    with pytest.raises(StartupError, match="cannot listen on 8001: '8001' is not host:port"):
        split_listen("8001")


# Shared ports


def shared(address: str) -> socket.socket:
    """A further socket that listens on `address` with SO_REUSEPORT."""
    host, _, port = address.rpartition(":")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, int(port)))
    listener.listen()
    return listener


def close(*sockets: socket.socket) -> None:
    for one in sockets:
        one.close()


def is_in_use(address: str) -> bool:
    try:
        close(*reserve(address)[1])
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def test_reserved_port_is_available_only_to_processes_that_share_it() -> None:
    """Both before and after the first of them listens."""
    address, holders = reserve("127.0.0.1:0")
    assert not address.endswith(":0")
    assert is_in_use(address)
    assert bind_error(address) is not None
    listeners = [shared(address), shared(address)]
    assert is_in_use(address)
    assert bind_error(address) is not None
    close(*listeners, *holders)
    assert not is_in_use(address), "the port was released"


def test_port_with_a_shared_listener_cannot_be_reserved() -> None:
    address, holders = reserve("127.0.0.1:0")
    listener = shared(address)
    close(*holders)
    assert is_in_use(address)
    close(listener)


def test_holder_of_a_reserved_port_receives_no_connections() -> None:
    address, holders = reserve("127.0.0.1:0")
    listener = shared(address)
    listener.settimeout(WAIT_S)
    host, _, port = address.rpartition(":")
    clients = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(20)]
    accepted = [listener.accept()[0] for _ in clients]
    close(*clients, *accepted, listener, *holders)


def test_port_in_time_wait_can_be_reserved() -> None:
    """A frontend may be restarted at once, while connections of the old one are in TIME_WAIT for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        close(accepted, client)  # The side that closes first enters TIME_WAIT.
    _, holders = reserve(f"127.0.0.1:{port}")
    assert is_in_use(f"127.0.0.1:{port}")
    close(*holders)


def test_reserve_uses_the_same_port_for_all_addresses_of_a_host() -> None:
    address, holders = reserve("localhost:0")
    assert {holder.getsockname()[1] for holder in holders} == {int(address.rpartition(":")[2])}
    close(*holders)


def test_host_with_two_addresses_listens_on_both_with_one_port() -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in listening_sockets("localhost:0", backlog=1)]

        ports = {one.getsockname()[1] for one in listeners}
        assert len(ports) == 1
        for listener in listeners:
            stack.enter_context(socket.create_connection(listener.getsockname()[:2]))


def test_host_that_is_listed_twice_listens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: the port seemed to be in use."""
    found = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: 2 * found)

    [listener] = listening_sockets("localhost:0", backlog=1)

    listener.close()


def test_any_ipv6_address_accepts_ipv4() -> None:
    """A bug: HTTP on [::] could not be reached over IPv4, while gRPC could."""
    with ExitStack() as stack:
        [listener] = map(stack.enter_context, listening_sockets("[::]:0", backlog=1))

        stack.enter_context(socket.create_connection(("127.0.0.1", listener.getsockname()[1])))


def test_address_that_this_machine_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: in a container without IPv6 whose /etc/hosts has `::1 localhost`, no process could listen on localhost."""
    elsewhere = socket.getaddrinfo("2001:db8::1", 0, type=socket.SOCK_STREAM)
    here = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere + here)

    assert bind_error("localhost:0") is None
    _, holders = reserve("localhost:0")
    found = [*holders, listening_socket("localhost:0"), *listening_sockets("localhost:0", backlog=1)]

    assert [one.getsockname()[0] for one in found] == ["127.0.0.1"] * 3
    close(*found)


def test_failed_listen_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        listening_sockets(f"127.0.0.1:{other.getsockname()[1]}", backlog=1)


def test_shared_listeners_can_use_one_port() -> None:
    with ExitStack() as stack:
        [first] = map(stack.enter_context, listening_sockets("127.0.0.1:0", backlog=1, is_shared=True))
        address = f"127.0.0.1:{first.getsockname()[1]}"

        [_] = map(stack.enter_context, listening_sockets(address, backlog=1, is_shared=True))
