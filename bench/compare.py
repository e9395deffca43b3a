"""Compare this frontend with its peers: CPU cost per token, latency and evenness of tokens, and the effect of a lost
worker. Compare its wires with each other and with bare servers.

    python -m bench.compare --streams 1,16,64,256,512,1024 --rounds 3

The systems alternate. For each part of each round a system is started afresh, with no process of the other running;
it does the same work and is stopped. Prints a Markdown page and writes it to `latest.md`, all figures of all rounds to
`latest.json`, and a chart to `latest.png`. A part that fails is named on the page, and the rest continues: without a
peer its columns stay empty. The exit status is 1 if anything other than a peer failed. The page names the goals, and
which are met.
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bench.clients.wrk import Load, require_wrk
from bench.comparison.comparison import SATURATED_ITL_MS, Comparison, Plan
from bench.comparison.plot import draw
from bench.comparison.report import document
from bench.comparison.rounds import OURS, PEER, SMG
from bench.comparison.systems import ITL_MS, WORKERS, why_missing
from bench.measure.conditions import command, machine
from bench.measure.errors import BenchError

Command = Callable[..., Any]
TOKENS_MAX = 410_000
"""Tokens in one run at most: about ten seconds for a saturated frontend."""
RESULTS = Path(__file__).parent / "results"


def load_for(streams: int, seconds: float, tokens: int) -> Load:
    """Return as many answers as fit into `seconds` on an undisturbed stream, at most TOKENS_MAX tokens in all."""
    answers = min(round(seconds * 1e3 / (tokens * ITL_MS)), TOKENS_MAX // (streams * tokens))
    return Load(streams, max(1, answers), tokens)


def parse_streams(text: str) -> list[int]:
    """Parse a list of numbers. Raises click.BadParameter unless all are positive and separated by commas."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{text!r} is not a list like 16,64,256")
    return [int(word) for word in words]


def about(comparison: Comparison, load_before: float) -> dict[str, str]:
    """Return what a reader must know about how the figures were measured."""
    load = comparison.plan.saturated
    versions = comparison.versions | {"Python": platform.python_version()}
    return {
        "machine": machine(),
        "load average before": f"{load_before:.2f}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "setup": f"{WORKERS} mockers at {ITL_MS:g} ms per token ({SATURATED_ITL_MS:g} ms where saturated), answers of "
        f"{load.tokens} tokens; clients on the same machine",
        "an event of Unbroken's": f"{comparison.bytes_per_event} bytes",
        "command": command("bench.compare"),
    }


def write(folder: Path, comparison: Comparison, load_before: float) -> str:
    """Write the page, the figures and the chart to the folder. Returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        draw(comparison.rounds, folder / "latest.png")
    except ImportError as error:
        comparison.failures.append(f"the chart: {error}")
    facts = about(comparison, load_before)
    page = document(comparison.rounds, facts, comparison.failures)
    (folder / "latest.md").write_text(page, encoding="utf-8")
    whole = {"about": facts, "failures": comparison.failures, "rounds": [asdict(one) for one in comparison.rounds]}
    (folder / "latest.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return page


def streams_option(name: str, default: str, about: str) -> Callable[[Command], Command]:
    return click.option(name, default=default, callback=lambda *given: parse_streams(given[-1]), help=about)


@click.command(help="Compare this frontend with its peers.", context_settings={"show_default": True})
@streams_option("--streams", "1,16,64,256,512,1024", "Concurrent streams; over all wires only those up to 256.")
@streams_option("--lost-streams", "100,200", "Concurrent streams when a worker is lost.")
@click.option("--saturated-streams", type=click.IntRange(1), default=512, help="Concurrent streams on fast mockers.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds for each system; the systems alternate.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=3.6, help="Duration of each stream's answers."
)
@click.option("--tokens", type=click.IntRange(1), default=200, help="Tokens in an answer.")
@click.option(
    "--peer/--no-peer", "with_peers", default=True, help="Also measure NVIDIA Dynamo and SMG; see bench/peer."
)
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Output folder.")
def main(
    streams: list[int],
    lost_streams: list[int],
    saturated_streams: int,
    rounds: int,
    seconds: float,
    tokens: int,
    with_peers: bool,
    results: Path,
) -> None:
    load_before = os.getloadavg()[0]
    try:
        require_wrk()
    except BenchError as error:
        sys.exit(f"error: {error}")
    missing = {name: why_missing(name) if with_peers else f"{name}: not requested" for name in (PEER, SMG)}
    plan = Plan(
        loads=[load_for(number, seconds, tokens) for number in streams],
        saturated=load_for(saturated_streams, seconds * ITL_MS / SATURATED_ITL_MS, tokens),
        lost=lost_streams,
        systems=[OURS, *(name for name, why in missing.items() if why is None)],
        overload_s=seconds,
    )
    comparison = Comparison(plan, failures=[why for why in missing.values() if why is not None])
    for _ in range(rounds):
        comparison.run_round()
    click.echo(write(results, comparison, load_before))
    sys.exit(0 if comparison.is_complete else 1)


if __name__ == "__main__":
    main()
