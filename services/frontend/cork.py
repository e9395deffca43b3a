"""Writes to many clients, one right after the other: what a step of a worker brings leaves together.

A write to a client that sleeps wakes it, on another core as a rule, and with few streams that is most of what a token
costs. A process that reads many streams, as a gateway does, is woken by the first write and still awake at the last, if
nothing comes between.
"""

import asyncio

from services.layers import bug_failure


class Cork:
    """In a bottle: while it is in, writes wait. It is in for one turn of the loop at most, which bounds what waits."""

    __slots__ = ("_is_in", "_writes")

    def __init__(self) -> None:
        self._is_in = False
        self._writes: list[tuple[asyncio.WriteTransport, bytes]] = []

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """At once, or with the others."""
        if self._is_in:
            self._writes.append((transport, data))
        else:
            transport.write(data)

    def put_in(self) -> None:
        """Until `pull`, which must come in the same turn."""
        self._is_in = True

    def pull(self) -> None:
        """Write what has come meanwhile, in order."""
        self._is_in = False
        writes, self._writes = self._writes, []
        for transport, data in writes:
            if transport.is_closing():  # A write of this turn has failed.
                continue
            try:
                transport.write(data)
            except Exception as error:  # A bug: it must not take what others are to get.
                transport.abort()
                bug_failure(error, "(any) of a client that was written to")
