"""What processes tell Prometheus, all of it at one moment, and what each must tell when nothing is under way."""

import asyncio
from dataclasses import dataclass

import aiohttp

from tests.integration.harness.plane.processes import Process, sum_of
from tests.integration.harness.waiting import until

GAUGES = (
    "dynamo_engine_request",
    "dynamo_request_queue",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_worker_active_decode_blocks",
    "dynamo_frontend_worker_active_prefill_tokens",
)
"""Of all processes; one that has not got a gauge shows 0."""
STEPS = "unbroken_engine_steps_total"


@dataclass(frozen=True)
class Metrics:
    """One scrape of one process, and after it what a played engine itself says: see Process.work_file."""

    text: str

    def sum(self, name: str, **labels: str) -> float:
        """Of a metric's samples with these labels, 0 without any."""
        return sum_of(self.text, name, **labels)

    @property
    def prompt_tokens(self) -> float:
        """What a worker's engine has computed of prompts so far, by the engine's own word where there is one."""
        return self.sum("tllm_fake_prompt_tokens") or self.sum("unbroken_engine_prefill_tokens_total")

    @property
    def generated_tokens(self) -> float:
        """Of answers, what a worker's engine has told."""
        return self.sum("unbroken_engine_generated_tokens_total")

    @property
    def answer_tokens(self) -> float:
        """Of answers, like `prompt_tokens`."""
        return self.sum("tllm_fake_answer_tokens") or self.generated_tokens

    @property
    def engine_tokens(self) -> float:
        """Both."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def running(self) -> float:
        return self.sum("dynamo_engine_request")

    @property
    def waiting(self) -> float:
        return self.sum("dynamo_request_queue")


async def read_metrics(process: Process) -> Metrics:
    """What it tells now."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{process.metrics_address}/metrics") as response,
    ):
        text = await response.text()
    work = process.work_file.read_text() if process.work_file.exists() else ""
    return Metrics(text + work)


async def nonzero_gauges(*processes: Process) -> dict[tuple[str, str], float]:
    """Those that are not 0, by the process's and the gauge's name."""
    raised: dict[tuple[str, str], float] = {}
    for process in processes:
        metrics = await read_metrics(process)
        raised |= {(process.name, gauge): metrics.sum(gauge) for gauge in GAUGES if metrics.sum(gauge)}
    return raised


async def wait_idle(*processes: Process) -> None:
    """Until every gauge of all of them is 0."""

    async def is_idle() -> bool:
        return not await nonzero_gauges(*processes)

    try:
        await until(is_idle)
    except TimeoutError as error:
        raise AssertionError(f"never quiet: {await nonzero_gauges(*processes)}") from error


async def wait_load(worker: Process, running: int, waiting: int) -> Metrics:
    """What the worker tells once so many run and so many wait there."""
    metrics_read: list[Metrics] = []

    async def is_there() -> bool:
        metrics_read[:] = [await read_metrics(worker)]
        return (metrics_read[0].running, metrics_read[0].waiting) == (running, waiting)

    try:
        await until(is_there)
    except TimeoutError as error:
        there = (metrics_read[0].running, metrics_read[0].waiting)
        raise AssertionError(f"{there} run and wait, not {(running, waiting)}") from error
    return metrics_read[0]


async def read_metrics_at_rest(worker: Process, step_s: float) -> Metrics:
    """What the worker tells once its engine has made no step for longer than one takes."""

    async def still() -> Metrics | None:
        before = await read_metrics(worker)
        await asyncio.sleep(1.5 * step_s)
        after = await read_metrics(worker)
        steps = [one.sum(STEPS) for one in (before, after)]
        return after if steps[0] == steps[1] and before.engine_tokens == after.engine_tokens else None

    metrics: Metrics = await until(still)
    return metrics
