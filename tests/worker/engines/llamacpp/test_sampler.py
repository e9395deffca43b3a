"""Drawing: the randomness of a token comes from (seed, choice, position) alone.

That the drawn tokens are the same in every batch and after every cut is tested with the batch.
"""

from services.core.request import Request, Stop
from services.worker.engines.llamacpp.sampler import choose_from, enders, forbidden_by, is_in, seed_at

END_IDS = frozenset({2, 3})


def test_randomness_differs_by_seed_by_choice_and_by_position() -> None:
    seeds = {seed_at(seed, choice, position) for seed in (0, 1) for choice in (0, 1) for position in (0, 1)}

    assert len(seeds) == 8


def test_randomness_is_the_same_in_every_process() -> None:
    assert seed_at(7, 0, 5) == 0xE3D74EE0


def test_a_token_that_is_drawn_once_more_has_other_randomness() -> None:
    assert seed_at(7, 0, 5, attempt=1) != seed_at(7, 0, 5)


def test_every_seed_of_64_bits_is_taken() -> None:
    assert 0 <= seed_at(2**64 - 1, 0, 0) < 2**32 - 1


def test_an_answer_ends_at_the_models_end_tokens_and_the_requests() -> None:
    assert enders(Request(model="m", stop=Stop(token_ids=(9,))), END_IDS) == {2, 3, 9}


def test_the_models_end_tokens_can_be_ignored() -> None:
    assert enders(Request(model="m", stop=Stop(token_ids=(9,), ignore_eos=True)), END_IDS) == {9}


ALLOWED = bytes([0b0001_0100, 0b0000_0001])  # tokens 2, 4 and 8


def tokens_of(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if is_in(mask, token)]


def test_a_mask_has_a_bit_for_each_token() -> None:
    assert tokens_of(ALLOWED) == [2, 4, 8]
    assert forbidden_by(ALLOWED, 10) == [0, 1, 3, 5, 6, 7, 9]


def test_all_that_a_form_allows_may_be_drawn() -> None:
    assert tokens_of(choose_from(ALLOWED, Request(model="m"), 0, END_IDS)) == [2, 4, 8]


def test_a_form_is_not_ended_before_min_tokens() -> None:
    long = Request(model="m", stop=Stop(token_ids=(8,), min_tokens=3))

    assert tokens_of(choose_from(ALLOWED, long, 2, END_IDS)) == [4]
    assert tokens_of(choose_from(ALLOWED, long, 3, END_IDS)) == [2, 4, 8]


def test_a_form_is_not_ended_where_ends_are_ignored() -> None:
    assert tokens_of(choose_from(ALLOWED, Request(model="m", stop=Stop(ignore_eos=True)), 9, END_IDS)) == [4, 8]
