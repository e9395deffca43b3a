"""Runs the `n` answers to one request as `n` requests with one answer each, and merges their tokens."""

import asyncio

from msgspec.structs import replace

from services.core.call import Call
from services.core.choice_group import ChoiceGroup
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import Request
from services.runtime.tasks import root_cause


class _UsageSum:
    """Passes deltas on. The last choice to end carries the usage of all, with the prompt counted once."""

    def __init__(self, sink: Sink, count: int) -> None:
        self._sink = sink
        self._left = count
        self._completion_tokens = 0

    def deliver(self, delta: Delta) -> None:
        if delta.usage is not None:
            self._left -= 1
            self._completion_tokens += delta.usage.completion_tokens
            total = Usage(delta.usage.prompt_tokens, self._completion_tokens)
            delta.usage = None if self._left else total
        self._sink.deliver(delta)


class Choices:
    """Above Detokenize and Migrate: each choice has its own text, and moves alone.

    They start as one choice group: one worker takes all of them, or none. Choices that continue after tokens of their
    own start alone, as after a move, and so do those of a resumed answer; those that the client has complete do not
    start.
    """

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if request.n == 1:
            return await self._inner(request, call, sink)
        opened = request.open_choices
        merged = _UsageSum(sink, len(opened))
        is_resumed = call.kept is not None and call.kept.generation.is_resumed
        starts_together = request.together_count == request.n and not is_resumed
        choice_group = ChoiceGroup(request.n) if starts_together else None
        call = replace(call, choice_group=choice_group)
        try:
            async with asyncio.TaskGroup() as group:
                choices = [group.create_task(self._inner(request.single(index), call, merged)) for index in opened]
                await asyncio.wait(choices)  # All at once: a cancel must reach all of them together.
        except ExceptionGroup as failures:
            raise root_cause(failures) from None  # The failure of one has cancelled the others.
        finally:
            if choice_group is not None:
                choice_group.release()
        finishes = [choice.result() for choice in choices]
        return Finish(finishes[0].reason, _total([finish.usage for finish in finishes]))


def _total(usages: list[Usage | None]) -> Usage:
    known = [usage for usage in usages if usage is not None]
    assert len(known) == len(usages), "Detokenize counts the tokens"
    return Usage(known[0].prompt_tokens, sum(usage.completion_tokens for usage in known))
