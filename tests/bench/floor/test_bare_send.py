"""The bare server sends events of the requested size and does nothing else."""

import shutil

import pytest

from bench.clients.wrk import Load
from bench.floor.bare_send import event_of, send_us

LOAD = Load(streams=3, answers=2, tokens=5)


@pytest.mark.parametrize("size", [20, 40, 200, 255, 262, 300])
def test_event_has_exactly_the_requested_size_and_a_correct_chunk_header(size: int) -> None:
    event = event_of(size)

    head, _, rest = event.partition(b"\r\n")
    assert len(event) == size
    assert len(rest) == int(head, 16) + len(b"\r\n")
    assert rest[:7] == b"data: x"
    assert rest[-4:] == b"\n\n\r\n"


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_bare_send_takes_time_and_its_server_ends_with_the_load() -> None:
    assert send_us(LOAD, size=200, itl_ms=0.5, pause_us=1.0) > 0
