"""The batch: an answer does not depend, by one bit, on where it was cut or on the other requests in the batch.

At temperature 2, thousands of tokens are about equally likely, so the smallest change of a score changes the answer.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from services.core.errors import Reason
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason, Guided, GuidedKind, Request, Sampling, Stop
from services.models.download import resolve
from services.models.tokenizers.gguf import GgufTokenizer, tokenizer_content
from services.worker.engine import EngineLoad, Output
from services.worker.engines.llamacpp.batch import CHUNK_TOKENS_MAX, Batch
from services.worker.engines.llamacpp.model import Llama
from services.worker.engines.llamacpp.sequence import LlamaSequence
from tests.worker.guided.support import PlainGuide

pytestmark = pytest.mark.model

SEQUENCES = 4
SHORT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
LONG = SHORT * 52  # Past 256 tokens, where several threads would compute a single token differently.


@contextmanager
def load(threads: int) -> Iterator[Llama]:
    llama = Llama(
        resolve("smollm2"), sequences=SEQUENCES, context_length=512, threads=threads, decode_tokens_max=CHUNK_TOKENS_MAX
    )
    try:
        yield llama
    finally:
        llama.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    with load(threads=1) as llama:
        yield llama


def make_batch(llama: Llama, chunk_tokens: int = CHUNK_TOKENS_MAX) -> Batch:
    return Batch(llama, sequences=SEQUENCES, chunk_tokens=chunk_tokens)


def request(prompt: tuple[int, ...], max_tokens: int, temperature: float = 2.0, seed: int = 1) -> Request:
    return Request(
        model="m",
        token_ids=prompt,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop=Stop(max_tokens=max_tokens, ignore_eos=True),
    )


def outputs_of(llama: Llama, batch: Batch, requests: list[Request], *, delays: int = 0) -> list[list[Output]]:
    """Run the requests at the same time. Returns the outputs of each. `delays`: how often each guide is late."""
    outputs: list[list[Output]] = [[] for _ in requests]
    for key, one in enumerate(requests):
        batch.add(LlamaSequence(key, one, llama.end_ids, guide_of(llama, one, delays)))
    while not batch.is_empty:
        for output in batch.step():
            outputs[output.key].append(output)
    return outputs


def guide_of(llama: Llama, request: Request, delays: int) -> PlainGuide | None:
    if request.guided is None:
        return None
    return PlainGuide(llama.token_bytes(), llama.end_ids, request.guided, request.generated_token_ids, delays)


def answers(llama: Llama, batch: Batch, requests: list[Request]) -> list[list[int]]:
    """Run the requests at the same time. Returns the tokens of each."""
    outputs = outputs_of(llama, batch, requests)
    assert all(output.failure is None for one in outputs for output in one)
    return [tokens_of(one) for one in outputs]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs_of(outputs: list[Output]) -> list[TokenLogprobs]:
    return [one for output in outputs for one in output.logprobs or ()]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
def test_continuations_in_one_batch_equal_the_uncut_answer(llama: Llama, temperature: float) -> None:
    whole = request(SHORT, 10, temperature)
    [uncut] = answers(llama, make_batch(llama), [whole])

    cuts = (1, 6, 9)
    continued = answers(llama, make_batch(llama), [whole.after(uncut[:cut]) for cut in cuts])

    assert continued == [uncut[cut:] for cut in cuts]


@pytest.fixture(scope="module")
def long_answer(llama: Llama) -> list[int]:
    """The uncut answer to LONG, computed alone in its batch."""
    [tokens] = answers(llama, make_batch(llama), [request(LONG, 10)])
    return tokens


def test_long_answer_is_the_same_after_a_cut_with_more_threads_and_other_chunks(long_answer: list[int]) -> None:
    with load(threads=2) as threaded:
        cut = request(LONG, 10).after(long_answer[:2])
        [continued] = answers(threaded, make_batch(threaded, chunk_tokens=31), [cut])

    assert continued == long_answer[2:]


def test_long_answer_is_the_same_beside_another_request(llama: Llama, long_answer: list[int]) -> None:
    _, beside_another = answers(llama, make_batch(llama), [request(SHORT, 20), request(LONG, 10)])

    assert beside_another == long_answer


def test_unused_sequence_numbers_below_the_highest_in_use_do_not_change_an_answer(llama: Llama) -> None:
    whole = request(SHORT, 8)
    [uncut] = answers(llama, make_batch(llama), [whole])
    batch = make_batch(llama)
    for key in (1, 2):
        batch.add(LlamaSequence(key, request(LONG[:20], 99), llama.end_ids))
    batch.add(LlamaSequence(3, whole, llama.end_ids))
    outputs = batch.step()

    batch.remove(1)
    batch.remove(2)
    while not batch.is_empty:
        outputs += batch.step()

    assert [token for output in outputs if output.key == 3 for token in output.token_ids] == uncut


def test_bug_in_one_draw_ends_only_that_request(llama: Llama) -> None:
    unseeded = Request(
        model="m", token_ids=SHORT, sampling=Sampling(temperature=1.0, seed=None), stop=Stop(max_tokens=2)
    )
    batch = make_batch(llama)
    batch.add(LlamaSequence(1, unseeded, llama.end_ids))
    batch.add(LlamaSequence(2, request(SHORT, 2), llama.end_ids))
    outputs: list[Output] = []

    while not batch.is_empty:
        outputs += batch.step()

    assert [output.failure is not None for output in outputs if output.key == 1] == [True]
    assert sum(len(output.token_ids) for output in outputs if output.key == 2) == 2


RIVALS = 3


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_log_probabilities_are_identical_after_a_cut_and_beside_other_requests(
    llama: Llama, temperature: float
) -> None:
    whole = replace(request(SHORT, 8, temperature), logprobs=RIVALS)
    [uncut] = outputs_of(llama, make_batch(llama), [whole])
    tokens = tokens_of(uncut)

    cuts = (1, 4, 7)
    continued = outputs_of(llama, make_batch(llama), [whole.after(tokens[:cut]) for cut in cuts])

    assert [logprobs_of(one) for one in continued] == [logprobs_of(uncut)[cut:] for cut in cuts]
    assert all(len(one.top) == RIVALS for one in logprobs_of(uncut))


def test_log_probabilities_ignore_biases_and_grammars(llama: Llama) -> None:
    plain = replace(request(SHORT, 1, temperature=0), logprobs=1)
    biased_request = replace(plain, sampling=Sampling(temperature=0, logit_bias=((7, 100.0),)))
    guided_request = replace(plain, guided=Guided(GuidedKind.CHOICE, ("!",)))

    likeliest, biased, forced = (
        logprobs_of(one)[0] for one in outputs_of(llama, make_batch(llama), [plain, biased_request, guided_request])
    )

    assert biased.top == forced.top == likeliest.top
    assert likeliest.logprob == likeliest.top[0][1] > max(biased.logprob, forced.logprob)
    assert 0 < math.exp(likeliest.logprob) < 1


def test_log_probabilities_are_absent_unless_requested(llama: Llama) -> None:
    [outputs] = outputs_of(llama, make_batch(llama), [request(SHORT, 2)])

    assert [output.logprobs for output in outputs] == [None, None]


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> GgufTokenizer:
    return GgufTokenizer(tokenizer_content(resolve("smollm2")))


def text_of(vocabulary: GgufTokenizer, tokens: list[int]) -> str:
    return b"".join(vocabulary.token_bytes[token] for token in tokens).decode()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_json_answer_that_is_cut_at_any_token_continues_as_the_same_json(
    llama: Llama, vocabulary: GgufTokenizer, temperature: float
) -> None:
    guided_request = Request(
        model="m",
        token_ids=SHORT,
        guided=Guided(GuidedKind.JSON_SCHEMA, (json.dumps(SCHEMA),)),
        sampling=Sampling(temperature=temperature, seed=5),
        stop=Stop(max_tokens=60),
    )
    [whole] = outputs_of(llama, make_batch(llama), [guided_request])
    tokens = tokens_of(whole)
    assert json.loads(text_of(vocabulary, tokens)).keys() == {"city"}
    assert whole[-1].finish is FinishReason.STOP

    for start in range(0, len(tokens) + 1, SEQUENCES):
        cuts = range(start, min(start + SEQUENCES, len(tokens) + 1))
        continued = outputs_of(llama, make_batch(llama), [guided_request.after(tokens[:cut]) for cut in cuts])
        assert [tokens_of(one) for one in continued] == [tokens[cut:] for cut in cuts]
        assert all(one[-1].finish is FinishReason.STOP for one in continued)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_late_guide_delays_its_own_answer_and_changes_neither_it_nor_others(llama: Llama, temperature: float) -> None:
    """While a guide is late, the last token of its answer is computed again in each step."""
    plain = request(SHORT, 12, temperature)
    guided_request = replace(request(LONG, 4, temperature), guided=Guided(GuidedKind.REGEX, (".{100}",)))
    [in_time] = outputs_of(llama, make_batch(llama), [guided_request])
    [alone] = outputs_of(llama, make_batch(llama), [plain])

    late, beside = outputs_of(llama, make_batch(llama), [guided_request, plain], delays=2)

    assert tokens_of(late) == tokens_of(in_time)
    assert tokens_of(beside) == tokens_of(alone)


def test_late_guide_does_not_hold_up_the_answers_beside_it(llama: Llama) -> None:
    guided_request = replace(request(SHORT, 1), guided=Guided(GuidedKind.REGEX, (".{100}",)))
    batch = make_batch(llama)
    batch.add(LlamaSequence(1, guided_request, llama.end_ids, guide_of(llama, guided_request, delays=1000)))
    batch.add(LlamaSequence(2, request(SHORT, 6), llama.end_ids))

    outputs = [output for _ in range(8) for output in batch.step()]
    batch.remove(1)

    assert [output.key for output in outputs] == [2] * 6


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (Stop(max_tokens=9), "no"),
        (Stop(max_tokens=9, min_tokens=9), "no no no"),
        (Stop(max_tokens=9, ignore_eos=True), "no no no"),
    ],
)
def test_guided_answer_ends_where_the_model_ends_it_or_where_its_grammar_is_complete(
    llama: Llama, vocabulary: GgufTokenizer, stop: Stop, text: str
) -> None:
    ending = Sampling(temperature=0, logit_bias=tuple((token, 100.0) for token in llama.end_ids))
    guided_request = Request(
        model="m", token_ids=SHORT, guided=Guided(GuidedKind.REGEX, ("no( no){0,2}",)), sampling=ending, stop=stop
    )

    [outputs] = outputs_of(llama, make_batch(llama), [guided_request])

    assert text_of(vocabulary, tokens_of(outputs)) == text
    assert outputs[-1].finish is FinishReason.STOP


def test_grammar_without_any_text_ends_only_its_request(llama: Llama) -> None:
    unfulfillable = replace(request(SHORT, 2), guided=Guided(GuidedKind.GRAMMAR, ("root ::= root",)))

    failed, other = outputs_of(llama, make_batch(llama), [unfulfillable, request(SHORT, 2)])

    assert [output.failure and output.failure.reason for output in failed] == [Reason.INVALID_ARGUMENT]
    assert len(tokens_of(other)) == 2


# Cancelling within a step


def step_cancelled_at(llama: Llama, ask: int, prompt: tuple[int, ...]) -> tuple[Batch, list[Output]]:
    """Run a step of one request. Check number `ask` of `is_cancelled`, counted from 0, finds it cancelled."""
    checks = iter(range(100))
    batch = Batch(llama, sequences=SEQUENCES, chunk_tokens=16, is_cancelled=lambda _: next(checks) >= ask)
    batch.add(LlamaSequence(1, request(prompt, 9), llama.end_ids))
    return batch, batch.step()


CHUNK_AND_MORE = SHORT * 4


@pytest.mark.parametrize(
    ("ask", "prompt", "counts"),
    [
        (0, CHUNK_AND_MORE, EngineLoad(0, ())),  # Before the step.
        (1, CHUNK_AND_MORE, EngineLoad(1, (), 16, 0, 16)),  # During the chunk: nothing more is computed.
        (2, CHUNK_AND_MORE, EngineLoad(1, (), 16, 0, 0)),  # Right after it.
        (2, SHORT[:1], EngineLoad(1, (), 1, 0, 1)),  # During the last token of the prompt: no token is drawn.
        (3, SHORT[:1], EngineLoad(1, (), 1, 0, 0)),  # Right after it.
        (4, SHORT[:1], EngineLoad(1, (), 1, 1, 1)),  # During the draw of the next token.
        (5, SHORT[:1], EngineLoad(1, (), 1, 1, 0)),  # Not in this step.
    ],
)
def test_cancelled_request_costs_at_most_the_part_of_the_step_in_progress(
    llama: Llama, ask: int, prompt: tuple[int, ...], counts: EngineLoad
) -> None:
    batch, outputs = step_cancelled_at(llama, ask, prompt)

    batch.remove(1)
    assert batch.counts == counts
    assert len(tokens_of(outputs)) == counts.generated_tokens


def test_cancelled_request_leaves_the_batch_by_the_next_step(llama: Llama) -> None:
    for ask in range(6):
        batch, _ = step_cancelled_at(llama, ask, SHORT[:1])
        batch.step()
        assert batch.is_empty
