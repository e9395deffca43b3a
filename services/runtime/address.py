"""Parses and validates addresses of the form `host:port`."""

import ipaddress
import re
from collections.abc import Sequence

PORT_MAX = 65_535
LOCALHOST = "localhost"
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")

_SCHEME_HINT = ": write it without a scheme, such as tcp://"


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port` into host and port. An IPv6 host keeps its brackets. Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not text.isprintable() or int(found["port"]) > PORT_MAX:
        raise ValueError(f"{text!r} is not host:port{_SCHEME_HINT if '://' in text else ''}")
    return found["host"], int(found["port"])


def is_wildcard(host: str) -> bool:
    """Whether `host` means all addresses of a machine, as `0.0.0.0` does. Other machines cannot connect to it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_local(host: str) -> bool:
    """Whether `host`, a name or an address, can only mean the machine itself: only its own programs reach it there."""
    name = host.lower().rstrip(".")
    if name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def split_addresses(text: str) -> Sequence[str]:
    """Split `a:1,b:2` into addresses. Raises ValueError if there is none, or if one is not host:port."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    for address in addresses:
        split_address(address)
    if not addresses:
        raise ValueError("at least one host:port is needed")
    return addresses
