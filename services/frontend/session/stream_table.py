"""The streams of one session, by id: those under way, and which have ended."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.request import Request
from services.frontend.session.stream import Stream

COMPLETED_KEPT = 4096
"""How many completed stream ids a session remembers, to notice items that follow `complete_final`."""


class StreamTable:
    """Ids are given out in order, and never twice."""

    def __init__(self) -> None:
        self._under_way: dict[int, Stream] = {}
        self._kept: dict[int, Stream] = {}  # Of choices that have not come yet, ended or not; parties bound them.
        self._completed: OrderedDict[int, None] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self.next_id = 1

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._under_way)

    def __iter__(self) -> Iterator[Stream]:
        """Those under way, as of now: what is done with one may end others."""
        return iter(list(self._under_way.values()))

    def get(self, stream_id: int) -> Stream | None:
        return self._under_way.get(stream_id)

    def find(self, stream_id: int) -> Stream | None:
        """The stream; None if it was closed by us. Raises PROTOCOL_VIOLATION if the worker itself had ended it."""
        stream = self._under_way.get(stream_id)
        if stream is None and stream_id in self._completed:
            raise Failure(Reason.PROTOCOL_VIOLATION, f"the worker went on with stream {stream_id} after its end")
        return stream

    def add(self, request: Request, vocab_size: int, choices: int = 1) -> Stream:
        """The first of so many new ones with consecutive ids, for choices from the request's own on."""
        first = self.next_id
        for number in range(choices):
            one = replace(request, choice=request.choice + number) if number else request
            self._under_way[first + number] = Stream(first + number, one, vocab_size, self._loop.create_future())
        self.next_id += choices
        return self._under_way[first]

    def remove(self, stream: Stream) -> bool:
        """Whether it was under way."""
        return self._under_way.pop(stream.id, None) is not None

    def complete(self, stream: Stream) -> None:
        """The worker has nothing more to say of it."""
        self._completed[stream.id] = None
        if len(self._completed) > COMPLETED_KEPT:
            self._completed.popitem(last=False)

    # Those of choices that have not come yet

    def keep(self, stream_ids: Sequence[int]) -> None:
        """Until somebody takes them, even if they end before."""
        self._kept |= {stream_id: self._under_way[stream_id] for stream_id in stream_ids}

    def take(self, stream_id: int) -> Stream:
        """One that was kept. Whoever takes it asks for its end, or its failure would be reported as forgotten."""
        return self._kept.pop(stream_id)
