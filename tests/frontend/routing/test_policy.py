"""Policy: which workers are eligible for a call, and which of them is chosen."""

import random
from collections.abc import Sequence

from services.frontend.routing.candidate import Candidate
from services.frontend.routing.policy import LOOKS_MAX, Survey, choose, healthy, survey
from services.frontend.routing.state import MOVED_REQUEST, NEW_REQUEST, Needs, State
from services.frontend.routing.thresholds import Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import make_candidate

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
CALM = RankLoad(kv_blocks_used=1, kv_blocks_total=10, active_prefill_tokens=0)
HALF = Thresholds(active_decode_blocks=0.5)


def surveyed(*workers: Candidate, excluded: str = "", count: int = 1) -> Survey:
    return survey(workers, Needs(frozenset(excluded), HALF, count), 0.0)


def eligible(*workers: Candidate, is_moved: bool = False, excluded: str = "") -> list[str]:
    found = surveyed(*workers, excluded=excluded)
    return [one.key for one in found.eligible(MOVED_REQUEST if is_moved else NEW_REQUEST)]


def busy(key: str) -> Candidate:
    return make_candidate(key, ranks=[BUSY, BUSY])


def chosen(workers: Sequence[Candidate], rng: random.Random) -> str:
    worker = choose(workers, rng)
    assert worker is not None
    return worker.key


def test_the_most_loaded_of_many_workers_is_never_chosen() -> None:
    workers = [make_candidate(str(load), in_flight_count=load) for load in range(5)]
    rng = random.Random(7)

    assert "4" not in {chosen(workers, rng) for _ in range(200)}


def test_a_worker_that_is_drawn_twice_is_looked_at_once() -> None:
    class Constant(random.Random):
        def random(self) -> float:
            return 0.0

    workers = [make_candidate(str(number)) for number in range(LOOKS_MAX + 1)]

    assert [one.key for one in healthy(workers, Needs(), 0.0, Constant())] == ["0"]


def test_of_two_workers_with_as_many_requests_the_one_whose_load_is_known_is_chosen() -> None:
    unknown, known = make_candidate("unknown"), make_candidate("known", ranks=[CALM])
    rng = random.Random(7)

    assert {chosen([unknown, known], rng) for _ in range(50)} == {"known"}
    known.on_opened(1)
    assert {chosen([unknown, known], rng) for _ in range(50)} == {"unknown"}


def test_a_quarantined_worker_is_preferred_to_a_busy_one() -> None:
    assert eligible(busy("a"), make_candidate("b", quarantined_until=1.0)) == ["b"]


def test_a_worker_is_not_busy_if_one_rank_is_calm_or_none_is_known() -> None:
    assert eligible(make_candidate("a", ranks=[BUSY, CALM]), make_candidate("b")) == ["a", "b"]


def test_no_worker_is_busy_without_thresholds() -> None:
    assert [one.key for one in survey([busy("a")], Needs(), 0.0).by_state[State.HEALTHY]] == ["a"]


def test_busy_workers_are_eligible_only_for_moved_requests_and_only_if_there_is_no_other() -> None:
    assert eligible(busy("a")) == []
    assert eligible(busy("a"), is_moved=True) == ["a"]
    assert eligible(busy("a"), make_candidate("b"), is_moved=True) == ["b"]
    assert eligible(busy("a"), is_moved=True, excluded="a") == []


def test_a_worker_is_healthy_for_several_choices_only_if_it_has_room_for_all() -> None:
    workers = make_candidate("a", slots=4, in_flight_count=2), make_candidate("b", slots=8, in_flight_count=5)

    found = [surveyed(*workers, count=count).by_state[State.HEALTHY] for count in (2, 3, 4)]

    assert [[one.key for one in healthy] for healthy in found] == [["a", "b"], ["b"], []]
