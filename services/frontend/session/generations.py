"""Questions to a worker about answers that outlive their frontend."""

import asyncio
from itertools import count

from services.frontend.session.stream_table import StreamTable
from services.frontend.session.writer import SessionWriter
from services.stubs import worker_pb2


class SessionGenerations:
    """The questions of one session."""

    def __init__(self, streams: StreamTable, writer: SessionWriter) -> None:
        self._streams = streams
        self._writer = writer
        self._queries = count(1)
        self._pending: dict[int, asyncio.Future[worker_pb2.Located | None]] = {}
        self._is_lost = False

    def locate(self, generation_id: bytes, *, cancels: bool = False) -> asyncio.Future[worker_pb2.Located | None]:
        """Ask what the worker has of an answer; None if the session is lost, or gets lost meanwhile.

        `cancels`: the worker ends what it has of it. Cancel the future once nobody waits for the reply any more.
        """
        located: asyncio.Future[worker_pb2.Located | None] = asyncio.get_running_loop().create_future()
        if self._is_lost:
            located.set_result(None)
            return located
        query = next(self._queries)
        self._pending[query] = located
        located.add_done_callback(lambda _: self._pending.pop(query))
        self._writer.locate(query, generation_id, cancels=cancels)
        return located

    def on_located(self, located: worker_pb2.Located) -> None:
        """The worker has replied. Ignored if nobody waits any more."""
        pending = self._pending.get(located.query)
        if pending is not None and not pending.done():
            pending.set_result(located)

    def discard(self, generation_id: bytes, index: int, epoch: int) -> None:
        """See `StreamTable.discard`."""
        self._streams.discard(generation_id, index, epoch)

    def on_lost(self) -> None:
        """The session is lost: end the questions."""
        self._is_lost = True
        for pending in self._pending.values():
            if not pending.done():
                pending.set_result(None)
