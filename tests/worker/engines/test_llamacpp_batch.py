"""The batch: an answer does not depend on where it was cut, nor on what else is computed with it; not by one bit.

At temperature 2 a draw falls among thousands of tokens of like probability, so the least change of a score shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.models import resolve
from services.request import Request, Sampling, Stop
from services.worker.engine import Output
from services.worker.engines.llamacpp.batch import PIECE_TOKENS_MAX, Batch, Running
from services.worker.engines.llamacpp.model import Llama

pytestmark = pytest.mark.model

STREAMS = 4
SHORT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
LONG = SHORT * 52  # beyond 256 tokens, from where on several threads would compute one token alone another way


@contextmanager
def load(threads: int) -> Iterator[Llama]:
    llama = Llama(
        resolve("smollm2"), streams=STREAMS, context_length=512, threads=threads, decode_tokens_max=PIECE_TOKENS_MAX
    )
    try:
        yield llama
    finally:
        llama.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    with load(threads=1) as llama:
        yield llama


def make_batch(llama: Llama, piece_tokens: int = PIECE_TOKENS_MAX) -> Batch:
    return Batch(llama, streams=STREAMS, piece_tokens=piece_tokens)


def request(prompt: tuple[int, ...], max_tokens: int, temperature: float = 2.0, seed: int = 1) -> Request:
    return Request(
        model="m",
        token_ids=prompt,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop=Stop(max_tokens=max_tokens, ignore_eos=True),
    )


def answers(llama: Llama, batch: Batch, requests: list[Request]) -> list[list[int]]:
    """Run the requests at the same time: their tokens."""
    tokens: list[list[int]] = [[] for _ in requests]
    for key, one in enumerate(requests):
        batch.add(Running(key, one, llama.end_ids))
    while not batch.is_empty:
        for output in batch.step():
            assert output.failure is None
            tokens[output.key] += output.token_ids
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
def test_a_continuation_from_any_cut_in_company_equals_the_uncut_answer_alone(llama: Llama, temperature: float) -> None:
    whole = request(SHORT, 10, temperature)
    [uncut] = answers(llama, make_batch(llama), [whole])

    cuts = (1, 6, 9)
    continued = answers(llama, make_batch(llama), [whole.after(uncut[:cut]) for cut in cuts])

    assert continued == [uncut[cut:] for cut in cuts]


@pytest.fixture(scope="module")
def long_answer(llama: Llama) -> list[int]:
    """The answer to LONG, alone and uncut."""
    [tokens] = answers(llama, make_batch(llama), [request(LONG, 10)])
    return tokens


def test_a_long_answer_is_the_same_with_more_threads_in_other_pieces_after_a_cut(long_answer: list[int]) -> None:
    with load(threads=2) as threaded:
        cut = request(LONG, 10).after(long_answer[:2])
        [continued] = answers(threaded, make_batch(threaded, piece_tokens=31), [cut])

    assert continued == long_answer[2:]


def test_a_long_answer_is_the_same_in_company(llama: Llama, long_answer: list[int]) -> None:
    _, in_company = answers(llama, make_batch(llama), [request(SHORT, 20), request(LONG, 10)])

    assert in_company == long_answer


def test_streams_left_idle_below_the_highest_in_use_change_nothing(llama: Llama) -> None:
    whole = request(SHORT, 8)
    [uncut] = answers(llama, make_batch(llama), [whole])
    batch = make_batch(llama)
    for key in (1, 2):
        batch.add(Running(key, request(LONG[:20], 99), llama.end_ids))
    batch.add(Running(3, whole, llama.end_ids))
    outputs = batch.step()

    batch.remove(1)
    batch.remove(2)
    while not batch.is_empty:
        outputs += batch.step()

    assert [token for output in outputs if output.key == 3 for token in output.token_ids] == uncut


def test_a_fault_in_drawing_ends_that_request_alone(llama: Llama) -> None:
    unseeded = Request(
        model="m", token_ids=SHORT, sampling=Sampling(temperature=1.0, seed=None), stop=Stop(max_tokens=2)
    )
    batch = make_batch(llama)
    batch.add(Running(1, unseeded, llama.end_ids))
    batch.add(Running(2, request(SHORT, 2), llama.end_ids))
    outputs: list[Output] = []

    while not batch.is_empty:
        outputs += batch.step()

    assert [output.failure is not None for output in outputs if output.key == 1] == [True]
    assert sum(len(output.token_ids) for output in outputs if output.key == 2) == 2
