"""A rank of the mocker: the cache goes to the oldest requests, as many as fit, and never overflows."""

from services.worker.engines.mocker.rank import Rank, next_chunks
from services.worker.engines.mocker.sequence import MockerSequence
from tests.support.doubles import make_request


def sequence(key: int, token_count: int) -> MockerSequence:
    return MockerSequence(key, make_request((1,) * token_count, max_tokens=100, ignore_eos=True))


def rank_of(*sequences: MockerSequence, blocks: int = 4) -> Rank:
    """A rank with blocks of 10 tokens."""
    rank = Rank(3, blocks_total=blocks, block_tokens=10)
    for one in sequences:
        rank.add(one)
    return rank


def keys(sequences: list[MockerSequence]) -> list[int]:
    return [one.key for one in sequences]


def test_request_holds_the_blocks_of_its_whole_prompt_from_the_start() -> None:
    load = rank_of(sequence(1, 10), sequence(2, 11)).load()

    assert (load.kv_blocks_used, load.kv_blocks_total, load.active_prefill_tokens, load.dp_rank) == (3, 4, 21, 3)


def test_request_that_does_not_fit_waits_and_blocks_those_behind_it() -> None:
    rank = rank_of(sequence(1, 20), sequence(2, 30), sequence(3, 1))

    assert keys(rank.fit()) == [1]
    assert (rank.load().kv_blocks_used, rank.load().active_prefill_tokens) == (2, 51)

    rank.remove(1)
    rank.remove(1)
    assert keys(rank.fit()) == [2, 3]


def test_youngest_request_gives_its_blocks_back_when_answers_outgrow_the_cache() -> None:
    older, younger = sequence(1, 20), sequence(2, 20)
    rank = rank_of(older, younger)
    assert keys(rank.fit()) == [1, 2]
    older.prefill_left = younger.prefill_left = 0

    older.step(context_length=100)
    load = rank.load()
    left = rank.fit()

    assert (load.kv_blocks_used, load.active_prefill_tokens) == (3, 20)
    assert keys(left) == [1]
    assert (older.prefill_left, younger.prefill_left) == (0, 20)


def test_chunk_goes_to_the_oldest_prompts() -> None:
    done, first, second, third = (sequence(key, 10) for key in range(4))
    done.prefill_left = 0

    assert next_chunks([done, first, second, third], 15) == [(first, 10), (second, 5)]
    assert next_chunks([done], 15) == []
