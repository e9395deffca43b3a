"""Listening sockets: checks, reserves and opens addresses, and explains why an address is unavailable."""

import errno
import os
import socket
from typing import Any

from services.runtime.address import PORT_MAX, split_address
from services.runtime.process import StartupError


def split_listen(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port. An IPv6 host keeps its brackets. Raises StartupError."""
    try:
        return split_address(address)
    except ValueError as error:
        raise StartupError(f"cannot listen on {address}: {error}, with a port from 0 to {PORT_MAX}") from error


def bare_host(host: str) -> str:
    """The host in the form that sockets expect: an IPv6 address without brackets."""
    return host.removeprefix("[").removesuffix("]")


_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def _places(host: str, port: int) -> list[Any]:
    """What `getaddrinfo` finds, without addresses that this machine lacks, such as `::1` where IPv6 is switched off.

    If it has none of them, all are returned: to bind to them raises the error. Raises OSError.
    """
    found = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = list(dict.fromkeys(found))  # A host may be listed twice in /etc/hosts.
    return [place for place in places if _is_here(*place)] or places


def _is_here(family: int, kind: int, protocol: int, _name: str, found: Any) -> bool:
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((found[0], 0, *found[2:]))
    except OSError as error:
        return error.errno not in _ABSENT
    return True


def bind_error(address: str) -> OSError | None:
    """The error of binding to `host:port`, or None if the address is available. Port 0 only tests the host."""
    host, port = split_address(address)
    try:
        for family, kind, protocol, _name, found in _places(host, port):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As servers do: TIME_WAIT does not count.
                probe.bind(found)
    except OSError as error:
        return error
    return None


def reserve(address: str) -> tuple[str, list[socket.socket]]:
    """Reserve `host:port` for processes of this user that will share it. Port 0 takes a free port.

    Returns the real address and the sockets that hold it until they are closed. No other program can use the port
    meanwhile. The holders do not listen, so they receive no connections. Raises OSError if the port is unavailable.
    """
    host, port = split_address(address)
    holders: list[socket.socket] = []
    try:
        for family, kind, protocol, _name, found in _places(host, port):
            holders.append(holder := socket.socket(family, kind, protocol))
            _hold(holder, (found[0], port, *found[2:]))
            port = holder.getsockname()[1]  # With port 0, all addresses of the host get the same port.
    except OSError:
        for holder in holders:
            holder.close()
        raise
    return f"{host}:{port}", holders


def _hold(holder: socket.socket, name: tuple[str | int, ...]) -> None:
    """Bind without SO_REUSEPORT, so that a port in use is detected, then set it, so that other processes can share."""
    try:
        holder.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # It may be in TIME_WAIT only.
        holder.bind(name)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def listening_socket(address: str) -> socket.socket:
    """Open a socket that listens on `host:port`. As with gRPC, `[::]` also accepts IPv4. Raises OSError."""
    host, port = split_address(address)
    family, _kind, _protocol, _name, place = _places(host, port)[0]
    return socket.create_server(place[:2], family=family, dualstack_ipv6=_takes_both(place[0]))


def _takes_both(host: str) -> bool:
    """Whether a socket on this address accepts IPv4 and IPv6."""
    return host == "::" and socket.has_dualstack_ipv6()


def listening_sockets(address: str, *, backlog: int, is_shared: bool = False) -> list[socket.socket]:
    """Open non-blocking sockets that listen on each address of the host, all on the same port. Raises OSError.

    As with gRPC, `[::]` also accepts IPv4.
    `backlog`: connections that may wait to be accepted. `is_shared`: other processes of this user listen there, too.
    """
    host, port = split_address(address)
    places = _places(host, port)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _name, found in places:
            listeners.append(listener := socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                has_other = len(places) > 1  # IPv4 has its own socket.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, has_other or not _takes_both(found[0]))
            listener.setblocking(False)
            listener.bind((found[0], port, *found[2:]))
            listener.listen(backlog)
            port = listener.getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def cannot_listen(what: str, address: str, error: OSError, *, option: str) -> StartupError:
    """Explain `error` for people. `what`: what should listen there. `option`: the option that sets the address."""
    if error.errno == errno.EADDRINUSE:
        return StartupError(
            f"cannot listen for {what} on {address}: the port is in use; stop the program that uses it, or give another"
            f" {option}"
        )
    is_lookup = isinstance(error, socket.gaierror)  # Its error numbers are not those of errno.
    why = error.strerror if is_lookup or error.errno is None else os.strerror(error.errno)
    return StartupError(f"cannot listen for {what} on {address}: {why}; give another {option}")
