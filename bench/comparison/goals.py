"""The goals of the figures, and whether the rounds have met them."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.comparison.overload_figures import CLIENTS
from bench.comparison.rounds import (
    ECHO,
    GRPC,
    GRPC_EACH,
    HTTP_1,
    OURS,
    PEER,
    SMG,
    Round,
    Spread,
    ratios,
    spread,
    values,
)


@dataclass(frozen=True)
class Goal:
    """One row of the table. `other`: what the figure is divided by, in the same round; None: the figure itself counts.

    `row`: of the part. `is_floor`: the bound must be reached, rather than kept.
    """

    title: str
    part: str
    row: str
    figure: str
    system: str
    bound: float
    other: str | None = None
    is_floor: bool = False

    def seen(self, rounds: Sequence[Round]) -> Spread | None:
        ours = values(rounds, self.part, self.row, self.system, self.figure)
        if self.other is None:
            return spread(ours)
        return spread(ratios(ours, values(rounds, self.part, self.row, self.other, self.figure)))

    def is_met(self, seen: Spread) -> bool:
        """Whether the median meets the bound."""
        return seen.median >= self.bound if self.is_floor else seen.median <= self.bound


def per_token(part: str, system: str, other: str, bounds: dict[str, float]) -> list[Goal]:
    """Return goals of the CPU per token. `bounds`: by number of streams."""
    title = f"CPU per token, {system} ÷ {other}"
    return [Goal(title, part, row, "cpu_us_per_token", system, bound, other) for row, bound in bounds.items()]


def at(streams: Sequence[str], bound: float) -> dict[str, float]:
    return dict.fromkeys(streams, bound)


ALL, MANY = ("16", "64", "256"), ("64", "256")
GOALS = (
    *per_token("wires", GRPC, HTTP_1, at(MANY, 0.9)),
    *per_token("wires", GRPC_EACH, HTTP_1, at(MANY, 1.2)),
    *per_token("wires", GRPC, ECHO, {"16": 0.6, "64": 0.4, "256": 0.25}),
    Goal(
        f"tokens per second and core, {GRPC} ÷ {ECHO}",
        "wires_saturated", "256", "tokens_per_core_s", GRPC, 4.0, ECHO, is_floor=True,
    ),
    Goal(f"time to first token p99, {GRPC} ÷ {HTTP_1}", "wires", "256", "first_token_ms_p99", GRPC, 1.1, HTTP_1),
    Goal("CPU of a refused rpc, µs", "overload", str(CLIENTS), "cpu_us_each", GRPC, 250.0),
    Goal("time to refuse an rpc p99, ms", "overload", str(CLIENTS), "refused_ms_p99", GRPC, 20.0),
    *per_token("http", OURS, SMG, at(ALL, 0.7)),
    *per_token("http", OURS, PEER, at(ALL, 0.4)),
    *(Goal(f"CPU per event, {OURS} ÷ {PEER}", "http", row, "cpu_us_per_event", OURS, 1.0, PEER) for row in ALL),
)  # fmt: skip


def goal_lines(rounds: Sequence[Round]) -> list[str]:
    """Return the lines of a Markdown table, without those that have no figure at all; empty if none has."""
    lines = []
    for goal in GOALS:
        if (seen := goal.seen(rounds)) is not None:
            sign, verdict = "≥" if goal.is_floor else "≤", "yes" if goal.is_met(seen) else "no"
            lines.append(f"| {goal.title} | {goal.row} | {sign} {goal.bound:g} | {seen} | {verdict} |")
    head = ["| goal | streams or clients | bound | seen | met |", "| --- | ---: | ---: | ---: | --- |"]
    return [*head, *lines] if lines else []
