"""The fake's sampling: the parameters that have an effect in 1.2.1, and those that do not."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.support import END_ID, PROMPT, answer, engine, greedy, is_silent, start
from tests.fakes.tensorrt_llm import SamplingParams
from tests.fakes.tensorrt_llm.executor.utils import CppExecutorError
from tests.fakes.tensorrt_llm.llmapi import GuidedDecodingParams, RequestError
from tests.fakes.torch import tensor
from tests.integration.harness.waiting import until
from tests.support.doubles import run_async


def drawn(**fields: Any) -> SamplingParams:
    """Parameters that sample from all tokens at a temperature of 1."""
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "end_id": END_ID, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(given | fields))


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0}, {"temperature": 0.0}], ids=str
)
def test_defaults_and_parameters_that_leave_one_token_are_greedy(fields: dict[str, Any]) -> None:
    async def play(llm: Any) -> None:
        params = SamplingParams(**fields, end_id=END_ID, ignore_eos=True, max_tokens=20)
        result = await start(llm, params=params)

        assert result.outputs[0].token_ids == await answer(llm, max_tokens=20)

    with engine() as llm:
        run_async(play(llm))


def test_seed_has_no_effect() -> None:
    async def play(llm: Any) -> None:
        first = await start(llm, params=drawn(seed=7, max_tokens=20))
        second = await start(llm, params=drawn(seed=7, max_tokens=20))

        assert first.outputs[0].token_ids != second.outputs[0].token_ids

    with engine() as llm:
        run_async(play(llm))


def test_penalties_and_min_p_have_no_effect() -> None:
    async def play(llm: Any) -> None:
        penalties: dict[str, Any] = {
            "presence_penalty": 2.0,
            "frequency_penalty": 2.0,
            "repetition_penalty": 2.0,
            "min_p": 0.9,
        }

        assert await answer(llm, max_tokens=100, **penalties) == await answer(llm, max_tokens=100)

    with engine() as llm:
        run_async(play(llm))


def test_top_k_and_top_p_keep_the_likeliest_tokens() -> None:
    async def play(llm: Any) -> None:
        seen: dict[str, Counter[int]] = {"k": Counter(), "p": Counter(), "all": Counter()}
        for name, fields in (("k", {"top_k": 2}), ("p", {"top_p": 0.3}), ("all", {})):
            for _ in range(40):
                result = await start(llm, params=drawn(max_tokens=1, **fields))
                seen[name].update(result.outputs[0].token_ids)

        assert len(seen["k"]) == 2
        assert len(seen["p"]) == 1
        assert len(seen["all"]) > 2

    with engine(max_batch_size=2) as llm:
        run_async(play(llm))


def test_logprobs_include_the_likeliest_tokens_and_the_drawn_one() -> None:
    async def play(llm: Any) -> None:
        output = (await start(llm, params=drawn(logprobs=2, max_tokens=40))).outputs[0]

        assert {len(one) for one in output.logprobs} == {2, 3}
        assert all([entry.rank for entry in one.values()][:2] == [1, 2] for one in output.logprobs)
        assert all(token in one for token, one in zip(output.token_ids, output.logprobs, strict=True))

    with engine() as llm:
        run_async(play(llm))


def test_unlikely_drawn_token_may_be_missing_from_the_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TLLM_FAKE_DRAWN_IN_LOGPROBS", "0")

    async def play(llm: Any) -> None:
        output = (await start(llm, params=drawn(logprobs=2, max_tokens=40))).outputs[0]
        absent = [token not in one for token, one in zip(output.token_ids, output.logprobs, strict=True)]

        assert {len(one) for one in output.logprobs} == {2}
        assert any(absent)
        assert not all(absent)

    with engine() as llm:
        run_async(play(llm))


def test_probabilities_add_up_to_less_than_one() -> None:
    async def play(llm: Any) -> None:
        first, second = (await start(llm, logprobs=2, max_tokens=1)).outputs[0].logprobs[0].values()

        assert second.logprob < first.logprob < 0

    with engine() as llm:
        run_async(play(llm))


@pytest.mark.parametrize("count", [0, None])
def test_zero_logprobs_means_none(count: int | None) -> None:
    async def play(llm: Any) -> None:
        assert (await start(llm, logprobs=count, max_tokens=3)).outputs[0].logprobs == []

    with engine() as llm:
        run_async(play(llm))


def test_logprobs_of_a_removed_stop_token_are_kept() -> None:
    async def play(llm: Any) -> None:
        whole = await answer(llm, max_tokens=5)
        output = (await start(llm, stop_token_ids=[whole[3]], logprobs=1, max_tokens=5)).outputs[0]

        assert len(output.logprobs) == len(output.token_ids) + 1

    with engine() as llm:
        run_async(play(llm))


def test_stop_token_at_the_limit_is_an_ordinary_token() -> None:
    async def play(llm: Any) -> None:
        whole = await answer(llm, max_tokens=4)
        output = (await start(llm, stop_token_ids=[whole[3]], max_tokens=4)).outputs[0]

        assert whole[3] not in whole[:3]
        assert output.finish_reason == "length"
        assert output.token_ids == whole

    with engine() as llm:
        run_async(play(llm))


def test_min_tokens_suppresses_the_end_token_but_not_stop_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_END_ODDS", "3")

    async def play(llm: Any) -> None:
        ended = await answer(llm, max_tokens=100, ignore_eos=False, min_tokens=40)
        stopped = await answer(llm, max_tokens=100, min_tokens=40, stop_token_ids=ended[:1])

        assert 40 < len(ended) < 100
        assert stopped == []

    with engine() as llm:
        run_async(play(llm))


def test_bias_bans_and_forces_tokens() -> None:
    async def play(llm: Any) -> None:
        first = (await answer(llm, max_tokens=1))[0]
        banned = tensor([-100.0 if token == first else 0.0 for token in range(END_ID + 1)])
        forced = tensor([100.0 if token == 65 else 0.0 for token in range(END_ID + 1)])

        assert await answer(llm, max_tokens=1, embedding_bias=banned) != [first]
        assert await answer(llm, max_tokens=5, embedding_bias=forced) == [65] * 5

    with engine() as llm:
        run_async(play(llm))


def test_max_tokens_defaults_to_32_and_is_clamped_to_the_context() -> None:
    async def play(llm: Any) -> None:
        room = 100 - len(PROMPT)

        assert len(await answer(llm)) == 32
        assert len(await answer(llm, max_tokens=1000)) == room
        assert len(await answer(llm, max_tokens=None)) == room

    with engine(max_seq_len=100) as llm:
        run_async(play(llm))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "Greedy"),
        ({"n": 2, "temperature": 1.0}, "Greedy"),
        ({"n": 2, "best_of": 1, "top_p": 0.9}, "best_of"),
        ({"guided_decoding": GuidedDecodingParams(regex="a", json_object=True)}, "Only one"),
    ],
)
def test_contradictory_params_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_params_accept_no_unknown_or_positional_arguments() -> None:
    params: Any = SamplingParams()

    with pytest.raises(TypeError):
        SamplingParams(32)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        replace(params, random_seed=1)
    with pytest.raises(AttributeError):
        params.random_seed = 1


@pytest.mark.parametrize("fields", [{"temperature": -1.0}, {"top_p": 1.5}, {"top_k": -1}, {"max_tokens": -1}], ids=str)
def test_value_that_the_engine_rejects_fails_the_request(fields: dict[str, Any]) -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(RequestError):
            await start(llm, params=drawn(**fields))

    with engine() as llm:
        run_async(play(llm))


@pytest.mark.parametrize(
    ("guide", "fits"),
    [
        (GuidedDecodingParams(regex="(yes|no)"), r"yes|no"),
        (
            GuidedDecodingParams(json={"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}),
            r"\[\s*\d",
        ),
        (GuidedDecodingParams(grammar='root ::= "x" "y"'), "xy"),
    ],
    ids=["regex", "json", "grammar"],
)
def test_guided_answer_matches_its_grammar(guide: GuidedDecodingParams, fits: str) -> None:
    async def play(llm: Any) -> str:
        params = SamplingParams(top_k=1, guided_decoding=guide, max_tokens=60)
        result = await start(llm, params=params)
        assert result.outputs[0].finish_reason == "stop"
        return result.outputs[0].text

    with engine(guided_decoding_backend="xgrammar") as llm:
        text = run_async(play(llm))

    assert re.match(fits, text)


def test_invalid_grammar_fails_the_request() -> None:
    async def play(llm: Any) -> None:
        for guide in (GuidedDecodingParams(json="{"), GuidedDecodingParams(regex="(")):
            with pytest.raises(RequestError):
                await start(llm, params=greedy(guided_decoding=guide))
        assert await answer(llm, max_tokens=1)

    with engine(guided_decoding_backend="xgrammar") as llm:
        run_async(play(llm))


def is_dead(llm: Any) -> bool:
    """Whether the engine takes no further requests."""
    try:
        start(llm)
    except CppExecutorError:
        return True
    return False


def test_grammar_that_allows_no_token_kills_the_engine() -> None:
    """Here, the grammar is complete and its end token is ignored."""

    async def play(llm: Any) -> None:
        guide = GuidedDecodingParams(regex="ab")
        result = start(llm, params=greedy(guided_decoding=guide))
        lengths = [len((await anext(result)).outputs[0].token_ids) for _ in range(3)]

        assert lengths == [1, 2, 3]
        await until(lambda: is_dead(llm))
        assert await is_silent(result)

    with engine(guided_decoding_backend="xgrammar") as llm:
        run_async(play(llm))


def test_bias_of_another_length_fails_the_request() -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(RequestError, match="embedding_bias"):
            await start(llm, embedding_bias=tensor([1.0]))

    with engine() as llm:
        run_async(play(llm))


def test_guided_decoding_needs_a_backend() -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(RequestError, match="not enabled"):
            await start(llm, params=greedy(guided_decoding=GuidedDecodingParams(regex="a")))

    with engine() as llm:
        run_async(play(llm))
