"""Answers several prompts of one request: each is a request of its own, and the client sees one answer."""

import asyncio
from collections.abc import Iterator

from services.core.call import Call
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import Request
from services.runtime.tasks import root_cause

AT_ONCE_MAX = 4
"""Prompts of a request under way at a time: a batch of any size gets through, and leaves room for others."""


class _Total:
    """What all prompts cost so far."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._usage = Usage(0, 0)

    def add(self, usage: Usage) -> Usage | None:
        """One prompt has ended. Returns the usage of all, once all have."""
        self._left -= 1
        prompt, completion = self._usage.prompt_tokens, self._usage.completion_tokens
        self._usage = Usage(prompt + usage.prompt_tokens, completion + usage.completion_tokens)
        return None if self._left else self._usage


class _Numbered:
    """Passes one prompt's deltas on, with its choices numbered from `first`; the last of all carries the usage."""

    __slots__ = ("_first", "_sink", "_total")

    def __init__(self, sink: Sink, first: int, total: _Total) -> None:
        self._sink = sink
        self._first = first
        self._total = total

    def deliver(self, delta: Delta) -> None:
        delta.choice += self._first
        if delta.usage is not None:
            delta.usage = self._total.add(delta.usage)
        self._sink.deliver(delta)


class Prompts:
    """Below preprocess: no prompt is answered before all are known to be good. Above choices: each has as many.

    One that fails fails the request, and has the others cancelled.
    """

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if not request.parts:
            return await self._inner(request, call, sink)
        total = _Total(len(request.parts))
        coming = iter([(part, _Numbered(sink, i * request.n, total)) for i, part in enumerate(request.parts)])
        finishes: list[Finish] = []
        try:
            async with asyncio.TaskGroup() as group:
                # Waited for in the group: before Python 3.13, one that fails while a group ends looks like a cancel.
                lanes = range(min(AT_ONCE_MAX, len(request.parts)))
                await asyncio.wait([group.create_task(self._answer_some(coming, call, finishes)) for _ in lanes])
        except ExceptionGroup as failures:
            raise root_cause(failures) from None
        return _sum(finishes)

    async def _answer_some(self, coming: Iterator[tuple[Request, Sink]], call: Call, finishes: list[Finish]) -> None:
        """One after the other, as many as the others of its kind leave."""
        for part, sink in coming:
            finishes.append(await self._inner(part, call, sink))


def _sum(finishes: list[Finish]) -> Finish:
    known = [finish.usage for finish in finishes if finish.usage is not None]
    assert len(known) == len(finishes), "present counts"
    usage = Usage(sum(one.prompt_tokens for one in known), sum(one.completion_tokens for one in known))
    return Finish(finishes[0].reason, usage)
