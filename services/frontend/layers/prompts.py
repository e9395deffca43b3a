"""Runs the prompts of one request as requests of their own, and merges their tokens into one answer."""

import asyncio
from collections.abc import Iterator

from msgspec.structs import replace

from services.core.call import Call
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import Request
from services.runtime.tasks import root_cause

CONCURRENT_PROMPTS_MAX = 4
"""Prompts of one request that run at the same time, so that a batch of any size leaves room for other requests."""


class _UsageSum:
    """The usage of the prompts that have ended."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._usage = Usage(0, 0)

    def add(self, usage: Usage) -> Usage | None:
        """Add the usage of a prompt that has ended. Returns the sum once all have ended."""
        self._left -= 1
        prompt, completion = self._usage.prompt_tokens, self._usage.completion_tokens
        self._usage = Usage(prompt + usage.prompt_tokens, completion + usage.completion_tokens)
        return None if self._left else self._usage


class _Numbered:
    """Passes one prompt's deltas on, with its choices numbered from `first`. The last delta of all has the usage."""

    __slots__ = ("_first", "_sink", "_sum")

    def __init__(self, sink: Sink, first: int, usage_sum: _UsageSum) -> None:
        self._sink = sink
        self._first = first
        self._sum = usage_sum

    def deliver(self, delta: Delta) -> None:
        delta.choice += self._first
        if delta.usage is not None:
            delta.usage = self._sum.add(delta.usage)
        self._sink.deliver(delta)


class Prompts:
    """Below Preprocess: no prompt runs before all are known to be valid. Above Choices: each prompt has `n` answers.

    If one prompt fails, the others are cancelled and the request fails. A prompt whose choices the client has complete
    is left out.
    """

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if not request.parts:
            return await self._inner(request, call, sink)
        opened = [(index * request.n, part) for index, part in enumerate(request.parts) if part.open_choices]
        usage_sum = _UsageSum(len(opened))
        coming = iter([(part, first, _Numbered(sink, first, usage_sum)) for first, part in opened])
        finishes: list[Finish] = []
        try:
            async with asyncio.TaskGroup() as group:
                # Awaited inside the group: before Python 3.13, a failure while a group exits looks like a cancel.
                lanes = range(min(CONCURRENT_PROMPTS_MAX, len(opened)))
                await asyncio.wait([group.create_task(self._run_lane(coming, call, finishes)) for _ in lanes])
        except ExceptionGroup as failures:
            raise root_cause(failures) from None
        return _sum(finishes)

    async def _run_lane(self, coming: Iterator[tuple[Request, int, Sink]], call: Call, finishes: list[Finish]) -> None:
        """Run prompts one after the other, until the shared iterator is empty."""
        for part, first_index, sink in coming:
            if call.kept is not None:
                call = replace(call, kept=replace(call.kept, first_index=first_index))
            finishes.append(await self._inner(part, call, sink))


def _sum(finishes: list[Finish]) -> Finish:
    known = [finish.usage for finish in finishes if finish.usage is not None]
    assert len(known) == len(finishes), "Detokenize counts the tokens"
    usage = Usage(sum(one.prompt_tokens for one in known), sum(one.completion_tokens for one in known))
    return Finish(finishes[0].reason, usage)
