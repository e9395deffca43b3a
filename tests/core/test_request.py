"""Request: the client's own terms, and what engines read from them."""

import pytest

from services.core.request import Request, Sampling
from tests.support.doubles import make_request


@pytest.mark.parametrize(
    ("sampling", "is_greedy"),
    [
        (Sampling(temperature=0.0), True),
        (Sampling(temperature=5e-324), True),
        (Sampling(temperature=1e-5), True),
        (Sampling(temperature=1.1e-5), False),
        (Sampling(temperature=1.0, top_p=0.0), True),
        (Sampling(temperature=1.0, top_p=2.0**-20), True),
        (Sampling(temperature=1.0, top_p=1e-5), False),
        (Sampling(temperature=1.0, top_k=1), True),
        (Sampling(temperature=1.0, top_k=2), False),
        (Sampling(temperature=1.0, min_p=1.0), True),
        (Sampling(temperature=1.0, min_p=0.99), False),
    ],
)
def test_sampling_is_greedy_if_its_settings_leave_only_the_likeliest_token(sampling: Sampling, is_greedy: bool) -> None:
    assert sampling.is_greedy == is_greedy


@pytest.mark.parametrize(
    ("sampling", "has_penalties"),
    [
        (Sampling(), False),
        (Sampling(presence_penalty=0.5), True),
        (Sampling(frequency_penalty=-0.5), True),
        (Sampling(repetition_penalty=1.1), True),
    ],
)
def test_penalties_are_values_that_differ_from_their_defaults(sampling: Sampling, has_penalties: bool) -> None:
    assert sampling.has_penalties == has_penalties


def test_the_token_count_covers_the_prompt_and_the_answer_so_far() -> None:
    assert make_request(prompt=(1, 2), generated_token_ids=(5, 6, 7)).token_count == 5


def test_a_continued_request_keeps_its_generated_tokens_in_front_and_its_limits() -> None:
    request = make_request(prompt=(1, 2), generated_token_ids=(5,), max_tokens=9)

    continued = request.after([6, 7])

    assert continued.generated_token_ids == (5, 6, 7)
    assert (continued.prompt_token_ids, continued.max_tokens) == ((1, 2), 9)
    assert request.generated_token_ids == (5,)


def test_a_request_that_continues_after_no_token_is_the_same_object() -> None:
    request = make_request()

    assert request.after([]) is request


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda request: request.prompt_token_ids, "Preprocess"),
        (lambda request: request.max_tokens, "Preprocess"),
        (lambda request: request.sampling.is_greedy, "Preprocess"),
    ],
    ids=["prompt", "max_tokens", "is_greedy"],
)
def test_what_preprocess_sets_cannot_be_read_above_it(read: object, name: str) -> None:
    assert callable(read)

    with pytest.raises(AssertionError, match=name):
        read(Request(model="m", text="a prompt"))
