"""The TensorRT-LLM engine: exact greedy continuations, our own end tokens, and a model card that promises no more."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.request import FinishReason, Guided, GuidedKind, Request
from services.isolation.losses import Loss
from services.models.tokenizers.byte_level import EOS
from services.runtime.process import StartupError
from services.worker.engine import Output
from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine
from tests.support.clock import WAIT_S
from tests.support.model_folder import make_model_folder
from tests.support.trtllm import GREEDY, PROMPT, SAMPLED, RunningEngine, llm_of, new_request, play


def answers(folder: Path, *requests: Request, **config: Any) -> list[tuple[list[int], FinishReason | None]]:
    """Run the requests one after the other. Returns the tokens and the finish reason of each."""

    async def scenario(running: RunningEngine) -> list[tuple[list[int], FinishReason | None]]:
        ended = []
        for key, request in enumerate(requests, start=1):
            token_ids, end = await running.answer(key, request)
            ended.append((token_ids, end.finish))
        return ended

    found: list[tuple[list[int], FinishReason | None]] = play(folder, scenario, **config)
    return found


def test_greedy_continuation_from_any_cut_equals_the_uncut_answer(folder: Path) -> None:
    [(uncut, _)] = answers(folder, new_request())
    cuts = range(0, 64, 7)

    continued = answers(folder, *(new_request().after(uncut[:cut]) for cut in cuts))

    assert continued == [(uncut[cut:], FinishReason.LENGTH) for cut in cuts]


def test_request_that_is_at_its_limit_finishes_without_a_token(folder: Path) -> None:
    assert answers(folder, new_request(max_tokens=3).after([97, 98, 99])) == [([], FinishReason.LENGTH)]


def test_full_context_ends_the_answer(folder: Path) -> None:
    [(token_ids, finish)] = answers(folder, new_request(), max_seq_len=len(PROMPT) + 5)

    assert (len(token_ids), finish) == (5, FinishReason.LENGTH)


def test_stop_token_ends_the_answer_and_is_not_part_of_it(folder: Path) -> None:
    [(uncut, _)] = answers(folder, new_request())
    stop = uncut[30]

    [(token_ids, finish)] = answers(folder, new_request(stop_token_ids=(stop,)))

    assert (token_ids, finish) == (uncut[: uncut.index(stop)], FinishReason.STOP)


@pytest.mark.parametrize("is_returned", ["0", "1"])
def test_end_token_ends_the_answer_whether_or_not_the_engine_returns_it(
    folder: Path, is_returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_END_ODDS", "20")
    monkeypatch.setenv("TLLM_FAKE_END_IN_TOKENS", is_returned)
    prompts = [tuple(b"prompt %d" % number) for number in range(8)]

    ended = answers(folder, *(replace(new_request(ignore_eos=False), token_ids=prompt) for prompt in prompts))

    assert [finish for token_ids, finish in ended if len(token_ids) < 64] == [FinishReason.STOP] * 8
    assert all(EOS not in token_ids for token_ids, _ in ended)


def test_end_token_from_the_generation_config_ends_the_answer(tmp_path: Path) -> None:
    turn_end = ord(" ")
    folder = make_model_folder(tmp_path, {"generation_config.json": {"eos_token_id": [EOS, turn_end]}})

    [(token_ids, finish)] = answers(folder, new_request(ignore_eos=False, max_tokens=500))

    assert finish is FinishReason.STOP
    assert turn_end not in token_ids


def test_min_tokens_suppresses_the_end_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_END_ODDS", "5")

    [(short, _), (long, _)] = answers(
        folder, new_request(ignore_eos=False), new_request(ignore_eos=False, min_tokens=40)
    )

    assert len(short) < 40 <= len(long)


def test_sampled_request_is_answered(folder: Path) -> None:
    [(token_ids, finish)] = answers(folder, new_request(SAMPLED))

    assert (len(token_ids), finish) == (64, FinishReason.LENGTH)


def test_logit_bias_changes_the_answer(folder: Path) -> None:
    request = replace(new_request(max_tokens=8), sampling=replace(GREEDY, logit_bias=((ord("z"), 100.0),)))

    assert answers(folder, request) == [([ord("z")] * 8, FinishReason.LENGTH)]


def test_concurrent_requests_do_not_affect_each_other(folder: Path) -> None:
    requests = [replace(new_request(), token_ids=tuple(b"prompt %d" % number)) for number in range(6)]
    alone = answers(folder, *requests)

    async def scenario(running: RunningEngine) -> list[list[int]]:
        for key, request in enumerate(requests):
            running.engine.submit(key, request)
        for key in range(6):
            await running.wait_end(key)
        return [running.token_ids(key) for key in range(6)]

    assert play(folder, scenario) == [token_ids for token_ids, _ in alone]


def test_one_step_of_the_engine_is_emitted_in_one_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_STEP_MS", "5")

    async def scenario(running: RunningEngine) -> list[int]:
        for key in range(8):
            running.engine.submit(key, new_request())
        for key in range(8):
            await running.wait_end(key)
        return [len({output.key for output in step}) for step in running.steps]

    sizes = play(folder, scenario)
    apart = [size for size in sizes if size < 8]  # The first steps, until all requests have joined the batch.
    assert len(apart) < 14, sizes


# Log probabilities


@pytest.mark.parametrize("rivals", [0, 3])
def test_each_token_has_its_log_probability_and_the_requested_rivals(folder: Path, rivals: int) -> None:
    async def scenario(running: RunningEngine) -> list[Any]:
        token_ids, _ = await running.answer(1, new_request(logprobs=rivals))
        logprobs = [one for output in running.outputs(1) for one in output.logprobs or ()]
        return [token_ids, logprobs]

    token_ids, logprobs = play(folder, scenario)

    assert len(logprobs) == len(token_ids) == 64
    assert all(len(one.top) == rivals for one in logprobs)
    if rivals:
        assert all(one.top[0] == (token, one.logprob) for token, one in zip(token_ids, logprobs, strict=True))


def test_log_probabilities_of_a_continuation_equal_the_uncut_ones(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> list[Any]:
        found = []
        whole = new_request(logprobs=2)
        uncut, _ = await running.answer(1, whole)
        for key, cut in ((1, 0), (2, 10), (3, 40)):
            if cut:
                await running.answer(key, whole.after(uncut[:cut]))
            found.append([one for output in running.outputs(key) for one in output.logprobs or ()])
        return found

    uncut, ten, forty = play(folder, scenario)

    assert ten == uncut[10:]
    assert forty == uncut[40:]


# The model card and the model folder


def test_card_promises_only_what_the_engine_supports(folder: Path) -> None:
    engine = TrtLlmEngine(TrtLlmConfig(model=folder, served_model_name="m", max_batch_size=7))
    card = engine.card

    assert (card.engine, card.context_length, card.vocab_size, card.guided) == ("trtllm", 1024, EOS + 1, ())
    assert (card.resume.sampling, card.resume.penalties, card.resume.guided) == (False, False, False)
    assert card.resume.logprobs
    assert card.tokenizer.kind == "huggingface"
    assert engine.tokenizer_content()
    assert engine.request_limit == 7


def test_context_length_is_bounded_unless_configured(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, context_length=1_000_000)

    def context_length(**config: Any) -> int:
        return TrtLlmEngine(TrtLlmConfig(model=folder, served_model_name="m", **config)).card.context_length

    assert context_length() == 8192
    assert context_length(max_seq_len=20_000) == 20_000
    with pytest.raises(StartupError, match="more than the 1000000"):
        context_length(max_seq_len=1_000_001)


def test_model_folder_without_an_end_token_is_refused(tmp_path: Path) -> None:
    config = {"vocab_size": 257, "max_position_embeddings": 64}
    empty = {"config.json": config, "generation_config.json": {}, "tokenizer_config.json": {}}
    folder = make_model_folder(tmp_path, empty)

    with pytest.raises(StartupError, match="no end token"):
        TrtLlmEngine(TrtLlmConfig(model=folder, served_model_name="m"))


def test_folder_that_is_not_a_model_is_refused_with_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TrtLlmEngine(TrtLlmConfig(model=tmp_path, served_model_name="m"))


def test_engine_package_can_be_imported_without_tensorrt_llm() -> None:
    code = "import sys, services.worker.engines.trtllm; assert not any(n.startswith('tensorrt') for n in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


# Capacity


def test_request_beyond_the_batch_size_is_refused(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> Reason:
        running.engine.submit(1, new_request(max_tokens=500))
        running.engine.submit(2, new_request(max_tokens=500))
        with pytest.raises(Failure) as caught:
            running.engine.submit(3, new_request())
        return caught.value.reason

    assert play(folder, scenario, max_batch_size=2) is Reason.WORKER_AT_CAPACITY


def test_ended_requests_leave_no_state_behind(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        for key in range(4):
            running.engine.submit(key, new_request())
        running.engine.cancel(3)
        for key in range(3):
            await running.wait_end(key)
        runner: Any = running.engine._runner
        await running.until(lambda: not runner._leaving)

        assert not runner._live

    play(folder, scenario)


# Requests that fail


def test_request_error_fails_only_that_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", "7")
    monkeypatch.setenv("TLLM_FAKE_ERROR_AFTER", "3")

    async def scenario(running: RunningEngine) -> tuple[Output, Output]:
        running.engine.submit(1, new_request())
        _, bad = await running.answer(2, replace(new_request(), token_ids=(7,)))
        return await running.wait_end(1), bad

    good, bad = play(folder, scenario)

    assert good.finish is FinishReason.LENGTH
    assert bad.failure is not None
    assert bad.failure.reason is Reason.ENGINE_ERROR


def test_request_that_the_engine_rejects_fails_and_the_engine_is_asked_for_a_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(running: RunningEngine) -> Reason:
        llm, start = llm_of(running), llm_of(running).generate_async

        def refuse(**_: Any) -> None:
            monkeypatch.setattr(llm, "generate_async", start)
            raise ValueError("not like this")

        monkeypatch.setattr(llm, "generate_async", refuse)
        steps = running.engine.load().steps
        with pytest.raises(Failure, match="not like this") as caught:
            running.engine.submit(1, new_request())
        await running.until(lambda: running.engine.load().steps > steps)
        assert (await running.answer(2, new_request()))[1].finish is FinishReason.LENGTH
        return caught.value.reason

    assert play(folder, scenario, canary_after_s=60.0) is Reason.ENGINE_ERROR


# Guided decoding


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        (Guided(GuidedKind.CHOICE, ("yes.", "no?")), r"yes\.|no\?"),
        (Guided(GuidedKind.REGEX, ("[a-c]{3}",)), "[a-c]{3}"),
        (Guided(GuidedKind.GRAMMAR, ('root ::= "x" ("1" | "2")',)), "x[12]"),
        (Guided(GuidedKind.JSON_SCHEMA, ('{"enum": ["a", "b"]}',)), '"[ab]"'),
    ],
    ids=lambda value: value.kind if isinstance(value, Guided) else None,
)
def test_guided_answer_matches_its_grammar(folder: Path, guided: Guided, pattern: str) -> None:
    request = new_request(ignore_eos=False, guided=guided)

    [(token_ids, finish)] = answers(folder, request, guided_decoding_backend="xgrammar")

    assert finish is FinishReason.STOP
    assert re.fullmatch(pattern, bytes(token_ids).decode())


def test_invalid_grammar_fails_only_its_request(folder: Path) -> None:
    bad = new_request(ignore_eos=False, guided=Guided(GuidedKind.JSON_SCHEMA, ('{"type": "nonsense"}',)))

    async def scenario(running: RunningEngine) -> tuple[Output, Output]:
        running.engine.submit(1, new_request())
        _, failed = await running.answer(2, bad)
        return await running.wait_end(1), failed

    good, failed = play(folder, scenario, guided_decoding_backend="xgrammar")

    assert good.finish is FinishReason.LENGTH
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.param) == (Reason.INVALID_ARGUMENT, "guided")


@pytest.mark.parametrize(
    "crashing",
    [
        Guided(GuidedKind.REGEX, ("crash the compiler",)),
        Guided(GuidedKind.CHOICE, ("crash the compiler", "yes")),
        Guided(GuidedKind.JSON_SCHEMA, ('{"title": "crash the compiler"}',)),
        Guided(GuidedKind.GRAMMAR, ('root ::= "crash the compiler"',)),
    ],
)
def test_form_that_crashes_its_compiler_is_refused_and_never_reaches_the_engine(folder: Path, crashing: Guided) -> None:
    hostile = new_request(ignore_eos=False, guided=crashing)
    usual = new_request(ignore_eos=False, guided=Guided(GuidedKind.CHOICE, ("yes", "no")))

    async def scenario(running: RunningEngine) -> tuple[Output, Output, bytes]:
        running.engine.submit(1, new_request())
        _, failed = await running.answer(2, hostile)
        assert running.engine.load().helpers_lost == {Loss.CRASH: 1}
        token_ids, _ = await running.answer(3, usual)
        return await running.wait_end(1), failed, bytes(token_ids)

    beside, failed, text = play(folder, scenario, guided_decoding_backend="xgrammar")

    assert beside.finish is FinishReason.LENGTH
    assert failed.failure is not None
    assert (failed.failure.reason, failed.failure.param) == (Reason.INVALID_ARGUMENT, "guided")
    assert "SIGABRT" in failed.failure.detail
    assert text in (b"yes", b"no")


def test_card_lists_the_guided_fields_of_the_backend(folder: Path) -> None:
    config = TrtLlmConfig(model=folder, served_model_name="m", guided_decoding_backend="xgrammar")

    assert set(TrtLlmEngine(config).card.guided) == set(GuidedKind)
