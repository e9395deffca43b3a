"""Kill one worker after another with SIGKILL under load, and count what the clients notice.

    python -m bench.kill_loop --kills 500

Once per second a worker is killed and another is started in its place, while `--streams` clients send requests without
pause, over gRPC, SSE and unary HTTP. Each answer is compared with the answer to the same request before the first kill:
text, token ids, finish reason and usage. The last line shows the counts. The exit status is 1 if any answer was lost or
wrong.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path

import click

from bench.measure.quantiles import quantiles_ms
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, outcome, run_together
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process

TOKENS = 150
ITL_MS = 10
"""An answer takes 1.5 s, so one or two kills fall into it, and not every kill hits its worker."""
SEEDS = 4
REPORT_EVERY = 20
REQUESTS = [
    Request(protocol, is_chat=is_chat, temperature=temperature, seed=seed, prompt=f"Prompt {seed}", max_tokens=TOKENS)
    for protocol, is_chat, temperature, seed in product(PROTOCOLS, (False, True), (0.0, 0.8), range(SEEDS))
]


@dataclass
class Counters:
    """What the clients observed. `gaps_s`: for each streamed answer, the longest time between two tokens."""

    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    first_of_kind: dict[str, str] = field(default_factory=dict)

    def record(self, kind: str, what: str) -> None:
        """Count one more problem of this kind. The first of each kind is printed at the end."""
        self.counts[kind] += 1
        self.first_of_kind.setdefault(kind, what)

    @property
    def is_clean(self) -> bool:
        return not self.counts["lost"] and not self.counts["wrong"]

    def __str__(self) -> str:
        shown = ", ".join(f"{kind} {self.counts[kind]}" for kind in ("requests", "lost", "wrong", "poison"))
        gaps = ", ".join(f"{name} {gap_ms} ms" for name, gap_ms in quantiles_ms(self.gaps_s).items())
        return f"kills {self.kills}, {shown}, longest gap of an answer {gaps}"


@dataclass
class Gap:
    """Measures the longest time between two tokens of one answer."""

    longest_s: float = 0.0
    last_at: float | None = None

    def __call__(self, _: int) -> None:
        now = time.monotonic()
        if self.last_at is not None:
            self.longest_s = max(self.longest_s, now - self.last_at)
        self.last_at = now


@dataclass(frozen=True)
class Load:
    """Clients that send requests without pause until `is_over` is set."""

    plane: Plane
    expected: Mapping[int, Answer]
    counters: Counters
    is_over: asyncio.Event
    numbers: Iterator[int] = field(default_factory=count)

    async def run_client(self) -> None:
        while not self.is_over.is_set():
            number = next(self.numbers)
            await self._send(number % len(REQUESTS), f"loop-{number}")

    async def _send(self, index: int, request_id: str) -> None:
        gap = Gap()
        got = await outcome(self.plane.frontend, REQUESTS[index].named(request_id), gap)
        self.counters.counts["requests"] += 1
        if isinstance(got, Refused):
            self.counters.record("lost", f"{request_id}: {got}")
            if got.reason == "POISON_REQUEST":
                self.counters.record("poison", request_id)
        elif got != self.expected[index]:
            self.counters.record("wrong", f"{request_id}: {got} instead of {self.expected[index]}")
        elif REQUESTS[index].protocol != "unary":
            self.counters.gaps_s.append(gap.longest_s)


async def start_workers(plane: Plane, number: int) -> list[Process]:
    return await run_together(plane.worker(f"--mocker-itl-ms={ITL_MS}") for _ in range(number))


async def kill_in_turn(
    plane: Plane, workers: Sequence[Process], kills: int, period_s: float, counters: Counters
) -> None:
    """Kill one worker every `period_s`, and start another in its place at once."""
    alive = list(workers)
    for number in range(1, kills + 1):
        await asyncio.sleep(period_s)
        alive.pop(0).kill()
        alive.append(plane.launch(f"--mocker-itl-ms={ITL_MS}"))
        counters.kills = number
        if number % REPORT_EVERY == 0:
            print(counters, flush=True)


async def run(plane: Plane, workers: int, streams: int, kills: int, period_s: float) -> Counters:
    alive = await start_workers(plane, workers)
    answers = await run_together(answer(plane.frontend, request) for request in REQUESTS)
    load = Load(plane, dict(enumerate(answers)), Counters(), asyncio.Event())
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(load.run_client())
        await kill_in_turn(plane, alive, kills, period_s, load.counters)
        load.is_over.set()
    return load.counters


def run_with(fork_server: ForkServer, folder: Path, **options: float) -> Counters:
    plane = Plane(fork_server, folder)
    try:
        return asyncio.run(run(plane, **options))  # type: ignore[arg-type]  # click gives the right types
    finally:
        plane.close()


@click.command(help="Kill workers under load, and count what clients notice.", context_settings={"show_default": True})
@click.option("--kills", type=click.IntRange(1), default=500)
@click.option("--workers", type=click.IntRange(2), default=4)
@click.option("--streams", type=click.IntRange(1), default=64, help="Concurrent clients.")
@click.option("--period-s", type=click.FloatRange(0, min_open=True), default=1.0, help="Seconds between two kills.")
def main(**options: float) -> None:
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        counters = run_with(fork_server, Path(folder), **options)
    for kind, what in counters.first_of_kind.items():
        print(f"the first {kind}: {what}")
    print(counters)
    sys.exit(0 if counters.is_clean else 1)


if __name__ == "__main__":
    main()
