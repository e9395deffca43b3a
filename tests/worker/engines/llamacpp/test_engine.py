"""The llama.cpp engine: limits count the whole answer, and its thread ends when its run ends."""

import asyncio
import math
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.model_card import Resume
from services.core.request import FinishReason, Guided, GuidedKind, Request, Sampling
from services.isolation.losses import Loss
from services.models.download import resolve
from services.models.tokenizers.gguf import GgufTokenizer
from services.runtime.loop import run_on_loop
from services.worker.engines.llamacpp import LlamaCppConfig, LlamaCppEngine
from services.worker.engines.llamacpp.model import Llama
from tests.support.clock import WAIT_S
from tests.worker.engines.llamacpp.support import CONTEXT_LENGTH, EOS, PROMPT, YES_OR_NO, Bench, request
from tests.worker.guided.hostile import HOSTILE

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def greedy(bench: Bench, runner: asyncio.Runner) -> list[int]:
    """The first tokens of the greedy answer to PROMPT."""
    tokens, _ = runner.run(bench.answer(request(max_tokens=6)))
    return tokens


def test_card_has_the_values_of_the_file(bench: Bench) -> None:
    card = bench.engine.card

    assert (card.model, card.engine, card.context_length, card.vocab_size) == ("tiny", "llamacpp", 96, 49_152)
    assert (card.bos_token, card.eos_token, card.tokenizer.kind) == ("<|im_start|>", "<|im_end|>", "gguf")
    assert "<|im_start|>" in card.chat_template


def test_card_has_the_capabilities_of_the_engine(bench: Bench) -> None:
    card = bench.engine.card

    assert set(card.guided) == set(GuidedKind)
    assert card.has_logprobs
    assert card.resume == Resume(sampling=True, penalties=True, guided=True, logprobs=True)


def test_finish_length_comes_with_the_last_token_at_max_tokens(bench: Bench, runner: asyncio.Runner) -> None:
    key = bench.submit(request(max_tokens=3))

    runner.run(bench.until(lambda: bench.finish(key) is not None))

    assert [len(output.token_ids) for output in bench.of(key)] == [1, 1, 1]
    assert [output.finish for output in bench.of(key)] == [None, None, FinishReason.LENGTH]


def test_stop_token_ends_the_answer_and_is_not_part_of_it(
    bench: Bench, runner: asyncio.Runner, greedy: list[int]
) -> None:
    third = greedy[2]

    answer = runner.run(bench.answer(request(token_ids=(third,))))

    assert answer == (greedy[: greedy.index(third)], FinishReason.STOP)


def test_stop_tokens_are_not_drawn_before_min_tokens(bench: Bench, runner: asyncio.Runner, greedy: list[int]) -> None:
    tokens, _ = runner.run(bench.answer(request(token_ids=(greedy[0],), min_tokens=2)))

    assert len(tokens) >= 2
    assert greedy[0] not in tokens


def test_end_token_ends_the_answer_unless_ignore_eos_is_set(bench: Bench, runner: asyncio.Runner) -> None:
    ending = Sampling(temperature=0, logit_bias=((EOS, 100.0),))

    ended = runner.run(bench.answer(request(sampling=ending)))
    ignored = runner.run(bench.answer(request(sampling=ending, max_tokens=2, ignore_eos=True)))

    assert ended == ([], FinishReason.STOP)
    assert ignored == ([EOS, EOS], FinishReason.LENGTH)


def test_limits_count_the_whole_continuation(bench: Bench, runner: asyncio.Runner, greedy: list[int]) -> None:
    tokens, finish = runner.run(bench.answer(request(max_tokens=6).after(greedy[:4])))

    assert tokens == greedy[4:6]
    assert finish is FinishReason.LENGTH


def test_request_that_is_at_its_limit_finishes_without_a_token(
    bench: Bench, runner: asyncio.Runner, greedy: list[int]
) -> None:
    answer = runner.run(bench.answer(request(max_tokens=4).after(greedy[:4])))

    assert answer == ([], FinishReason.LENGTH)


