"""Holds writes back for a moment, so that what one step of a worker brings leaves for all clients together.

A write to a client that sleeps wakes it, usually on another core; with few streams that is most of the cost of a token.
A process that reads many streams, as a gateway does, is woken by the first write and is still awake at the last one, if
nothing comes between the writes.
"""

import asyncio
from typing import Protocol

from services.core.common_layers import bug_failure


class Deferred(Protocol):
    """A connection with a buffer of its own."""

    def flush(self) -> None:
        """Write what is buffered."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class Cork:
    """While it is held, writes are buffered; the last release writes them.

    A holder releases within the same iteration of the event loop, or after the tasks that it has woken, which bounds
    the buffer.
    """

    __slots__ = ("_deferred", "_holds", "_writes")

    def __init__(self) -> None:
        self._holds = 0
        self._deferred: list[Deferred] = []
        self._writes: dict[asyncio.WriteTransport, bytes] = {}

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> bool:
        """Write, or buffer if the cork is held. Returns whether the data is buffered."""
        if not self._holds:
            transport.write(data)
            return False
        writes = self._writes
        writes[transport] = writes[transport] + data if transport in writes else data
        return True

    def hold(self) -> None:
        """Buffer writes until `release` has been called once for each `hold`."""
        self._holds += 1

    def release(self) -> None:
        """End one hold. The last one writes what is buffered, in order, with one write for each client."""
        self._holds -= 1
        if not self._holds:
            writes, self._writes = self._writes, {}
            for transport, data in writes.items():
                _write(transport, data)
            deferred, self._deferred = self._deferred, []
            for one in deferred:
                try:
                    one.flush()
                except Exception as error:  # A bug with one client must not cost the others their data.
                    one.abort()
                    bug_failure(error, _WHOSE)

    def defer(self, one: Deferred) -> bool:
        """Have the connection flush at the last release, or close if that has a bug. Returns False if not held."""
        if not self._holds:
            return False
        self._deferred.append(one)
        return True

    def flush(self, transport: asyncio.WriteTransport) -> None:
        """Write what is buffered for this client now. The other clients' data stays buffered."""
        if (data := self._writes.pop(transport, None)) is not None:
            _write(transport, data)


def _write(transport: asyncio.WriteTransport, data: bytes) -> None:
    try:
        if not transport.is_closing():
            transport.write(data)
    except Exception as error:  # Likewise.
        transport.abort()
        bug_failure(error, _WHOSE)


_WHOSE = "(any) of a client that was written to"
