"""Prompts: the prompts of one request run as requests of their own, and are billed as one."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Sink, Usage
from services.core.request import FinishReason, Request
from services.frontend.layers.prompts import CONCURRENT_PROMPTS_MAX, Prompts
from tests.support.doubles import Collected, call_layer, make_kept, make_request, run_async


class Answers:
    """The layer below: an answer has as many tokens as its prompt, and the prompt [0] fails."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled_count = self.running_count = self.concurrent_max = 0

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.requests.append(request)
        self.running_count += 1
        self.concurrent_max = max(self.concurrent_max, self.running_count)
        try:
            return await self._answer(request, sink)
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        finally:
            self.running_count -= 1

    async def _answer(self, request: Request, sink: Sink) -> Finish:
        if request.prompt_token_ids == (0,):
            raise Failure(Reason.STALLED, "as scripted")
        count = len(request.prompt_token_ids)
        for position in range(count):
            for choice in range(request.n):
                sink.deliver(Delta(position, [7], "x", choice))
            await asyncio.sleep(0)
        for choice in range(request.n):
            usage = Usage(count, count * request.n) if choice == request.n - 1 else None
            sink.deliver(Delta(count, (), "", choice, finish_reason=FinishReason.STOP, usage=usage))
        return Finish(FinishReason.STOP, Usage(count, count * request.n))


def ask(answers: Answers, *prompts: tuple[int, ...], **request: Any) -> Collected:
    common = replace(make_request(**request), token_ids=None)
    parts = tuple(replace(common, token_ids=prompt) for prompt in prompts)
    return run_async(call_layer(Prompts(answers), replace(common, parts=parts)))


def tokens_of(result: Collected, choice: int) -> int:
    return sum(len(delta.token_ids) for delta in result.deltas if delta.choice == choice)


def test_a_request_with_one_prompt_passes_through_unchanged() -> None:
    answers = Answers()

    run_async(call_layer(Prompts(answers), make_request((1, 2))))

    assert answers.requests == [make_request((1, 2))]


def test_each_prompt_is_a_request_of_its_own_and_the_answers_are_numbered_in_order() -> None:
    answers = Answers()

    result = ask(answers, (1,), (1, 2, 3), (1, 2), n=2)

    assert [request.token_ids for request in answers.requests] == [(1,), (1, 2, 3), (1, 2)]
    assert [tokens_of(result, choice) for choice in range(6)] == [1, 1, 3, 3, 2, 2]


def test_prompt_whose_choices_are_complete_is_left_out_and_the_others_keep_their_numbers() -> None:
    answers, common = Answers(), replace(make_request(n=2), token_ids=None)
    parts = (
        replace(common, token_ids=(1,), generated_choices=(None, None)),
        replace(common, token_ids=(1, 2), generated_choices=(None, (7,))),
        replace(common, token_ids=(1, 2, 3)),
    )

    result = run_async(call_layer(Prompts(answers), replace(common, parts=parts)))

    assert [request.token_ids for request in answers.requests] == [(1, 2), (1, 2, 3)]
    assert {delta.choice for delta in result.deltas} == {2, 3, 4, 5}
    assert result.finish == Finish(FinishReason.STOP, Usage(5, 10))


def test_positions_count_within_each_answer() -> None:
    result = ask(Answers(), (1, 2), (1, 2))

    assert [delta.position for delta in result.deltas if delta.choice == 1] == [0, 1, 2]


def test_the_usage_of_all_prompts_comes_once_with_the_last_delta() -> None:
    result = ask(Answers(), (1, 2, 3), (1,), n=2)

    total = Usage(4, 8)
    assert result.finish == Finish(FinishReason.STOP, total)
    assert [delta.usage for delta in result.deltas if delta.usage is not None] == [total]
    assert result.deltas[-1].usage == total


def test_concurrent_prompts_max_prompts_run_at_a_time_and_all_are_answered() -> None:
    answers, count = Answers(), 3 * CONCURRENT_PROMPTS_MAX

    result = ask(answers, *[(1, 2)] * count)

    assert answers.concurrent_max == CONCURRENT_PROMPTS_MAX
    assert [tokens_of(result, choice) for choice in range(count)] == [2] * count


def test_a_prompt_that_fails_fails_the_request_and_stops_the_others() -> None:
    answers = Answers()

    with pytest.raises(Failure) as caught:
        ask(answers, (1, 2, 3), (1, 2, 3), (0,), *[(1, 2, 3)] * 9)

    assert caught.value.reason is Reason.STALLED
    assert answers.running_count == 0
    assert len(answers.requests) <= CONCURRENT_PROMPTS_MAX


def test_all_prompts_are_cancelled_when_the_client_disconnects() -> None:
    answers = Answers()
    common = make_request()
    request = replace(common, token_ids=None, parts=(make_request((1,) * 99), make_request((1,) * 99)))

    async def leave() -> None:
        task = asyncio.ensure_future(call_layer(Prompts(answers), request))
        while answers.running_count < 2:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    run_async(leave())

    assert (answers.running_count, answers.cancelled_count) == (0, 2)


@pytest.mark.parametrize("done", [None, 1])
def test_choices_of_a_kept_answer_are_numbered_through_all_its_prompts(done: int | None) -> None:
    """Also if the client has the answers to one prompt complete."""
    seen: dict[tuple[int, ...], int] = {}
    answers = Answers()

    async def below(request: Request, call: Call, sink: Sink) -> Finish:
        assert call.kept is not None
        seen[request.prompt_token_ids] = call.kept.first_index
        return await answers(request, call, sink)

    complete: dict[str, Any] = {"generated_choices": (None, None)}
    parts = tuple(
        make_request((1,) * (number + 1), n=2, **(complete if number == done else {}))
        for number in range(CONCURRENT_PROMPTS_MAX + 2)
    )
    run_async(call_layer(Prompts(below), make_request(token_ids=None, parts=parts, n=2), kept=make_kept()))

    expected = {(1,) * (number + 1): 2 * number for number in range(len(parts)) if number != done}
    assert seen == expected
