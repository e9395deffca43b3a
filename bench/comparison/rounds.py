"""The figures of each round, and what follows from them: medians with their ranges, and ratios within a round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS, PEER, SMG, MACHINE = "Unbroken", "Dynamo", "SMG", "this machine"
GRPC, GRPC_EACH, HTTP_1, HTTP_2 = "gRPC", "gRPC, one each", "HTTP/1.1", "HTTP/2"
ECHO, BARE_H2 = "bare grpc.aio", "bare HTTP/2"
KEPT, NOT_KEPT = "can be resumed", "cannot"

Figures = Mapping[str, float | None]
"""By name. None: too few values to tell."""
Values = Sequence[float | None]
"""One value for each round."""


@dataclass
class Round:
    """`parts`: figures by part, row and system. A system that was missing or failed has none."""

    parts: dict[str, dict[str, dict[str, dict[str, float | None]]]] = field(default_factory=dict)

    def add(self, part: str, row: object, system: str, figures: Figures) -> None:
        self.parts.setdefault(part, {}).setdefault(str(row), {}).setdefault(system, {}).update(figures)

    def get(self, part: str, row: str, system: str, figure: str) -> float | None:
        return self.parts.get(part, {}).get(row, {}).get(system, {}).get(figure)

    def derive(self) -> None:
        """Add the figures that follow from several others of the round."""
        for row, systems in self.parts.get("http", {}).items():
            send_us = self.get("floor", row, MACHINE, "send_us")
            engine_us = self.get("floor", row, MACHINE, "engine_us")
            for figures in systems.values():
                figures["cpu_in_sends"] = ratio(figures.get("cpu_us_per_token"), send_us)
            if OURS in systems:
                systems[OURS]["plane_us_per_token"] = difference(systems[OURS].get("workers_us_per_token"), engine_us)


def rows(rounds: Sequence[Round], part: str) -> list[str]:
    """Return the rows in the order in which they first appear."""
    return list(dict.fromkeys(row for one in rounds for row in one.parts.get(part, {})))


def values(rounds: Sequence[Round], part: str, row: str, system: str, figure: str) -> list[float | None]:
    return [one.get(part, row, system, figure) for one in rounds]


def ratio(one: float | None, other: float | None) -> float | None:
    """Return None if either value is missing or the divisor is 0."""
    return None if one is None or not other else one / other


def difference(one: float | None, other: float | None) -> float | None:
    """Return the difference; None if either value is missing."""
    return None if one is None or other is None else one - other


def ratios(ours: Values, others: Values) -> list[float | None]:
    """Return the ratios round by round: the machine's speed drifts less within a round than between rounds."""
    return [ratio(one, other) for one, other in zip(ours, others, strict=True)]


@dataclass(frozen=True)
class Spread:
    """The median of some values, and their range."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        median, least, most = (_shown(value) for value in (self.median, self.least, self.most))
        return median if least == most else f"{median} ({least} to {most})"


def spread(values: Values) -> Spread | None:
    """Ignores missing values. Returns None if all are missing."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