def test_full_context_ends_the_answer(bench: Bench, runner: asyncio.Runner) -> None:
    prompt = (PROMPT * 20)[: CONTEXT_LENGTH - 2]

    tokens, finish = runner.run(bench.answer(request(prompt=prompt, max_tokens=9, ignore_eos=True)))

    assert len(tokens) == 2
    assert finish is FinishReason.LENGTH


def test_penalties_count_tokens_generated_before_a_cut(bench: Bench, runner: asyncio.Runner) -> None:
    penalised = Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)
    whole, _ = runner.run(bench.answer(request(sampling=penalised, max_tokens=8, ignore_eos=True)))

    rest, _ = runner.run(bench.answer(request(sampling=penalised, max_tokens=8, ignore_eos=True).after(whole[:4])))

    assert rest == whole[4:]
    assert len(set(whole)) == len(whole)


REFUSED = {
    "an empty prompt": (request(prompt=()), Reason.INVALID_ARGUMENT),
    "a prompt that fills the context": (request(prompt=(PROMPT * 20)[:CONTEXT_LENGTH]), Reason.PROMPT_TOO_LONG),
    "a continuation beyond the context": (request().after(PROMPT * 20), Reason.PROMPT_TOO_LONG),
    "a token outside the vocabulary": (request(prompt=(49_152,)), Reason.INVALID_ARGUMENT),
    "a bias for a token outside the vocabulary": (
        request(sampling=Sampling(temperature=0, logit_bias=((49_152, 1.0),))),
        Reason.INVALID_ARGUMENT,
    ),
    "a stop token outside the vocabulary": (request(token_ids=(49_152,)), Reason.INVALID_ARGUMENT),
}


@pytest.mark.parametrize(("refused", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_request_is_refused(bench: Bench, refused: Request, reason: Reason) -> None:
    with pytest.raises(Failure) as raised:
        bench.submit(refused)

    assert raised.value.reason is reason


def test_guided_answer_is_one_of_its_choices(bench: Bench, runner: asyncio.Runner) -> None:
    tokens, finish = runner.run(bench.answer(request(guided=YES_OR_NO)))

    spelling = GgufTokenizer(bench.engine.tokenizer_content()).token_bytes
    assert b"".join(spelling[token] for token in tokens) in (b"yes", b"no")
    assert finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        (request(guided=Guided(GuidedKind.GRAMMAR, ("root ::= [",))), Reason.INVALID_ARGUMENT),
        (request(guided=YES_OR_NO).after((PROMPT[0],)), Reason.GRAMMAR_REPLAY_MISMATCH),
        (request(guided=YES_OR_NO).after((EOS,)), Reason.GRAMMAR_REPLAY_MISMATCH),
    ],
)
def test_grammar_that_cannot_be_compiled_fails_its_request_and_the_engine_continues(
    bench: Bench, runner: asyncio.Runner, failing: Request, reason: Reason
) -> None:
    failure = runner.run(bench.failure(failing))

    assert failure.reason is reason
    tokens, _ = runner.run(bench.answer(request()))
    assert len(tokens) == 4


def test_helper_that_a_form_costs_is_counted(bench: Bench, runner: asyncio.Runner) -> None:
    before = bench.engine.load().helpers_lost.get(Loss.CPU, 0)

    failure = runner.run(bench.failure(request(guided=HOSTILE["a multiple of a large number"])))

    assert failure.detail.startswith("guided.json_schema cannot be used: ")
    assert bench.engine.load().helpers_lost[Loss.CPU] == before + 1


