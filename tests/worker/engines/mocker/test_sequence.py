"""The mocker's tokens: any error in a stream changes them, and a continuation from any cut is exact."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.request import FinishReason, Request, Sampling
from services.models.tokenizers.byte_level import EOS
from services.worker.engines.mocker import MockerConfig, MockerEngine
from tests.worker.engines.support import GREEDY, PROMPT, SEEDED, RunningEngine, new_request, run


def answer(request: Request, **config: Any) -> tuple[list[int], FinishReason | None]:
    """The tokens of the whole answer, and its finish reason."""

    async def scenario(running: RunningEngine) -> tuple[list[int], FinishReason | None]:
        await running.until(lambda: running.end(1))
        end = running.end(1)
        assert end is not None
        return running.token_ids(1), end.finish

    result: tuple[list[int], FinishReason | None] = run(scenario, request, **config)
    return result


def tokens(request: Request) -> list[int]:
    return answer(request)[0]


# What the tokens depend on


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_continuation_from_any_cut_equals_the_uncut_answer(sampling: Sampling) -> None:
    whole = new_request(sampling)
    uncut = tokens(whole)

    assert len(uncut) == 64
    assert any(token >= 0x80 for token in uncut), "some cuts should fall within a character"
    for cut in range(64):
        assert tokens(whole.after(uncut[:cut])) == uncut[cut:], f"cut at {cut}"


@pytest.mark.parametrize("place", [0, 9, len(PROMPT) - 1])
def test_every_token_depends_on_every_token_of_the_prompt(place: int) -> None:
    other = replace(new_request(), token_ids=(*PROMPT[:place], PROMPT[place] ^ 1, *PROMPT[place + 1 :]))

    assert tokens(other)[:16] != tokens(new_request())[:16]


def test_every_token_depends_on_all_generated_tokens_and_their_order() -> None:
    uncut = tokens(new_request())
    begun = uncut[:20]
    missing, doubled, swapped = begun[:-1], [*begun, begun[-1]], [*begun[:-2], begun[-1], begun[-2]]
    assert begun[-1] != begun[-2], "swapping equal tokens would change nothing"

    for wrong in (missing, doubled, swapped):
        assert tokens(new_request().after(wrong))[: 64 - 21] != uncut[20:-1]


def test_greedy_answers_depend_on_neither_seed_nor_choice() -> None:
    assert tokens(new_request(replace(GREEDY, seed=2), choice=1)) == tokens(new_request(GREEDY))


@pytest.mark.parametrize("other", [{"seed": 2}, {"temperature": 0.9}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_sampled_answers_depend_on_the_sampling_parameters(other: dict[str, float]) -> None:
    assert tokens(new_request(replace(SEEDED, **other))) != tokens(new_request(SEEDED))


def test_sampled_answers_depend_on_the_choice() -> None:
    assert tokens(new_request(SEEDED, choice=1)) != tokens(new_request(SEEDED))


def test_answers_do_not_depend_on_other_requests() -> None:
    async def scenario(running: RunningEngine) -> list[int]:
        await running.until(lambda: running.end(2))
        return running.token_ids(2)

    together = run(scenario, new_request(SEEDED), new_request(), new_request(max_tokens=10))

    assert together == tokens(new_request())


def test_answers_are_text_in_many_scripts() -> None:
    written = bytes(tokens(new_request(max_tokens=2000))).decode(errors="ignore")

    assert {len(character.encode()) for character in written} == {1, 2, 3, 4}


# How an answer ends


def test_end_token_ends_the_answer_and_is_not_part_of_it() -> None:
    ended = [answer(new_request(replace(SEEDED, seed=seed), max_tokens=200, ignore_eos=False)) for seed in range(20)]
    stopped = [token_ids for token_ids, finish in ended if finish is FinishReason.STOP]

    assert stopped
    assert all(len(token_ids) < 200 and EOS not in token_ids for token_ids in stopped)


def stopping() -> tuple[Request, list[int]]:
    """A request whose answer ends early at the end token, and the tokens of that answer."""
    for seed in range(100):
        request = new_request(replace(SEEDED, seed=seed), max_tokens=200, ignore_eos=False)
        token_ids, finish = answer(request)
        if finish is FinishReason.STOP and len(token_ids) > 20:
            return request, token_ids
    raise AssertionError("no answer ended by itself")


def test_ignore_eos_continues_after_the_end_token() -> None:
    request, stopped = stopping()
    token_ids, finish = answer(replace(request, stop=replace(request.stop, ignore_eos=True)))

    assert (len(token_ids), finish) == (200, FinishReason.LENGTH)
    assert token_ids[: len(stopped)] == stopped


def test_min_tokens_suppresses_the_end_token() -> None:
    request, stopped = stopping()
    token_ids, _ = answer(replace(request, stop=replace(request.stop, min_tokens=len(stopped) + 1)))

    assert len(token_ids) > len(stopped)
    assert token_ids[: len(stopped)] == stopped


def test_min_tokens_counts_the_generated_tokens_of_a_continued_request() -> None:
    request, stopped = stopping()
    request = replace(request, stop=replace(request.stop, min_tokens=len(stopped)))

    assert answer(request.after(stopped[:10])) == (stopped[10:], FinishReason.STOP)


def test_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    uncut = tokens(new_request())
    stop = uncut[30]
    before = uncut[: uncut.index(stop)]

    assert answer(new_request(token_ids=PROMPT, stop=replace(new_request().stop, token_ids=(stop,)))) == (
        before,
        FinishReason.STOP,
    )


def test_min_tokens_suppresses_stop_tokens() -> None:
    uncut = tokens(new_request())
    stop = replace(new_request().stop, token_ids=(uncut[5],), min_tokens=64)
    token_ids, finish = answer(new_request(stop=stop))

    assert (len(token_ids), finish) == (64, FinishReason.LENGTH)
    assert uncut[5] not in token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 64])
def test_max_tokens_counts_the_whole_continuation(max_tokens: int) -> None:
    uncut = tokens(new_request())

    assert answer(new_request(max_tokens=max_tokens)) == (uncut[:max_tokens], FinishReason.LENGTH)
    assert (
        answer(new_request(max_tokens=max_tokens).after(uncut[: max_tokens - 1]))[0]
        == uncut[max_tokens - 1 : max_tokens]
    )


def test_request_that_is_at_its_limit_finishes_without_a_token() -> None:
    assert answer(new_request(max_tokens=3).after([97, 98, 99])) == ([], FinishReason.LENGTH)


def test_full_context_ends_the_answer() -> None:
    token_ids, finish = answer(new_request(), context_length=len(PROMPT) + 5)

    assert (len(token_ids), finish) == (5, FinishReason.LENGTH)


# Log probabilities


def test_log_probabilities_continue_exactly_as_the_card_promises() -> None:
    async def scenario(running: RunningEngine) -> list[Any]:
        await running.until(lambda: running.end(1))
        return [one for step in running.steps for output in step for one in output.logprobs or ()]

    whole = new_request(SEEDED, logprobs=3)
    uncut = run(scenario, whole)

    assert MockerEngine(MockerConfig()).card.resume.logprobs
    assert run(scenario, whole.after(tokens(whole)[:30])) == uncut[30:]


# Numbers at the ends of their ranges


@pytest.mark.parametrize(
    "end",
    [{"temperature": 5e-324}, {"temperature": 1e-38}, {"top_p": 1e-38}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}],
)
def test_setting_whose_limit_is_the_likeliest_token_gives_the_greedy_answer(end: dict[str, float]) -> None:
    assert tokens(new_request(replace(SEEDED, **end), choice=1)) == tokens(new_request(GREEDY))


@pytest.mark.parametrize(
    "end",
    [{"top_k": 2**32 - 1}, {"repetition_penalty": 1.7976931348623157e308}, {"seed": 2**64 - 1}, {"temperature": 2.0}],
)
def test_greatest_numbers_give_an_answer_that_continues_from_any_cut(end: dict[str, float]) -> None:
    whole = new_request(replace(SEEDED, **end))
    uncut = tokens(whole)

    assert tokens(whole.after(uncut[:9])) == uncut[9:]


@pytest.mark.parametrize("seeds", [(0, 2**32), (2**32 - 1, 2**64 - 1)])
def test_seeds_that_differ_in_any_bit_give_different_answers(seeds: tuple[int, int]) -> None:
    first, second = (tokens(new_request(replace(SEEDED, seed=seed))) for seed in seeds)

    assert first != second


def test_answer_whose_every_token_is_a_stop_token_is_empty() -> None:
    every = replace(new_request().stop, token_ids=tuple(range(256)))

    assert answer(new_request(stop=every)) == ([], FinishReason.STOP)


def test_min_tokens_is_reached_if_a_single_token_is_no_stop_token() -> None:
    """A bug: the answer ended early if no token that fits the text was left."""
    others = tuple(token for token in range(256) if token != 7)
    stop = replace(new_request().stop, token_ids=others, min_tokens=5)

    assert answer(new_request(stop=stop)) == ([7] * 5, FinishReason.STOP)


def test_min_tokens_without_any_token_to_draw_is_refused() -> None:
    every = replace(new_request().stop, token_ids=tuple(range(256)), min_tokens=5)

    with pytest.raises(Failure) as caught:
        MockerEngine(MockerConfig()).submit(1, new_request(stop=every))

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "min_tokens")
