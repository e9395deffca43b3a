"""Drawing: the randomness of a token comes from (seed, choice, position) alone.

That the drawn tokens are the same in every batch and after every cut is tested with the batch.
"""

from services.request import Request, Stop
from services.worker.engines.llamacpp.draw import enders, seed_at

END_IDS = frozenset({2, 3})


def test_randomness_differs_by_seed_by_choice_and_by_position() -> None:
    seeds = {seed_at(seed, choice, position) for seed in (0, 1) for choice in (0, 1) for position in (0, 1)}

    assert len(seeds) == 8


def test_randomness_is_the_same_in_every_process() -> None:
    assert seed_at(7, 0, 5) == 0xE3D74EE0


def test_every_seed_of_64_bits_is_taken() -> None:
    assert 0 <= seed_at(2**64 - 1, 0, 0) < 2**32 - 1


def test_an_answer_ends_at_the_models_end_tokens_and_the_requests() -> None:
    assert enders(Request(model="m", stop=Stop(token_ids=(9,))), END_IDS) == {2, 3, 9}


def test_the_models_end_tokens_can_be_ignored() -> None:
    assert enders(Request(model="m", stop=Stop(token_ids=(9,), ignore_eos=True)), END_IDS) == {9}