def test_more_requests_than_sequences_are_refused(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        keys = [bench.submit(request(max_tokens=80)) for _ in range(bench.engine.request_limit)]
        try:
            with pytest.raises(Failure) as raised:
                bench.submit(request())
            assert raised.value.reason is Reason.WORKER_AT_CAPACITY
        finally:
            for key in keys:
                bench.engine.cancel(key)

    runner.run(scenario())


def test_long_prompt_does_not_block_other_requests(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> int:
        talking = bench.submit(request(max_tokens=80, ignore_eos=True))
        await bench.until(lambda: bool(bench.of(talking)))
        start = len(bench.of(talking))
        long = bench.submit(request(prompt=(PROMPT * 20)[:80], max_tokens=1))
        await bench.until(lambda: bool(bench.of(long)))
        bench.engine.cancel(talking)
        return len(bench.of(talking)) - start

    assert runner.run(scenario()) >= 80 // 17  # A step computes a chunk of 16 tokens, and one token of each sequence.


def test_file_that_is_not_a_model_ends_the_run_with_engine_dead(tmp_path: Path) -> None:
    file = tmp_path / "readme.gguf"
    file.write_text("not a model")
    engine = LlamaCppEngine(LlamaCppConfig(path=file, served_model_name="none"))

    with pytest.raises(Failure, match="not a GGUF file") as raised:
        run_on_loop(engine.run(lambda _: None, asyncio.Event()))

    assert raised.value.reason is Reason.ENGINE_DEAD


def test_event_loop_keeps_running_while_the_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    has_turned = threading.Event()
    close = Llama.close

    def close_late(llama: Llama) -> None:
        assert has_turned.wait(WAIT_S), "the loop was blocked meanwhile"
        close(llama)

    async def scenario() -> None:
        engine = LlamaCppEngine(LlamaCppConfig(path=resolve("smollm2"), served_model_name="tiny", context_length=64))
        ready = asyncio.Event()
        run = asyncio.create_task(engine.run(lambda _: None, ready))
        async with asyncio.timeout(WAIT_S):
            await ready.wait()
            run.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
                assert not run.done()
            has_turned.set()
            with suppress(asyncio.CancelledError):
                await run

    monkeypatch.setattr(Llama, "close", close_late)
    run_on_loop(scenario())


@pytest.mark.parametrize("missing", ["cyllama", "llguidance"])
def test_error_without_llama_cpp_says_how_to_install_it(missing: str) -> None:
    blocked = f"import sys; sys.modules['{missing}'] = None; import services.worker.engines.llamacpp"

    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert "StartupError" in done.stderr
    assert "pip install 'unbroken[llamacpp]'" in done.stderr


# Numbers at the ends of their ranges

LEAST, GREATEST = 5e-324, 1.7976931348623157e308
SAMPLED = Sampling(temperature=1.0, seed=3)
WHOLE, CUT = 6, 3
DRAWN: dict[Sampling, list[int]] = {}


def drawn(bench: Bench, runner: asyncio.Runner, sampling: Sampling) -> list[int]:
    """The tokens of an answer, which must be the same after a move at CUT, with finite log probabilities."""
    if sampling not in DRAWN:
        DRAWN[sampling] = drawn_now(bench, runner, sampling)
    return DRAWN[sampling]


def drawn_now(bench: Bench, runner: asyncio.Runner, sampling: Sampling) -> list[int]:
    whole = replace(request(max_tokens=WHOLE, sampling=sampling, ignore_eos=True), logprobs=20)
    key = bench.submit(whole)
    runner.run(bench.until(lambda: bench.finish(key) is not None))
    tokens = bench.tokens(key)
    values = [value for one in bench.of(key) for entry in one.logprobs or () for _, value in entry.top]

    assert len(tokens) == WHOLE
    assert len(values) == 20 * WHOLE
    assert all(math.isfinite(value) for value in values)
    assert runner.run(bench.answer(whole.after(tokens[:CUT]))) == (tokens[CUT:], FinishReason.LENGTH)
    return tokens


@pytest.mark.parametrize(
    "end",
    [
        *({"temperature": value} for value in (1e-5, 1e-38, 1e-45, LEAST)),
        *({"top_p": value} for value in (0.0, LEAST, 1e-7)),
        {"min_p": 1.0},
        {"top_k": 1},
    ],
)
def test_setting_whose_limit_is_the_likeliest_token_gives_the_greedy_answer(
    bench: Bench, runner: asyncio.Runner, end: dict[str, float]
) -> None:
    """A bug: scores divided by a temperature of 1e-38 were infinite, and the drawn tokens arbitrary."""
    assert drawn(bench, runner, replace(SAMPLED, **end)) == drawn(bench, runner, Sampling(temperature=0))


@pytest.mark.parametrize(
    "end",
    [
        {"top_p": 1 - 1e-9},
        {"min_p": LEAST},
        {"top_k": 2**31},
        {"top_k": 2**32 - 1},
        {"presence_penalty": LEAST, "frequency_penalty": -LEAST},
        {"repetition_penalty": 1 + 1e-12},
    ],
)
def test_setting_whose_limit_is_no_effect_changes_nothing(
    bench: Bench, runner: asyncio.Runner, end: dict[str, float]
) -> None:
    """A bug: a `top_k` of 2^31 or more ended the request with ENGINE_ERROR."""
    assert drawn(bench, runner, replace(SAMPLED, **end)) == drawn(bench, runner, SAMPLED)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 2.0])
