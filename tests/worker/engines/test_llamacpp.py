"""The llama.cpp engine: limits over the whole answer, cancels between steps, a thread that ends with its run."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.card import Resume
from services.errors import Failure, Reason
from services.models import resolve
from services.request import FinishReason, Guided, GuidedKind, Request, Sampling, Stop
from services.tokenizers.gguf import GgufTokenizer
from services.worker.engine import Output
from services.worker.engines.llamacpp import LlamaCppConfig, LlamaCppEngine

pytestmark = pytest.mark.model

TIMEOUT_S = 60
PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
EOS = 2
CONTEXT_LENGTH = 96


class Bench:
    """One engine on one event loop for all tests: loading is most of the time. Keeps what was emitted, by key."""

    def __init__(self) -> None:
        config = LlamaCppConfig(
            path=resolve("smollm2"), served_model_name="tiny", sequences=3, context_length=CONTEXT_LENGTH
        )
        self.engine = LlamaCppEngine(config)
        self.outputs: list[Output] = []
        self._key = 0
        self._changed = asyncio.Event()

    def emit(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs
        self._changed.set()

    def submit(self, request: Request) -> int:
        self._key += 1
        self.engine.submit(self._key, request)
        return self._key

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def of(self, key: int) -> list[Output]:
        return [output for output in self.outputs if output.key == key]

    def tokens(self, key: int) -> list[int]:
        return [token for output in self.of(key) for token in output.token_ids]

    def finish(self, key: int) -> FinishReason | None:
        outputs = self.of(key)
        return outputs[-1].finish if outputs else None

    async def failure(self, request: Request) -> Failure:
        """Run one request to its failure."""
        key = self.submit(request)
        await self.until(lambda: any(output.failure for output in self.of(key)))
        failure = self.of(key)[-1].failure
        assert failure is not None
        return failure

    async def answer(self, request: Request) -> tuple[list[int], FinishReason | None]:
        """Run one request to its end: its tokens, and why it ended."""
        key = self.submit(request)
        await self.until(lambda: self.finish(key) is not None)
        return self.tokens(key), self.finish(key)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def bench(runner: asyncio.Runner) -> Iterator[Bench]:
    async def start() -> tuple[Bench, asyncio.Task[None]]:
        bench, ready = Bench(), asyncio.Event()
        task = asyncio.create_task(bench.engine.run(bench.emit, ready))
        async with asyncio.timeout(TIMEOUT_S):
            await ready.wait()
        return bench, task

    async def end(task: asyncio.Task[None]) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    bench, task = runner.run(start())
    yield bench
    runner.run(end(task))
    assert all(thread.name != "llamacpp" for thread in threading.enumerate())


def request(
    *,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 4,
    sampling: Sampling | None = None,
    guided: Guided | None = None,
    **stop: Any,
) -> Request:
    return Request(
        model="tiny",
        token_ids=tuple(prompt),
        guided=guided,
        sampling=sampling or Sampling(temperature=0),
        stop=Stop(max_tokens=max_tokens, **stop),
    )


@pytest.fixture(scope="module")
def greedy(bench: Bench, runner: asyncio.Runner) -> list[int]:
    """The first tokens of the greedy answer to PROMPT."""
    tokens, _ = runner.run(bench.answer(request(max_tokens=6)))
    return tokens


def test_the_card_says_what_the_file_says(bench: Bench) -> None:
    card = bench.engine.card

    assert (card.model, card.engine, card.context_length, card.vocab_size) == ("tiny", "llamacpp", 96, 49_152)
    assert (card.bos_token, card.eos_token, card.tokenizer.kind) == ("<|im_start|>", "<|im_end|>", "gguf")
    assert "<|im_start|>" in card.chat_template


def test_the_card_says_what_the_engine_can_do(bench: Bench) -> None:
    card = bench.engine.card

    assert set(card.guided) == set(GuidedKind)
    assert card.has_logprobs
    assert card.resume == Resume(sampling=True, penalties=True, guided=True, logprobs=True)


def test_an_answer_ends_with_its_last_token_at_max_tokens(bench: Bench, runner: asyncio.Runner) -> None:
    key = bench.submit(request(max_tokens=3))

    runner.run(bench.until(lambda: bench.finish(key) is not None))

    assert [len(output.token_ids) for output in bench.of(key)] == [1, 1, 1]
    assert [output.finish for output in bench.of(key)] == [None, None, FinishReason.LENGTH]


def test_a_stop_token_ends_the_answer_before_itself(bench: Bench, runner: asyncio.Runner, greedy: list[int]) -> None:
    third = greedy[2]

    answer = runner.run(bench.answer(request(token_ids=(third,))))

    assert answer == (greedy[: greedy.index(third)], FinishReason.STOP)


def test_stop_tokens_are_not_drawn_before_min_tokens(bench: Bench, runner: asyncio.Runner, greedy: list[int]) -> None:
    tokens, _ = runner.run(bench.answer(request(token_ids=(greedy[0],), min_tokens=2)))

    assert len(tokens) >= 2
    assert greedy[0] not in tokens


def test_the_end_token_ends_the_answer_unless_it_is_ignored(bench: Bench, runner: asyncio.Runner) -> None:
    ending = Sampling(temperature=0, logit_bias=((EOS, 100.0),))

    ended = runner.run(bench.answer(request(sampling=ending)))
    ignored = runner.run(bench.answer(request(sampling=ending, max_tokens=2, ignore_eos=True)))

    assert ended == ([], FinishReason.STOP)
    assert ignored == ([EOS, EOS], FinishReason.LENGTH)


def test_limits_count_the_whole_continuation(bench: Bench, runner: asyncio.Runner, greedy: list[int]) -> None:
    tokens, finish = runner.run(bench.answer(request(max_tokens=6).after(greedy[:4])))

    assert tokens == greedy[4:6]
    assert finish is FinishReason.LENGTH


def test_a_request_whose_limit_is_met_finishes_without_a_token(
    bench: Bench, runner: asyncio.Runner, greedy: list[int]
) -> None:
    answer = runner.run(bench.answer(request(max_tokens=4).after(greedy[:4])))

    assert answer == ([], FinishReason.LENGTH)


def test_a_full_context_ends_the_answer(bench: Bench, runner: asyncio.Runner) -> None:
    prompt = (PROMPT * 20)[: CONTEXT_LENGTH - 2]

    tokens, finish = runner.run(bench.answer(request(prompt=prompt, max_tokens=9, ignore_eos=True)))

    assert len(tokens) == 2
    assert finish is FinishReason.LENGTH


def test_penalties_count_what_was_generated_before_a_cut(bench: Bench, runner: asyncio.Runner) -> None:
    penalised = Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)
    whole, _ = runner.run(bench.answer(request(sampling=penalised, max_tokens=8, ignore_eos=True)))

    rest, _ = runner.run(bench.answer(request(sampling=penalised, max_tokens=8, ignore_eos=True).after(whole[:4])))

    assert rest == whole[4:]
    assert len(set(whole)) == len(whole)


REFUSED = {
    "an empty prompt": (request(prompt=()), Reason.INVALID_ARGUMENT),
    "a prompt that leaves no place": (request(prompt=(PROMPT * 20)[:CONTEXT_LENGTH]), Reason.PROMPT_TOO_LONG),
    "a continuation beyond the context": (request().after(PROMPT * 20), Reason.PROMPT_TOO_LONG),
    "a token outside of the vocabulary": (request(prompt=(49_152,)), Reason.INVALID_ARGUMENT),
    "a bias outside of it": (
        request(sampling=Sampling(temperature=0, logit_bias=((49_152, 1.0),))),
        Reason.INVALID_ARGUMENT,
    ),
    "a stop token outside of it": (request(token_ids=(49_152,)), Reason.INVALID_ARGUMENT),
}


@pytest.mark.parametrize(("refused", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_is_refused(bench: Bench, refused: Request, reason: Reason) -> None:
    with pytest.raises(Failure) as raised:
        bench.submit(refused)

    assert raised.value.reason is reason


YES_OR_NO = Guided(GuidedKind.CHOICE, ("yes", "no"))


def test_a_guided_answer_is_one_of_its_form(bench: Bench, runner: asyncio.Runner) -> None:
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
def test_a_form_that_cannot_be_made_fails_and_the_engine_goes_on(
    bench: Bench, runner: asyncio.Runner, failing: Request, reason: Reason
) -> None:
    failure = runner.run(bench.failure(failing))

    assert failure.reason is reason
    tokens, _ = runner.run(bench.answer(request()))
    assert len(tokens) == 4


def test_a_guided_request_that_is_cancelled_while_its_form_is_made_leaves_nothing(
    bench: Bench, runner: asyncio.Runner
) -> None:
    long = request(guided=Guided(GuidedKind.REGEX, ("[a-z ]{200}",)), max_tokens=80)

    async def scenario() -> None:
        cancelled = bench.submit(long)
        bench.engine.cancel(cancelled)
        keys = [bench.submit(request(guided=YES_OR_NO)) for _ in range(bench.engine.request_limit)]  # There is place.
        await bench.until(lambda: all(bench.finish(key) is not None for key in keys))

        assert bench.of(cancelled) == []

    runner.run(scenario())


def test_a_cancelled_request_emits_nothing_more_and_leaves_its_place(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> tuple[int, int]:
        keys = [bench.submit(request(max_tokens=80, ignore_eos=True)) for _ in range(3)]
        await bench.until(lambda: all(bench.of(key) for key in keys))
        bench.engine.cancel(keys[0])
        count = len(bench.of(keys[0]))
        after = bench.submit(request(max_tokens=3))  # takes the place that was left
        await bench.until(lambda: bench.finish(after) is not None)
        for key in keys:
            bench.engine.cancel(key)
        return count, len(bench.of(keys[0]))

    count, count_later = runner.run(scenario())

    assert count_later == count


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


def test_a_long_prompt_does_not_stop_the_others(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> int:
        talking = bench.submit(request(max_tokens=80, ignore_eos=True))
        await bench.until(lambda: bool(bench.of(talking)))
        start = len(bench.of(talking))
        long = bench.submit(request(prompt=(PROMPT * 20)[:80], max_tokens=1))
        await bench.until(lambda: bool(bench.of(long)))
        bench.engine.cancel(talking)
        return len(bench.of(talking)) - start

    assert runner.run(scenario()) >= 80 // 17  # a step takes a piece of 16 tokens, and one with all others


def test_load_counts_prefill_and_cache_while_they_last_and_every_step(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        before = bench.engine.load()
        talking = bench.submit(request(max_tokens=80, ignore_eos=True))
        await bench.until(lambda: bool(bench.of(talking)))
        bench.submit(request(prompt=(PROMPT * 20)[:80], max_tokens=1))
        steps = len(bench.of(talking))
        await bench.until(lambda: len(bench.of(talking)) > steps + 1)
        during = bench.engine.load()
        bench.engine.cancel(talking)
        after = bench.submit(request(max_tokens=1))
        await bench.until(lambda: bench.finish(after) is not None)

        assert during.steps > before.steps
        assert during.ranks[0].active_prefill_tokens > 0
        assert during.ranks[0].kv_blocks_used == 1 + 3  # blocks of 32 tokens: 5 and some, and 80
        assert during.ranks[0].kv_blocks_total == 3 * 3

    runner.run(scenario())


def test_a_file_that_is_no_model_ends_the_run_with_engine_dead(tmp_path: Path) -> None:
    file = tmp_path / "readme.gguf"
    file.write_text("not a model")
    engine = LlamaCppEngine(LlamaCppConfig(path=file, served_model_name="none"))

    with pytest.raises(Failure, match="not a GGUF file") as raised:
        asyncio.run(engine.run(lambda _: None, asyncio.Event()))

    assert raised.value.reason is Reason.ENGINE_DEAD


def test_the_event_loop_goes_on_while_the_engine_ends() -> None:
    async def scenario() -> int:
        engine = LlamaCppEngine(LlamaCppConfig(path=resolve("smollm2"), served_model_name="tiny", context_length=64))
        ready, turns = asyncio.Event(), 0
        run = asyncio.create_task(engine.run(lambda _: None, ready))
        async with asyncio.timeout(TIMEOUT_S):
            await ready.wait()
            run.cancel()
            while not run.done():
                await asyncio.sleep(0)
                turns += 1
        return turns

    assert (
        asyncio.run(scenario()) > 10
    )  # The memory of a model is given back meanwhile; two turns are the cancellation.


@pytest.mark.parametrize("missing", ["cyllama", "llguidance"])
def test_without_llama_cpp_the_refusal_says_how_to_install_it(missing: str) -> None:
    blocked = f"import sys; sys.modules['{missing}'] = None; import services.worker.engines.llamacpp"

    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )

    assert "StartupError" in done.stderr
    assert "pip install 'unbroken[llamacpp]'" in done.stderr
