"""Kill a frontend under kept streams, come back to the other one, and measure what the clients notice.

    python -m bench.frontend_loss --streams 100

Two frontends, two workers. All clients stream from the first frontend with `x-on-disconnect: continue`, half of them
over SSE and half over gRPC. It is killed with SIGKILL in the middle, and the clients go on at the second one, with
their cursor and at once. Each answer is compared with that of an undisturbed run: text, finish reason, log
probabilities and usage. The workers' own counters say whether a prompt or a token was computed twice. The last line
shows the counts. The exit status is 1 if an answer was lost or wrong, or something was computed twice.
"""

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from bench.clients.kept_streams import KeptRpc, KeptSse, KeptStream
from bench.measure.quantiles import quantiles_ms
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process

TOKENS = 200
ITL_MS = 20
KILL_AFTER = 60
"""Arrivals of tokens at the slowest client after which the frontend is killed."""
TRIES_MAX = 10
WIRES = ("sse", "grpc")


def clients(streams: int, wires: Sequence[str]) -> list[KeptStream]:
    kinds: dict[str, type[KeptSse | KeptRpc]] = {"sse": KeptSse, "grpc": KeptRpc}
    return [kinds[wire](number, TOKENS, KILL_AFTER) for wire in wires for number in range(streams)]


async def run_client(client: KeptStream, first: Frontend, second: Frontend) -> None:
    """Stream from the first frontend, and come back to the second one as often as the connection breaks."""
    with suppress(OSError):  # The frontend was killed.
        await client.begin(client.address_of(first))
    for _ in range(TRIES_MAX):
        if client.is_complete:
            return
        await client.resume(client.address_of(second))


async def engine_counts(workers: Sequence[Process]) -> tuple[float, float]:
    """Prompt tokens computed and tokens drawn, by all workers."""
    names = ("unbroken_engine_prefill_tokens_total", "unbroken_engine_generated_tokens_total")
    prefill, generated = [sum([await worker.metric(name) for worker in workers]) for name in names]
    return prefill, generated


@dataclass(frozen=True)
class Loss:
    """What the clients of the frontend that was killed have noticed, and what the engines have computed twice.

    `gaps_ms`: quantiles of the longest gap of each answer. `calm_gaps_ms`: the same of the undisturbed run.
    """

    streams: int
    resumed: int
    complete: int
    equal: int
    prompt_tokens_twice: float
    tokens_twice: float
    gaps_ms: Mapping[str, float]
    calm_gaps_ms: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        return self.complete == self.equal == self.streams and not (self.prompt_tokens_twice or self.tokens_twice)

    def __str__(self) -> str:
        both = (self.gaps_ms, self.calm_gaps_ms)
        shown = [", ".join(f"{name} {gap_ms} ms" for name, gap_ms in one.items()) for one in both]
        return (
            f"streams {self.streams}, resumed {self.resumed}, complete {self.complete}, equal {self.equal}, "
            f"computed twice: {self.prompt_tokens_twice:g} prompt tokens and {self.tokens_twice:g} tokens, "
            f"longest gap of an answer {shown[0]} (undisturbed {shown[1]})"
        )


async def measure(plane: Plane, streams: int, wires: Sequence[str]) -> Loss:
    """Run the clients undisturbed, then again with the loss of their frontend."""
    first, second = plane.frontend, await asyncio.to_thread(plane.start_frontend)
    options = (f"--mocker-itl-ms={ITL_MS}", "--metrics-port=0", "--engine-request-limit=512")
    workers = await run_together(plane.worker(*options) for _ in range(2))
    undisturbed, kept = clients(streams, wires), clients(streams, wires)
    await run_together(second.logged("worker found", instance=worker.ready["instance_id"]) for worker in workers)
    await run_together(run_client(client, second, second) for client in undisturbed)
    before = await engine_counts(workers)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_client(client, first, second)) for client in kept]
        await run_together(client.has_begun_well.wait() for client in kept)
        first.kill()
        await asyncio.wait(tasks)
    after = await engine_counts(workers)
    prompt_tokens_twice, tokens_twice = [late - 2 * early for late, early in zip(after, before, strict=True)]
    return Loss(
        streams=len(kept),
        resumed=sum(client.resumes > 0 for client in kept),
        complete=sum(client.is_complete for client in kept),
        equal=sum(mine.answer() == other.answer() for mine, other in zip(kept, undisturbed, strict=True)),
        prompt_tokens_twice=prompt_tokens_twice,
        tokens_twice=tokens_twice,
        gaps_ms=quantiles_ms([client.longest_gap_s for client in kept]),
        calm_gaps_ms=quantiles_ms([client.longest_gap_s for client in undisturbed]),
    )


@click.command(help="Kill a frontend under kept streams, and measure what clients notice.")
@click.option("--streams", type=click.IntRange(1), default=100, show_default=True, help="Clients of each wire.")
@click.option("--wires", default=",".join(WIRES), show_default=True, help="What the clients speak.")
def main(streams: int, wires: str) -> None:
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        plane = Plane(fork_server, Path(folder))
        try:
            loss = asyncio.run(measure(plane, streams, wires.split(",")))
        finally:
            plane.close()
    click.echo(str(loss))
    sys.exit(0 if loss.is_right else 1)


if __name__ == "__main__":
    main()
