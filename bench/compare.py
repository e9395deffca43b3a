"""Our frontend beside the peer's, alternating round by round: what each costs for a token, and how soon tokens come.

    python -m bench.compare --streams 16,64,256,512 --rounds 3 --seconds 5

In each round each system is started afresh, with nothing of the other running, gets the same number of whole answers
for each number of streams, and is ended. Prints a Markdown table and writes it to `latest.md`, and all figures of all
rounds to `latest.json`. Without the peer its column is empty, and the report says why.
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from bench.bare_send import send_us
from bench.load import BenchError, Figures, Load, measure, require_wrk, wire_bytes_per_token
from bench.report import OURS, PEER, document
from bench.systems import ITL_MS, WORKERS, Running, System, ours, peer

RESULTS = Path(__file__).parent / "results"


@dataclass
class Comparison:
    """What was measured so far. missing: why the peer is, if it is."""

    loads: Sequence[Load]
    rounds: dict[int, dict[str, list[Figures]]] = field(default_factory=dict)
    sends_us: dict[int, list[float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    bytes_per_token: float = 0.0
    missing: str | None = None

    def run_round(self) -> None:
        """Raises BenchError if our own system fails; without the peer it goes on."""
        self._run(OURS, ours)
        self._run_sends()
        if self.missing is None:
            try:
                self._run(PEER, peer)
            except BenchError as error:
                self.missing = str(error)

    def _run_sends(self) -> None:
        for load in self.loads:
            streams_of_a_worker = max(1, load.streams // WORKERS)
            sent_us = send_us(round(self.bytes_per_token), streams_of_a_worker)
            self.sends_us.setdefault(load.streams, []).append(sent_us)

    def _run(self, name: str, system: System) -> None:
        with system() as running:
            self.versions[name] = running.version
            size = wire_bytes_per_token(running.url, self.loads[0].tokens)
            if name == OURS:
                self.bytes_per_token = size
            for load in self.loads:
                figures = self._measured(name, running, load)
                self.rounds.setdefault(load.streams, {}).setdefault(name, []).append(figures)

    def _measured(self, name: str, running: Running, load: Load) -> Figures:
        figures = measure(running.url, running.pid, load)
        click.echo(f"{name}, {load.streams} streams: {figures.cpu_us_per_token:.1f} µs per token", err=True)
        return figures


def answers_for(seconds: float, tokens: int) -> int:
    """How many answers a stream gets in so many seconds if nothing holds it up, one at least."""
    return max(1, round(seconds * 1e3 / (tokens * ITL_MS)))


def parse_streams(text: str) -> list[int]:
    """Raises click.BadParameter for anything but positive numbers with commas between."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{text!r} is not a list like 16,64,256")
    return [int(word) for word in words]


def about(comparison: Comparison, load_before: float) -> dict[str, str]:
    """What a reader must know of how the figures came about."""
    loads = comparison.loads
    versions = comparison.versions | {"Python": platform.python_version()}
    facts = {
        "machine": f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load average before": f"{load_before:.2f}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "setup": f"{WORKERS} mockers at {ITL_MS} ms per token, HTTP/SSE, answers of {loads[0].tokens} tokens, "
        f"{loads[0].answers} for each stream; clients on the same machine",
        "bare send": f"{round(comparison.bytes_per_token)} bytes, to the streams of one worker in turn",
        "command": shlex.join(["python", "-m", "bench.compare", *sys.argv[1:]]),
    }
    return facts | ({"Dynamo is missing": comparison.missing} if comparison.missing else {})


def processor() -> str:
    """As /proc/cpuinfo names it; the architecture where it does not."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write(folder: Path, comparison: Comparison, facts: Mapping[str, str], text: str) -> None:
    figures: dict[str, Any] = {
        str(streams): {name: [asdict(one) for one in rounds] for name, rounds in systems.items()}
        for streams, systems in comparison.rounds.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.md").write_text(text, encoding="utf-8")
    whole = {"about": dict(facts), "bare_send_us": comparison.sends_us, "streams": figures}
    (folder / "latest.json").write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@click.command(help="Measure our frontend beside the peer's.", context_settings={"show_default": True})
@click.option("--streams", default="16,64,256,512", callback=lambda *given: parse_streams(given[-1]), help="At a time.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Of each system, alternating.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=5.0, help="Of answers for each stream.")
@click.option("--tokens", type=click.IntRange(1), default=200, help="Of an answer.")
@click.option("--peer/--no-peer", "with_peer", default=True, help="Measure NVIDIA Dynamo too; see bench/peer.sh.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Where they go.")
def main(streams: list[int], rounds: int, seconds: float, tokens: int, with_peer: bool, results: Path) -> None:
    answers = answers_for(seconds, tokens)
    comparison = Comparison([Load(number, answers, tokens) for number in streams])
    comparison.missing = None if with_peer else "not asked for"
    load_before = os.getloadavg()[0]
    try:
        require_wrk()
        for _ in range(rounds):
            comparison.run_round()
    except BenchError as error:
        sys.exit(f"error: {error}")
    facts = about(comparison, load_before)
    text = document(comparison.rounds, comparison.sends_us, facts)
    write(results, comparison, facts, text)
    click.echo(text)


if __name__ == "__main__":
    main()
