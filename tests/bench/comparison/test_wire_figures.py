"""The figures of a wire are per token, on as many connections as it has, and are those that the report shows."""

import pytest

from bench.clients.wrk import Load
from bench.comparison.report import PARTS
from bench.comparison.rounds import BARE_H2, ECHO, GRPC, GRPC_EACH, HTTP_1, HTTP_2
from bench.comparison.systems import ours
from bench.comparison.wire_figures import COLUMNS, OWN, connections, first_token_figures, wire_figures
from bench.floor.bare_grpc import serving_bare_grpc
from bench.floor.bare_h2 import serving_bare_h2
from bench.measure.errors import BenchError

LOAD = Load(streams=4, answers=2, tokens=30)
SHOWN = {part.name: part.figures.keys() for part in PARTS}


@pytest.mark.parametrize(("name", "serving"), [(ECHO, serving_bare_grpc), (BARE_H2, serving_bare_h2)])
def test_bare_servers_send_each_token_by_itself(name: str, serving: type) -> None:
    with serving(LOAD.tokens, 0.5) as (address, pid):
        figures = wire_figures(address, pid, COLUMNS[name], LOAD)

    assert figures["tokens_per_item"] == 1
    assert figures["cpu_us_per_token"]


def test_every_wire_of_a_frontend_is_measured() -> None:
    with ours(2.0) as running:
        seen = {}
        for name in OWN:
            column = COLUMNS[name]
            figures = wire_figures(running.at(column.kind), running.pid, column, LOAD)
            first = first_token_figures(running.at(column.kind), column, LOAD)
            seen[name] = {**figures, **first}

    for figures in seen.values():
        assert SHOWN["wires"] | SHOWN["wires_saturated"] <= figures.keys()
        assert [name for name, value in figures.items() if not value] in ([], ["first_token_ms_p99"])  # Of few probes.


@pytest.mark.parametrize(("name", "expected"), [(HTTP_1, 64), (GRPC_EACH, 64), (GRPC, 8), (HTTP_2, 8)])
def test_streams_share_up_to_eight_connections_or_have_one_each(name: str, expected: int) -> None:
    assert connections(COLUMNS[name], Load(64, 1, 1)) == expected
    assert connections(COLUMNS[name], Load(2, 1, 1)) == 2


def test_answers_that_are_not_complete_are_an_error() -> None:
    with serving_bare_grpc(5, 0.5) as (address, pid), pytest.raises(BenchError, match="answers over http1: "):
        wire_figures(address, pid, COLUMNS[HTTP_1], LOAD)
