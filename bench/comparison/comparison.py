"""One comparison: its rounds, the parts of each round, and the parts that failed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException

import click

from bench.clients.wrk import Load, wire_bytes_per_event
from bench.comparison.http_figures import probed, steady
from bench.comparison.kept_figures import frontend_loss_figures, kept_figures
from bench.comparison.overload_figures import CLIENTS, overload_figures
from bench.comparison.rounds import (
    BARE_H2,
    ECHO,
    GRPC,
    HTTP_1,
    KEPT,
    MACHINE,
    NOT_KEPT,
    OURS,
    PEER,
    SMG,
    Figures,
    Round,
)
from bench.comparison.systems import ITL_MS, SYSTEMS, Running
from bench.comparison.wire_figures import COLUMNS, OWN, first_token_figures, wire_figures
from bench.comparison.wire_figures import STREAMS_MAX as WIRE_STREAMS_MAX
from bench.comparison.worker_loss import SIGNALS, measure_worker_loss
from bench.floor.bare_engine import engine_us
from bench.floor.bare_grpc import serving_bare_grpc
from bench.floor.bare_h2 import serving_bare_h2
from bench.floor.bare_send import FRONTEND_PAUSE_US, send_us
from bench.measure.errors import BenchError
from bench.measure.process_usage import memory_kib

SATURATED_ITL_MS = 1.0
KEPT_LOADS, KEPT_STREAMS_MAX = 2, 256

Add = Callable[[object, Figures], None]
"""Takes the figures of one row."""
BARE = {ECHO: serving_bare_grpc, BARE_H2: serving_bare_h2}
PEERS = (PEER, SMG)
"""Systems that may be missing."""


@dataclass(frozen=True)
class Plan:
    """What to measure. `loads`: over HTTP, by number of streams. `lost`: numbers of streams when a worker is lost.

    `overload_s`: how long to refuse requests over each wire.
    """

    loads: Sequence[Load]
    saturated: Load
    lost: Sequence[int]
    systems: Sequence[str]
    overload_s: float = 5.0

    @property
    def tokens(self) -> int:
        return self.saturated.tokens

    @property
    def wire_loads(self) -> list[Load]:
        return [load for load in self.loads if load.streams <= WIRE_STREAMS_MAX]

    @property
    def kept_loads(self) -> list[Load]:
        """What is also measured with streams that can be resumed."""
        return [load for load in self.loads if load.streams <= KEPT_STREAMS_MAX][-KEPT_LOADS:]


@dataclass
class Comparison:
    """The figures so far. `failures`: the parts that could not be measured, and why."""

    plan: Plan
    rounds: list[Round] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    bytes_per_event: int = 0
    is_complete: bool = True

    def run_round(self) -> None:
        """Measure all parts. The system that goes first alternates from round to round."""
        self.rounds.append(Round())
        systems = self.plan.systems[:: -1 if len(self.rounds) % 2 == 0 else 1]
        for part, run in (("http", self._http), ("saturated", self._saturated), ("losses", self._worker_loss)):
            for name in systems:
                if part == "http" or name != SMG:  # It has no workers of its own.
                    self.measure_part(part, name, partial(run, name))
        self.measure_part("kept", KEPT, self._kept)
        self.measure_part("frontend", OURS, self._frontend_loss)
        self.measure_part("floor", MACHINE, self._floor)
        self.measure_part("wires", OURS, self._wires)
        self.measure_part("wires_saturated", OURS, self._wires_saturated)
        for name in BARE:
            self.measure_part("wires", name, partial(self._bare, name))
            self.measure_part("wires_saturated", name, partial(self._bare_saturated, name))
        self.measure_part("overload", OURS, self._overload)
        self.rounds[-1].derive()

    def measure_part(self, part: str, system: str, run: Callable[[Add], None]) -> None:
        """Measure one part of the current round. If it fails, the figures added before the failure stay."""

        def add(row: object, figures: Figures) -> None:
            self._add_to(part, row, system, figures)

        try:
            run(add)
        except (BenchError, HTTPException, OSError) as error:  # The last two: a connection broke or never answered.
            self.failures.append(f"round {len(self.rounds)}, {part}, {system}: {str(error) or type(error).__name__}")
            self.is_complete &= system in PEERS
            click.echo(self.failures[-1], err=True)

    def _http(self, name: str, add: Add) -> None:
        with SYSTEMS[name](ITL_MS) as running:
            self.versions[name] = running.version
            size = round(wire_bytes_per_event(running.url, self.plan.tokens))
            self.bytes_per_event = size if name == OURS else self.bytes_per_event
            idle_kib = memory_kib(running.pid)
            for load in self.plan.loads:
                add(load.streams, steady(running, load, idle_kib))
                add(load.streams, probed(running, load))

    def _floor(self, add: Add) -> None:
        if not self.bytes_per_event:
            raise BenchError("the size of one of our events is not known")
        for load in self.plan.loads:
            for name, pause_us in (("send_us", FRONTEND_PAUSE_US), ("burst_us", 0.0)):
                one_answer = replace(load, answers=1)
                add(load.streams, {name: send_us(one_answer, self.bytes_per_event, ITL_MS, pause_us)})
            add(load.streams, {"engine_us": engine_us(load, ITL_MS)})

    def _saturated(self, name: str, add: Add) -> None:
        with SYSTEMS[name](SATURATED_ITL_MS) as running:
            add(self.plan.saturated.streams, steady(running, self.plan.saturated, memory_kib(running.pid)))

    def _worker_loss(self, name: str, add: Add) -> None:
        for signal in SIGNALS:
            for streams in self.plan.lost:
                with SYSTEMS[name](ITL_MS) as running:
                    add(f"{signal.name}, {streams}", measure_worker_loss(running, signal, streams, self.plan.tokens))

    def _kept(self, add: Add) -> None:
        with SYSTEMS[OURS](ITL_MS) as running:
            for load in self.plan.kept_loads:
                kept, plain = kept_figures(running, load.streams, load.tokens)
                add(load.streams, kept)
                self.rounds[-1].add("kept", load.streams, NOT_KEPT, plain)

    def _frontend_loss(self, add: Add) -> None:
        for streams in self.plan.lost[:1]:
            add(streams, frontend_loss_figures(streams))

    def _wires(self, add: Add) -> None:
        with SYSTEMS[OURS](ITL_MS) as running:
            for load in self.plan.wire_loads:
                for name in OWN:
                    self._wire(running, "wires", name, load)
            for name in OWN if self.plan.wire_loads else ():
                load = self.plan.wire_loads[-1]
                self._add_to(
                    "wires",
                    load.streams,
                    name,
                    first_token_figures(running.at(COLUMNS[name].kind), COLUMNS[name], load),
                )

    def _wires_saturated(self, add: Add) -> None:
        with SYSTEMS[OURS](SATURATED_ITL_MS) as running:
            for load in self.plan.wire_loads[-1:]:
                for name in (HTTP_1, GRPC):
                    self._wire(running, "wires_saturated", name, load)

    def _wire(self, running: Running, part: str, name: str, load: Load) -> None:
        column = COLUMNS[name]
        self._add_to(part, load.streams, name, wire_figures(running.at(column.kind), running.pid, column, load))

    def _bare(self, name: str, add: Add) -> None:
        for load in self.plan.wire_loads:
            with BARE[name](load.tokens, ITL_MS) as (address, pid):
                add(load.streams, wire_figures(address, pid, COLUMNS[name], load))

    def _bare_saturated(self, name: str, add: Add) -> None:
        for load in self.plan.wire_loads[-1:]:
            with BARE[name](load.tokens, SATURATED_ITL_MS) as (address, pid):
                add(load.streams, wire_figures(address, pid, COLUMNS[name], load))

    def _overload(self, add: Add) -> None:
        for name, figures in overload_figures(self.plan.overload_s).items():
            self._add_to("overload", CLIENTS, name, figures)

    def _add_to(self, part: str, row: object, system: str, figures: Figures) -> None:
        """Add the figures of one row to the current round, and show them."""
        self.rounds[-1].add(part, row, system, figures)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
        click.echo(f"{part}, {system}, {row}: {shown}", err=True)
