"""What several rounds come to: medians with their ranges, ratios of one round each, as a Markdown table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.load import Figures

OURS, PEER = "unbroken", "dynamo"
FIGURES = {
    "cpu_us_per_token": "frontend CPU, µs per token",
    "tokens_per_s": "tokens per second",
    "first_token_ms_p50": "time to first token p50, ms",
    "first_token_ms_p99": "time to first token p99, ms",
}
CPU = "cpu_us_per_token"
MISSING = "—"

Rounds = Mapping[int, Mapping[str, Sequence[Figures]]]
"""By streams at a time, then by system: its figures of each round. A system that was not there has none."""
Sends = Mapping[int, Sequence[float]]
"""By streams at a time: CPU µs of a bare send in each round."""


@dataclass(frozen=True)
class Spread:
    """The median of some values, and their range."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        shown = [_shown(value) for value in (self.median, self.least, self.most)]
        return f"{shown[0]} ({shown[1]} to {shown[2]})"


def spread(values: Sequence[float]) -> Spread | None:
    """None of no values."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ours to theirs, round by round: the machine drifts, and less within a round than from the first to the last."""
    return [one / other for one, other in zip(ours, others, strict=False) if other]


def table(rounds: Rounds, sends_us: Sends) -> str:
    """Of each number of streams: a line for each figure, the first of them in bare sends as well."""
    lines = ["| streams | figure | Unbroken | Dynamo | ratio |", "| ---: | --- | ---: | ---: | ---: |"]
    for streams, systems in rounds.items():
        for name, title in FIGURES.items():
            ours, others = ([getattr(one, name) for one in systems.get(system, ())] for system in (OURS, PEER))
            lines.append(_line(streams, title, [ours, others, ratios(ours, others)]))
            if name == CPU:
                in_sends = [ratios(values, sends_us[streams]) for values in (ours, others)]
                lines.append(_line(streams, "the same in bare sends", [*in_sends, []]))
    return "\n".join(lines)


def _line(streams: int, title: str, cells: Sequence[Sequence[float]]) -> str:
    return f"| {streams} | {title} | {' | '.join(str(spread(values) or MISSING) for values in cells)} |"


def document(rounds: Rounds, sends_us: Sends, about: Mapping[str, str]) -> str:
    """The whole report. about: what was measured, where and with what, a line each."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    sends = ", ".join(f"{spread(values)} µs at {streams} streams" for streams, values in sends_us.items())
    return f"""# Side by side

{facts}

Medians of the rounds, and their range in parentheses. A ratio is Unbroken's figure to Dynamo's in the same round.
While nothing is saturated, tokens per second are the mockers' own: Dynamo's takes somewhat longer than 6 ms for one.

A bare send is one event of Unbroken's written to a loopback socket: {sends}.

{table(rounds, sends_us)}
"""


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
