"""Choices: the answers to one request run side by side and are billed as one."""

import asyncio
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, Sink, Usage
from services.core.request import FinishReason, Request
from services.frontend.layers.choices import Choices
from tests.support.doubles import Collected, Script, call_layer, make_kept, make_request, run_async


class Answers:
    """The layer below. `lengths`: how many tokens each choice has, or the reason it fails with."""

    def __init__(self, *lengths: int | Reason) -> None:
        self._lengths = lengths
        self.requests: list[Request] = []
        self.cancelled: list[int] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.requests.append(request)
        length = self._lengths[request.choice]
        try:
            for position in range(length if isinstance(length, int) else 1):
                sink.deliver(Delta(position, [7], "x", request.choice))
                await asyncio.sleep(0)
            if isinstance(length, Reason):
                raise Failure(length, "as scripted")
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request.choice)
            raise
        usage = Usage(5, length)
        sink.deliver(Delta(length, (), "", request.choice, finish_reason=FinishReason.STOP, usage=usage))
        return Finish(FinishReason.STOP, usage)


def ask(answers: Answers, **request: Any) -> Collected:
    return run_async(call_layer(Choices(answers), make_request(**request)))


def test_a_request_for_one_answer_passes_through_unchanged() -> None:
    answers = Answers(2)

    result = ask(answers)

    assert answers.requests[0].choice == 0
    assert result.finish == Finish(FinishReason.STOP, Usage(5, 2))


def test_each_choice_is_a_request_of_its_own() -> None:
    answers = Answers(1, 3, 2)

    result = ask(answers, n=3)

    assert [(request.n, request.choice) for request in answers.requests] == [(1, 0), (1, 1), (1, 2)]
    assert [sum(len(d.token_ids) for d in result.deltas if d.choice == choice) for choice in range(3)] == [1, 3, 2]


def test_the_tokens_of_the_choices_alternate() -> None:
    result = ask(Answers(2, 2), n=2)

    assert [delta.choice for delta in result.deltas if delta.token_ids] == [0, 1, 0, 1]


def test_the_prompt_is_counted_once_and_the_last_choice_to_end_carries_the_usage() -> None:
    result = ask(Answers(1, 3), n=2)

    assert result.finish is not None
    assert result.finish.usage == Usage(5, 4)
    assert [delta.usage for delta in result.deltas if delta.finish_reason] == [None, Usage(5, 4)]


def test_a_choice_that_fails_fails_the_request_and_cancels_the_others() -> None:
    answers = Answers(9, Reason.STALLED)

    with pytest.raises(Failure) as caught:
        ask(answers, n=2)

    assert caught.value.reason is Reason.STALLED
    assert answers.cancelled == [0]


def test_the_places_of_choices_that_never_claim_them_are_given_back() -> None:
    given_back: list[int] = []

    class Claims(Answers):
        async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
            assert call.choice_group is not None
            if request.choice == 0:
                call.choice_group.claim(0, lambda count: (range(10, 10 + count), given_back.append))
            return await super().__call__(request, call, sink)

    with pytest.raises(Failure):
        ask(Claims(Reason.STALLED, 1, 1), n=3)

    assert given_back == [11, 12]


def test_all_choices_are_cancelled_in_the_same_turn_of_the_loop() -> None:
    """So their cancels travel in one message, and no choice gets the slot of another for a moment."""
    hanging: list[int] = []
    cancelled_in: list[int] = []

    async def scenario() -> None:
        turn = 0

        async def hang(request: Request, call: Call, sink: Sink) -> Finish:
            hanging.append(request.choice)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled_in.append(turn)
                raise
            raise AssertionError

        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(Choices(hang), make_request(n=3)))
            while len(hanging) < 3:
                await asyncio.sleep(0)
            asking.cancel()
            while not asking.done():
                turn += 1
                await asyncio.sleep(0)

    run_async(scenario())
    assert cancelled_in == [cancelled_in[0]] * 3


# Choices that the client has in part


GENERATED = ((7, 8), None, ())


def test_choices_continue_after_their_own_tokens_and_start_without_a_group() -> None:
    answers, calls = Answers(3, 3, 3), []

    async def noting(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        return await answers(request, call, sink)

    result = run_async(call_layer(Choices(noting), make_request(n=3, generated_choices=GENERATED)))

    assert [(one.choice, one.generated_token_ids, one.n) for one in answers.requests] == [(0, (7, 8), 1), (2, (), 1)]
    assert all(not one.generated_choices for one in answers.requests)
    assert [call.choice_group for call in calls] == [None, None]
    assert {delta.choice for delta in result.deltas} == {0, 2}


def test_a_choice_that_is_complete_is_not_in_the_usage() -> None:
    result = run_async(call_layer(Choices(Answers(3, 30, 4)), make_request(n=3, generated_choices=GENERATED)))

    assert result.finish == Finish(FinishReason.STOP, Usage(5, 7))
    assert [delta.usage for delta in result.deltas if delta.usage is not None] == [Usage(5, 7)]


def test_choices_that_continue_after_the_same_tokens_start_together() -> None:
    calls = []

    async def noting(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        return await Answers(3, 3)(request, call, sink)

    request = make_request(n=2).continued(((7,), (7,)))
    run_async(call_layer(Choices(noting), request))

    assert request.generated_token_ids == (7,)
    assert calls[0].choice_group is calls[1].choice_group is not None


@pytest.mark.parametrize("is_resumed", [False, True])
def test_choices_of_a_resumed_answer_start_alone_as_each_may_be_on_another_worker(is_resumed: bool) -> None:
    script, kept = Script([7], [7]), make_kept()
    kept.generation.is_resumed = is_resumed

    with pytest.raises(AssertionError, match="Detokenize"):  # It would count the tokens.
        run_async(call_layer(Choices(script), make_request(n=2), kept=kept))

    assert [call.choice_group is not None for call in script.calls] == [not is_resumed] * 2
    assert all(call.kept is not None and call.kept.generation is kept.generation for call in script.calls)
