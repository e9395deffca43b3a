"""Addresses: `host:port`, split and checked."""

import ipaddress
import re
from collections.abc import Sequence

PORT_MAX = 65_535
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def split_address(text: str) -> tuple[str, int]:
    """`host:port` → the two; the host of an IPv6 address keeps its brackets. Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > PORT_MAX:
        raise ValueError(f"{text!r} is not host:port")
    return found["host"], int(found["port"])


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine, so that nobody elsewhere can reach it by that name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def split_addresses(text: str) -> Sequence[str]:
    """`a:1,b:2` → the addresses. Raises ValueError for none and for one that is not host:port."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    for address in addresses:
        split_address(address)
    if not addresses:
        raise ValueError("at least one host:port is needed")
    return addresses
