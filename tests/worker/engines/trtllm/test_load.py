"""What the engine reports of its load: our own count, and the engine's word where that is fresh and lower."""

from dataclasses import dataclass

from services.worker.engine import RankLoad
from services.worker.engines.trtllm.load import SAMPLE_FRESH_S, Sample, emptiest_rank, rank_loads, sample_of


@dataclass(frozen=True)
class Held:
    """A request on the engine."""

    token_count: int
    prefill_left: int = 0
    rank: int = 0
    begun_at: float = 0.0


def sample(used: int, at: float = 10.0, total: int = 100) -> Sample:
    return Sample(at=at, blocks_total=total, blocks_used=used)


def load(*held: Held, of: Sample | None = None, ranks: int = 1, now: float = 10.0) -> list[RankLoad]:
    return rank_loads(held, of, ranks=ranks, block_tokens=10, now=now)


def test_blocks_of_a_whole_prompt_count_from_the_start_on() -> None:
    assert load(Held(31, 31), Held(5), of=sample(50)) == [RankLoad(5, 100, 31)]


def test_blocks_that_requests_share_count_once_by_the_engines_word() -> None:
    assert load(Held(500), Held(400), of=sample(60)) == [RankLoad(60, 100, 0)]


def test_what_came_after_the_engines_word_counts_on_top_of_it() -> None:
    assert load(Held(500), Held(100, begun_at=10.5), of=sample(60), now=10.6) == [RankLoad(60, 100, 0)]
    assert load(Held(500), Held(100, begun_at=10.5), of=sample(20), now=10.6) == [RankLoad(30, 100, 0)]


def test_an_old_word_does_not_count_for_the_engine_says_nothing_while_it_is_idle() -> None:
    assert load(Held(500), of=sample(7), now=10.0 + SAMPLE_FRESH_S + 0.1) == [RankLoad(50, 100, 0)]
    assert load(of=sample(60)) == [RankLoad(0, 100, 0)]


def test_never_more_is_used_than_there_is() -> None:
    assert load(Held(5000), of=sample(100), now=99.0) == [RankLoad(100, 100, 0)]


def test_nothing_is_made_up_where_the_engine_has_not_said_how_much_there_is() -> None:
    assert load(Held(50, 50)) == [RankLoad(0, 0, 50)]


def test_each_data_parallel_rank_reports_for_itself() -> None:
    """The engine does not say which rank it speaks of, but all caches have one size."""
    held = (Held(50, 50, rank=0), Held(20, rank=1), Held(7, 7, rank=1))

    assert load(*held, of=sample(1), ranks=3) == [
        RankLoad(5, 100, 50, 0),
        RankLoad(3, 100, 7, 1),
        RankLoad(0, 100, 0, 2),
    ]


def test_a_request_goes_to_the_rank_with_the_fewest_tokens() -> None:
    assert emptiest_rank([Held(50, rank=0), Held(20, rank=1), Held(40, rank=1)], 2) == 0
    assert emptiest_rank([Held(50, rank=0)], 2) == 1


def test_of_the_engines_statistics_only_what_is_there_is_read() -> None:
    assert sample_of({"kvCacheStats": {"maxNumBlocks": 9, "usedNumBlocks": 4}}, 1.0) == sample(4, 1.0, 9)
    assert sample_of({"kvCacheStats": {"maxNumBlocks": 9}}, 1.0) == sample(0, 1.0, 9)
    assert sample_of({"kvCacheStats": {"maxNumBlocks": 0}}, 1.0) is None
    assert sample_of({"kvCacheStats": None}, 1.0) is None
    assert sample_of({}, 1.0) is None
