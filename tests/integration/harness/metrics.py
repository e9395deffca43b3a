"""The Prometheus metrics of a process, read at one moment, and the values that an idle process must report."""

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
"""Gauges of all processes; a process without one of them reports 0."""
STEPS = "unbroken_engine_steps_total"


@dataclass(frozen=True)
class Metrics:
    """One scrape of a process, followed by the figures that a fake engine writes itself: see Process.work_file."""

    text: str

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 if there are none."""
        return sum_of(self.text, name, **labels)

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens that the engine has computed, from the engine itself if it reports them."""
        return self.sum("tllm_fake_prompt_tokens") or self.sum("unbroken_engine_prefill_tokens_total")

    @property
    def generated_tokens(self) -> float:
        """Answer tokens that the worker reports."""
        return self.sum("unbroken_engine_generated_tokens_total")

    @property
    def answer_tokens(self) -> float:
        """Answer tokens that the engine has computed, from the engine itself if it reports them."""
        return self.sum("tllm_fake_answer_tokens") or self.generated_tokens

    @property
    def engine_tokens(self) -> float:
        """Prompt and answer tokens together."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def running(self) -> float:
        return self.sum("dynamo_engine_request")

    @property
    def waiting(self) -> float:
        return self.sum("dynamo_request_queue")


async def read_metrics(process: Process) -> Metrics:
    """Scrape the process now."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{process.metrics_address}/metrics") as response,
    ):
        text = await response.text()
    work = process.work_file.read_text() if process.work_file.exists() else ""
    return Metrics(text + work)


async def nonzero_gauges(*processes: Process) -> dict[tuple[str, str], float]:
    """Return the gauges that are not 0, by the names of the process and the gauge."""
    raised: dict[tuple[str, str], float] = {}
    for process in processes:
        metrics = await read_metrics(process)
        raised |= {(process.name, gauge): metrics.sum(gauge) for gauge in GAUGES if metrics.sum(gauge)}
    return raised


async def wait_idle(*processes: Process) -> None:
    """Wait until every gauge of all processes is 0."""

    async def is_idle() -> bool:
        return not await nonzero_gauges(*processes)

    try:
        await until(is_idle)
    except TimeoutError as error:
        raise AssertionError(f"never idle: {await nonzero_gauges(*processes)}") from error


async def wait_load(worker: Process, running: int, waiting: int) -> Metrics:
    """Wait until this many requests run and wait at the worker; return its metrics then."""
    latest: list[Metrics] = []

    async def has_load() -> bool:
        latest[:] = [await read_metrics(worker)]
        return (latest[0].running, latest[0].waiting) == (running, waiting)

    try:
        await until(has_load)
    except TimeoutError as error:
        found = (latest[0].running, latest[0].waiting)
        raise AssertionError(f"{found} requests run and wait, not {(running, waiting)}") from error
    return latest[0]


async def read_metrics_at_rest(worker: Process, step_s: float) -> Metrics:
    """Return the worker's metrics once its engine has made no step for longer than one step takes."""

    async def if_at_rest() -> Metrics | None:
        before = await read_metrics(worker)
        await asyncio.sleep(1.5 * step_s)
        after = await read_metrics(worker)
        steps = [one.sum(STEPS) for one in (before, after)]
        return after if steps[0] == steps[1] and before.engine_tokens == after.engine_tokens else None

    metrics: Metrics = await until(if_at_rest)
    return metrics
