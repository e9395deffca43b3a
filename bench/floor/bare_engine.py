"""The cost of the mocker itself, per token: two engines as in two workers, each alone in a process.

    python -m bench.floor.bare_engine SEQUENCES TOKENS ITL_MS

What two workers cost beyond that is the request plane's: requests, sessions, load reports, and sending to the frontend.
"""

import asyncio
import sys
import time
from collections.abc import Sequence

from bench.clients.requests import MODEL, PROMPT, SPLIT_CHARACTERS
from bench.clients.wrk import Load
from bench.measure.child_process import ChildProcess, send
from services.core.request import Request, Sampling, Stop
from services.runtime.loop import run_on_loop
from services.worker.engine import Output
from services.worker.engines.mocker import MockerConfig, MockerEngine

ENGINES = 2


def engine_us(load: Load, itl_ms: float) -> float:
    """Return the CPU microseconds per token, with one answer for each stream. Raises BenchError if an engine fails."""
    counts = [count for count in streams_per_engine(load.streams) if count]
    cpu_s = []
    for count in counts:
        with ChildProcess("floor.bare_engine", count, load.tokens, itl_ms) as child:
            cpu_s.append(float(child.receive()))
    return sum(cpu_s) * 1e6 / (load.streams * load.tokens)


def streams_per_engine(streams: int) -> list[int]:
    """Divide the streams evenly among the engines."""
    return [(streams + number) // ENGINES for number in range(ENGINES)]


def request(tokens: int) -> Request:
    """Return the request of bench.clients.requests as it arrives at a worker."""
    return Request(
        model=MODEL,
        token_ids=tuple(PROMPT.encode()),
        sampling=Sampling(temperature=0.0, seed=1),
        stop=Stop(max_tokens=tokens, min_tokens=tokens, token_ids=SPLIT_CHARACTERS, ignore_eos=True),
    )


async def run(sequences: int, tokens: int, itl_ms: float) -> float:
    """Run one engine with this many sequences; return the CPU seconds."""
    engine = MockerEngine(MockerConfig(itl_ms=itl_ms))
    is_ready, is_over = asyncio.Event(), asyncio.Event()
    left = sequences

    def emit(outputs: Sequence[Output]) -> None:
        nonlocal left
        left -= sum(output.finish is not None for output in outputs)
        if not left:
            is_over.set()

    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run(emit, is_ready))
        await is_ready.wait()
        for key in range(sequences):
            engine.submit(key, request(tokens))
        before_s = time.process_time()
        await is_over.wait()
        cpu_s = time.process_time() - before_s
        running.cancel()
    return cpu_s


if __name__ == "__main__":
    send(run_on_loop(run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
