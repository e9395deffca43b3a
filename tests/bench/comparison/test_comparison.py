"""A comparison continues after a part that fails, and keeps what was measured before the failure."""

from collections.abc import Sequence

import pytest

from bench.clients.wrk import Load
from bench.comparison.comparison import Add, Comparison, Plan
from bench.comparison.rounds import OURS, PEER, SMG, Round
from bench.measure.errors import BenchError


def test_all_wires_are_measured_up_to_their_maximum_of_streams() -> None:
    loads = [Load(streams, 1, 10) for streams in (1, 256, 512)]

    assert [load.streams for load in Plan(loads, loads[0], [], [OURS]).wire_loads] == [1, 256]


@pytest.mark.parametrize(("streams", "expected"), [((1, 16, 64, 256, 512), [64, 256]), ((2,), [2])])
def test_streams_that_can_be_resumed_are_measured_with_the_largest_loads_of_streams(
    streams: Sequence[int], expected: Sequence[int]
) -> None:
    loads = [Load(number, 1, 10) for number in streams]

    assert [load.streams for load in Plan(loads, loads[0], [], [OURS]).kept_loads] == expected


@pytest.mark.parametrize("system", [OURS, PEER, SMG])
def test_part_that_fails_is_reported_and_only_a_peer_may_fail(system: str) -> None:
    comparison = Comparison(Plan([], Load(1, 1, 1), [], [system]), rounds=[Round()])

    def fails(add: Add) -> None:
        add(16, {"tokens_per_s": 5.0})
        raise BenchError("no such thing")

    comparison.measure_part("saturated", system, fails)

    assert comparison.failures == [f"round 1, saturated, {system}: no such thing"]
    assert comparison.is_complete == (system != OURS)
    assert comparison.rounds[0].get("saturated", "16", system, "tokens_per_s") == 5.0