@pytest.mark.parametrize("penalty", [LEAST, 1e-38])
def test_smallest_repetition_penalties_repeat_the_likeliest_repeated_token(
    bench: Bench, runner: asyncio.Runner, penalty: float, temperature: float
) -> None:
    """A bug: scores divided by 1e-38 were infinite, and the drawn tokens arbitrary."""
    sampling = replace(SAMPLED, temperature=temperature, repetition_penalty=penalty)

    tokens = drawn(bench, runner, sampling)

    assert set(tokens) == {tokens[0]}
    assert tokens == drawn(bench, runner, replace(sampling, repetition_penalty=1e-20))


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 2.0])
@pytest.mark.parametrize("penalty", [1e38, GREATEST])
def test_largest_repetition_penalties_never_repeat_a_token(
    bench: Bench, runner: asyncio.Runner, penalty: float, temperature: float
) -> None:
    sampling = replace(SAMPLED, temperature=temperature, repetition_penalty=penalty)

    tokens = drawn(bench, runner, sampling)

    assert len(set(tokens)) == len(tokens)
    assert tokens == drawn(bench, runner, replace(sampling, repetition_penalty=1e20))


@pytest.mark.parametrize("penalties", [(2.0, 2.0), (-2.0, -2.0)])
def test_all_numbers_at_their_ends_together_give_tokens(
    bench: Bench, runner: asyncio.Runner, penalties: tuple[float, float]
) -> None:
    presence, frequency = penalties
    for temperature in (LEAST, 2.0):
        for repetition in (LEAST, GREATEST):
            drawn(
                bench,
                runner,
                Sampling(
                    temperature=temperature,
                    seed=2**64 - 1,
                    top_p=1 - 1e-9,
                    top_k=2**32 - 1,
                    min_p=LEAST,
                    presence_penalty=presence,
                    frequency_penalty=frequency,
                    repetition_penalty=repetition,
                    logit_bias=tuple((token, (-1) ** token * 100.0) for token in range(1024)),
                ),
            )


def test_bias_of_100_forces_a_token_and_of_minus_100_bans_it(bench: Bench, runner: asyncio.Runner) -> None:
    likely = drawn(bench, runner, Sampling(temperature=0))[0]

    banned = drawn(bench, runner, Sampling(temperature=0, logit_bias=((likely, -100.0),)))
    forced = drawn(bench, runner, replace(SAMPLED, logit_bias=((7, 100.0),)))

    assert likely not in banned
    assert forced == [7] * WHOLE


@pytest.mark.parametrize("seeds", [(0, 2**32), (2**32 - 1, 2**64 - 1)])
def test_seeds_that_differ_in_any_bit_give_different_answers(
    bench: Bench, runner: asyncio.Runner, seeds: tuple[int, int]
) -> None:
    first, second = (drawn(bench, runner, Sampling(temperature=2.0, seed=seed)) for seed in seeds)

    assert first != second


def test_min_tokens_equal_to_max_tokens_gives_exactly_as_many(bench: Bench, runner: asyncio.Runner) -> None:
    ends = tuple(range(256))

    tokens, finish = runner.run(bench.answer(request(max_tokens=6, min_tokens=6, token_ids=ends)))

    assert (len(tokens), finish) == (6, FinishReason.LENGTH)
    assert set(tokens).isdisjoint(ends)
