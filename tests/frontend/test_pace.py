"""Pace: tokens take no more than their share of the time, and come no more than a bound later for it."""

import pytest

from services.frames import FrameConnection
from services.frontend.incoming import Incoming
from services.frontend.pace import REST_S_MAX, REST_S_MIN, TOKENS_SHARE_MAX, Pace, rest_s
from services.stubs import worker_pb2
from tests.worker.support import pass_time, run_clocked


@pytest.mark.parametrize(
    ("spent_s", "elapsed_s", "rest"),
    [
        (0.0, 60.0, 0.0),
        (0.002, 0.002 / TOKENS_SHARE_MAX, 0.0),
        (0.002, 0.001, 0.002 / TOKENS_SHARE_MAX - 0.001),
        (REST_S_MIN * TOKENS_SHARE_MAX * 0.9, 0.0, 0.0),
        (1.0, 0.0, REST_S_MAX),
    ],
    ids=["nothing to do", "just their share", "more than it", "too short to be worth it", "the bound"],
)
def test_a_rest_is_as_long_as_the_share_asks_for(spent_s: float, elapsed_s: float, rest: float) -> None:
    assert rest_s(spent_s, elapsed_s) == pytest.approx(rest)


class Resting(FrameConnection[worker_pb2.AttachResponse]):
    """A connection that notes its rests."""

    def __init__(self) -> None:
        super().__init__(worker_pb2.AttachResponse, is_opener=True)
        self.rests: list[float] = []

    def rest(self, delay_s: float) -> None:
        self.rests.append(delay_s)


def hear(incoming: Incoming) -> list[float]:
    """How long it rests after a message."""
    incoming.connect(connection := Resting())
    incoming.add([worker_pb2.AttachResponse(load=worker_pb2.Load(running=1))])
    return connection.rests


def test_a_session_rests_for_what_the_others_took_as_well() -> None:
    async def scenario() -> tuple[list[float], list[float]]:
        pace = Pace()
        incoming = Incoming(lambda _: True, pace)
        pass_time(60)
        before = hear(incoming)
        pace.spent_s += 1.0  # Of the others, since it last rested.
        return before, hear(incoming)

    before, after = run_clocked(scenario())

    assert before == []
    assert after == [REST_S_MAX]
