"""Where a process listens: whether an address can be had, and one sentence for people when it can't."""

import errno
import os
import socket

from services.runtime.address import PORT_MAX, split_address
from services.runtime.process import StartupError


def split_listen(address: str) -> tuple[str, int]:
    """`host:port` → the two; an IPv6 host keeps its brackets. Raises StartupError."""
    try:
        return split_address(address)
    except ValueError as error:
        raise StartupError(f"cannot listen on {address}: {error}, with a port from 0 to {PORT_MAX}") from error


def bare_host(host: str) -> str:
    """A host as sockets take it: an IPv6 address without its brackets."""
    return host.removeprefix("[").removesuffix("]")


def bind_error(address: str) -> OSError | None:
    """Why `host:port` can't be listened on; None if it can. Port 0 always can, on a host of this machine."""
    host, port = split_address(address)
    try:
        for family, kind, protocol, _name, found in socket.getaddrinfo(
            bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As servers do: the dead hold no port.
                probe.bind(found)
    except OSError as error:
        return error
    return None


def reserve(address: str) -> tuple[str, list[socket.socket]]:
    """Take `host:port` for processes of this user that are to share it; 0 takes any free port.

    Returns the real address, and what holds it until it is closed: nobody else gets the port, and no client comes to
    the holders, for they do not listen. Raises OSError if it can't be had.
    """
    host, port = split_address(address)
    holders: list[socket.socket] = []
    try:
        for family, kind, protocol, _name, found in socket.getaddrinfo(
            bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            holders.append(holder := socket.socket(family, kind, protocol))
            _hold(holder, (found[0], port, *found[2:]))
            port = holder.getsockname()[1]  # All addresses of the host get the one that the first was given.
    except OSError:
        for holder in holders:
            holder.close()
        raise
    return f"{host}:{port}", holders


def _hold(holder: socket.socket, name: tuple[str | int, ...]) -> None:
    """Bind as one who shares with nobody, and only then let others of this user in: whoever was there first is seen."""
    try:
        holder.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # It may be in use by the dead alone.
        holder.bind(name)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def listening_socket(address: str) -> socket.socket:
    """Bound to `host:port`, with any IPv6 address for IPv4 as well, as gRPC has it. Raises OSError."""
    host, port = split_address(address)
    found = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _kind, _protocol, _name, place = found[0]
    is_any = family == socket.AF_INET6 and place[0] == "::"
    return socket.create_server(place[:2], family=family, dualstack_ipv6=is_any and socket.has_dualstack_ipv6())


def listening_sockets(address: str, *, backlog: int, is_shared: bool = False) -> list[socket.socket]:
    """One for each address of the host, all on the same port, for a loop. Raises OSError.

    backlog: connections that may wait to be accepted. is_shared: other processes of this user listen there too.
    """
    host, port = split_address(address)
    places = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _name, found in dict.fromkeys(places):  # A host may be listed twice in /etc/hosts.
            listeners.append(listener := socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has a socket of its own.
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
    """The sentence. what: who would listen there. option: which says where."""
    if error.errno == errno.EADDRINUSE:
        return StartupError(
            f"cannot listen for {what} on {address}: the port is in use; stop what holds it, or give another {option}"
        )
    is_lookup = isinstance(error, socket.gaierror)  # It has error numbers of its own.
    why = error.strerror if is_lookup or error.errno is None else os.strerror(error.errno)
    return StartupError(f"cannot listen for {what} on {address}: {why}; give another {option}")
