"""Keepalive: a client that says nothing and takes nothing is asked once, and is then taken for gone."""

from collections.abc import Sequence

import pytest

from services.http.h2.bounds.keepalive import Keepalive
from tests.support.doubles import run_async

SILENT, SAYS, TAKES = "silent", "says something", "takes something"
"""What a client does between two looks."""


@pytest.mark.parametrize(
    ("does", "pings", "is_lost"),
    [
        pytest.param([SILENT] * 2, 1, False, id="is asked after two looks"),
        pytest.param([SILENT] * 3, 1, True, id="is gone after the third"),
        pytest.param([SILENT, SILENT, SAYS], 1, False, id="answers"),
        pytest.param([SILENT, SILENT, TAKES], 1, False, id="takes the PING without an answer"),
        pytest.param([SILENT, SILENT, TAKES, SILENT, SILENT, SILENT], 2, True, id="goes later"),
        pytest.param([SAYS, TAKES] * 5, 0, False, id="is there"),
    ],
)
def test_client_is_judged_by_what_it_says_and_takes(does: Sequence[str], pings: int, is_lost: bool) -> None:
    async def test() -> None:
        pinged, lost, taken = [], [], [0]
        watch = Keepalive(lambda: pinged.append(1), lambda: lost.append(1), lambda: taken[0])

        for one in does:
            watch.is_heard = one == SAYS
            taken[0] += one == TAKES
            watch._timer.cancel()
            watch._look()
        watch.stop()

        assert (len(pinged), bool(lost)) == (pings, is_lost)

    run_async(test())
