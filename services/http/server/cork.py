"""Writes to many clients, one right after the other: what a step of a worker brings leaves together.

A write to a client that sleeps wakes it, on another core as a rule, and with few streams that is most of what a token
costs. A process that reads many streams, as a gateway does, is woken by the first write and still awake at the last, if
nothing comes between.
"""

import asyncio

from services.core.common_layers import bug_failure


class Cork:
    """In a bottle: while somebody holds it in, writes wait. That is for a turn of the loop at most, which bounds what
    waits: whoever puts it in pulls in the same turn, or lets the loop do it after the tasks that it has woken.
    """

    __slots__ = ("_held", "_writes")

    def __init__(self) -> None:
        self._held = 0  # By so many.
        self._writes: dict[asyncio.WriteTransport, bytes] = {}

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> bool:
        """At once, or with the others: whether it waits for them."""
        if not self._held:
            transport.write(data)
            return False
        writes = self._writes
        writes[transport] = writes[transport] + data if transport in writes else data
        return True

    def put_in(self) -> None:
        """Until `pull`, once for each time."""
        self._held += 1

    def pull(self) -> None:
        """The last of those who hold it writes what has come meanwhile, in order: to each client in one piece."""
        self._held -= 1
        if not self._held:
            writes, self._writes = self._writes, {}
            for transport, data in writes.items():
                _write(transport, data)

    def release(self, transport: asyncio.WriteTransport) -> None:
        """Write what waits for this client, if anything does, though it be held: the others wait on."""
        if (data := self._writes.pop(transport, None)) is not None:
            _write(transport, data)


def _write(transport: asyncio.WriteTransport, data: bytes) -> None:
    if transport.is_closing():  # It was lost meanwhile.
        return
    try:
        transport.write(data)
    except Exception as error:  # A bug: it must not take what others are to get.
        transport.abort()
        bug_failure(error, "(any) of a client that was written to")
