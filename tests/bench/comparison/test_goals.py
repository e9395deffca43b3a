"""Goals are judged by the median of ratios within a round, and only where something was measured."""

import pytest

from bench.comparison.goals import GOALS, Goal, goal_lines
from bench.comparison.report import PARTS, document
from bench.comparison.rounds import GRPC, HTTP_1, OURS, PEER, Round

SHOWN = {part.name: part for part in PARTS}


def rounds(*figures: tuple[float, float]) -> list[Round]:
    made = []
    for ours, other in figures:
        made.append(Round())
        made[-1].add("wires", 64, GRPC, {"cpu_us_per_token": ours})
        made[-1].add("wires", 64, HTTP_1, {"cpu_us_per_token": other})
    return made


def test_ratio_is_that_within_each_round() -> None:
    lines = goal_lines(rounds((8, 10), (160, 200), (9.5, 10)))

    assert lines[2:] == ["| CPU per token, gRPC ÷ HTTP/1.1 | 64 | ≤ 0.9 | 0.8 (0.8 to 0.95) | yes |"]


def test_goal_that_is_missed_is_said_to_be() -> None:
    assert goal_lines(rounds((10, 10)))[2:] == ["| CPU per token, gRPC ÷ HTTP/1.1 | 64 | ≤ 0.9 | 1 | no |"]


@pytest.mark.parametrize(("seen", "is_met"), [(3.9, False), (4.0, True)])
def test_floor_must_be_reached(seen: float, is_met: bool) -> None:
    goal = Goal("", "wires", "64", "cpu_us_per_token", GRPC, 4.0, HTTP_1, is_floor=True)
    found = goal.seen(rounds((seen, 1)))

    assert found is not None
    assert goal.is_met(found) == is_met


def test_goal_without_another_system_is_judged_by_the_figure() -> None:
    one = Round()
    one.add("overload", 64, GRPC, {"cpu_us_each": 200.0})

    assert goal_lines([one])[2:] == ["| CPU of a refused rpc, µs | 64 | ≤ 250 | 200 | yes |"]


def test_page_has_no_goals_if_nothing_of_them_was_measured() -> None:
    one = Round()
    one.add("http", 16, OURS, {"cpu_us_per_token": 5.0})

    assert "## Goals" not in document([one], {}, [])
    one.add("http", 16, PEER, {"cpu_us_per_token": 10.0})
    assert "| CPU per token, Unbroken ÷ Dynamo | 16 | ≤ 0.4 | 0.5 | no |" in document([one], {}, [])


def test_every_goal_is_about_a_figure_of_the_page() -> None:
    for goal in GOALS:
        part = SHOWN[goal.part]
        assert goal.figure in part.figures
        assert {goal.system, goal.other or goal.system} <= set(part.systems)
