"""The sampler: the randomness of a token comes from (seed, choice, position) alone.

test_batch.py shows that the drawn tokens are the same in every batch and after every cut.
"""

from services.core.request import Request, Stop
from services.worker.engines.llamacpp.sampler import answer_end_ids, drawable, forbidden_by, is_in, seed_at

END_IDS = frozenset({2, 3})


def test_randomness_differs_by_seed_by_choice_and_by_position() -> None:
    seeds = {seed_at(seed, choice, position) for seed in (0, 1) for choice in (0, 1) for position in (0, 1)}

    assert len(seeds) == 8


def test_randomness_is_the_same_in_every_process() -> None:
    assert seed_at(7, 0, 5) == 0xE3D74EE0


def test_second_draw_of_a_token_has_other_randomness() -> None:
    assert seed_at(7, 0, 5, attempt=1) != seed_at(7, 0, 5)


def test_largest_64_bit_seed_gives_a_valid_32_bit_seed() -> None:
    assert 0 <= seed_at(2**64 - 1, 0, 0) < 2**32 - 1


def test_answer_ends_at_the_models_end_tokens_and_the_requests_stop_tokens() -> None:
    assert answer_end_ids(Request(model="m", stop=Stop(token_ids=(9,))), END_IDS) == {2, 3, 9}


def test_ignore_eos_leaves_only_the_requests_stop_tokens() -> None:
    assert answer_end_ids(Request(model="m", stop=Stop(token_ids=(9,), ignore_eos=True)), END_IDS) == {9}


ALLOWED = bytes([0b0001_0100, 0b0000_0001])  # Tokens 2, 4 and 8.


def tokens_of(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if is_in(mask, token)]


def test_mask_has_one_bit_for_each_token() -> None:
    assert tokens_of(ALLOWED) == [2, 4, 8]
    assert forbidden_by(ALLOWED, 10) == [0, 1, 3, 5, 6, 7, 9]


def test_every_token_of_the_mask_may_be_drawn_by_default() -> None:
    assert tokens_of(drawable(ALLOWED, Request(model="m"), 0, END_IDS)) == [2, 4, 8]


def test_end_tokens_are_removed_from_the_mask_before_min_tokens() -> None:
    long = Request(model="m", stop=Stop(token_ids=(8,), min_tokens=3))

    assert tokens_of(drawable(ALLOWED, long, 2, END_IDS)) == [4]
    assert tokens_of(drawable(ALLOWED, long, 3, END_IDS)) == [2, 4, 8]


def test_end_tokens_are_removed_from_the_mask_with_ignore_eos() -> None:
    assert tokens_of(drawable(ALLOWED, Request(model="m", stop=Stop(ignore_eos=True)), 9, END_IDS)) == [4, 8]
