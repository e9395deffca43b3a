"""New requests are refused while every worker exceeds a threshold; thresholds can be read and set at any time.

| workload | nemesis | checker |
| --- | --- | --- |
| a request that holds blocks or prompt tokens | thresholds just below and at what it holds | refused, or admitted |
| the same | thresholds set, changed one by one and removed | they apply to the next request |
| the same, on two ranks | one of them idle, or without reports | busy only if every known rank is |
| the same | the engine stops reporting | the worker is not busy forever |

A worker with the fault `hold` takes requests and makes no step, so its reports stay the same.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.admin import set_thresholds
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.client import Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, is_answered, outcome, refusal
from tests.integration.harness.metrics import read_metrics, wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

BLOCKS, BLOCK_TOKENS = 64, 4
CACHE = (f"--mocker-kv-blocks={BLOCKS}", f"--mocker-kv-block-tokens={BLOCK_TOKENS}")
STILL = (*CACHE, "--mocker-fault=hold=99")
SLOW = (*CACHE, "--mocker-itl-ms=50", "--mocker-prefill-chunk-tokens=4")
ADMISSION = ("--admission-control=token-capacity", "--overload-status-code=529", "--engine-stall-ms=60000")
EXPIRY_S_MAX = 5.0
"""A load report expires after 0.75 s, as unit tests check with a clock of their own. The rest is for busy machines."""
TOKENS = 140
"""Tokens in the holder's prompt."""
HELD = -(-TOKENS // BLOCK_TOKENS)
HOLDER = Request("grpc", prompt="h" * TOKENS, max_tokens=60)
NEXT = Request(prompt="next", max_tokens=2)
BLOCKS_METRIC = "dynamo_frontend_worker_active_decode_blocks"


# Thresholds at their limits


async def is_admitted(frontend: Frontend, worker: Process, request: Request = NEXT) -> bool:
    """Whether one more request reaches the only worker, which runs one. The request is withdrawn afterwards."""
    async with asyncio.TaskGroup() as group:
        client = Client(frontend, request).start(group)

        async def is_decided() -> bool:
            return client.ended is not None or (await read_metrics(worker)).running == 2

        await until(is_decided)
        client.hang_up()
    if isinstance(client.ended, Refused):
        check_refusal(client.ended)
        return False
    await wait_load(worker, 1, 0)
    return True


def check_refusal(refused: Refused, status: int = 529) -> None:
    assert refused.reason == "OVERLOADED"
    assert refused.metadata["cause"] == "busy_threshold"
    assert "over a busy threshold" in refused.error["message"]
    if refused.code == "RESOURCE_EXHAUSTED":
        assert 1 <= refused.error["retry_after_s"] <= 60
    else:
        assert refused.code == status
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert refused.error["type"] == "overloaded_error"
        assert refused.error["retryable"] is True


async def wait_reported(frontend: Frontend, *, blocks: int, worker: Process, **labels: str) -> None:
    """Wait until the frontend knows that the worker uses this many blocks."""

    async def is_reported() -> bool:
        metrics = await read_metrics(frontend)
        instance = worker.ready["instance_id"]
        return metrics.sum(BLOCKS_METRIC, worker_id=instance, **labels) == blocks

    await until(is_reported)


@dataclass
class Setup:
    """A plane whose only worker holds one request without progress, and its frontend."""

    plane: Plane
    worker: Process

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend


@pytest.fixture(scope="module")
def held(start_plane: Start) -> Setup:
    plane = start_plane(frontend=ADMISSION)
    return Setup(plane, asyncio.run(plane.worker(*STILL)))


CASES: Mapping[str, tuple[float | None, int | None, bool]] = {
    "no thresholds": (None, None, False),
    "fewer blocks than are in use": ((HELD - 1) / BLOCKS, None, True),
    "as many blocks as are in use": (HELD / BLOCKS, None, False),
    "all blocks": (1.0, None, False),
    "no blocks": (0.0, None, True),
    "fewer prompt tokens than wait": (None, TOKENS - 1, True),
    "as many prompt tokens as wait": (None, TOKENS, False),
    "no prompt tokens": (None, 0, True),
    "only blocks exceed": ((HELD - 1) / BLOCKS, TOKENS, True),
    "only prompt tokens exceed": (1.0, TOKENS - 1, True),
    "both are at the threshold": (HELD / BLOCKS, TOKENS, False),
}


def test_worker_is_busy_strictly_above_any_threshold(held: Setup) -> None:
    """The load has not changed for long, so no report comes between a new threshold and the request after it."""
    verdicts = {}

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            holder = Client(held.frontend, HOLDER).start(group)
            for name, (decode, prefill, _) in CASES.items():
                await wait_reported(held.frontend, blocks=HELD, worker=held.worker)
                await set_thresholds(held.frontend, decode, prefill)
                verdicts[name] = not await is_admitted(held.frontend, held.worker)
            holder.hang_up()
        await set_thresholds(held.frontend, None, None)
        await wait_idle(held.worker, held.frontend)

    asyncio.run(scenario())
    assert verdicts == {name: is_busy for name, (_, _, is_busy) in CASES.items()}


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_rejection_is_reported_and_counted_once(held: Setup, protocol: str, is_chat: bool) -> None:
    request = Request(protocol, is_chat=is_chat, max_tokens=2)
    endpoint = "generate" if protocol == "grpc" else "chat_completions" if is_chat else "completions"

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            holder = Client(held.frontend, HOLDER).start(group)
            await wait_reported(held.frontend, blocks=HELD, worker=held.worker)
            await set_thresholds(held.frontend, 0.5, None)
            before = await read_metrics(held.frontend)
            refused = await outcome(held.frontend, request)
            after = await read_metrics(held.frontend)
            holder.hang_up()
        await set_thresholds(held.frontend, None, None)
        await wait_idle(held.worker, held.frontend)
        assert isinstance(refused, Refused)
        check_refusal(refused)
        name = "dynamo_frontend_model_rejection_total"
        assert after.sum(name) - before.sum(name) == 1
        labels = {"model": "mocker", "endpoint": endpoint}
        assert after.sum(name, **labels) - before.sum(name, **labels) == 1
        by_cause = "dynamo_frontend_model_rejection_cause_total"
        assert after.sum(by_cause, cause="busy_threshold") - before.sum(by_cause, cause="busy_threshold") == 1
        assert refused.metadata["active_decode_blocks_threshold"] == "0.5"
        excess = f"active_decode_blocks 0.5469 ({HELD} of {BLOCKS}), above the threshold of 0.5"
        assert excess in refused.error["message"]

    asyncio.run(scenario())


# Load from running requests, thresholds from options


@pytest.fixture(scope="module")
def slow(start_plane: Start) -> Setup:
    plane = start_plane(frontend=ADMISSION)
    return Setup(plane, asyncio.run(plane.worker(*SLOW)))


SIGNALS = {
    "blocks": ("--active-decode-blocks-threshold=0.3", BLOCKS_METRIC, 0.3 * BLOCKS),
    "prompt tokens": ("--active-prefill-tokens-threshold=60", "dynamo_frontend_worker_active_prefill_tokens", 60),
}
"""The option, the metric that it bounds, and the value at which the threshold is reached."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("signal", SIGNALS)
def test_requests_are_refused_while_the_load_exceeds_a_threshold(slow: Setup, signal: str, protocol: str) -> None:
    option, metric, threshold = SIGNALS[signal]
    request = Request(protocol, prompt="next", max_tokens=2)

    async def scenario() -> Refused | None:
        frontend = slow.plane.start_frontend(*ADMISSION, option)
        await until(lambda: frontend.has_found(slow.worker))
        async with asyncio.TaskGroup() as group:
            holder = Client(frontend, HOLDER).start(group)

            async def is_over() -> bool:
                return await frontend.metric(metric) > threshold

            await until(is_over)
            refused = await refusal(frontend, request)
            holder.hang_up()
        await until(lambda: is_answered(frontend, request))
        frontend.kill()
        return refused

    refused = asyncio.run(scenario())
    assert refused is not None
    check_refusal(refused)


@pytest.mark.parametrize(
    "options",
    [
        ("--admission-control=token-capacity",),
        ("--active-decode-blocks-threshold=0", "--active-prefill-tokens-threshold=0"),
    ],
    ids=["no thresholds", "no admission control"],
)
def test_nothing_is_refused_without_thresholds_or_without_admission_control(
    held: Setup, options: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        frontend = held.plane.start_frontend("--engine-stall-ms=60000", *options)
        await until(lambda: frontend.has_found(held.worker))
        async with asyncio.TaskGroup() as group:
            holder = Client(frontend, HOLDER).start(group)
            await wait_reported(frontend, blocks=HELD, worker=held.worker)
            assert await is_admitted(frontend, held.worker)
            holder.hang_up()
        await wait_idle(held.worker, frontend)
        frontend.kill()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [429, 503])
def test_refusal_has_the_configured_status(held: Setup, status: int) -> None:
    options = (*ADMISSION, "--active-prefill-tokens-threshold=0", f"--overload-status-code={status}")

    async def scenario() -> Answer | Refused:
        frontend = held.plane.start_frontend(*options)
        await until(lambda: frontend.has_found(held.worker))
        async with asyncio.TaskGroup() as group:
            holder = Client(frontend, HOLDER).start(group)
            await wait_reported(frontend, blocks=HELD, worker=held.worker)
            got = await outcome(frontend, NEXT)
            holder.hang_up()
        await wait_idle(held.worker, frontend)
        frontend.kill()
        return got

    refused = asyncio.run(scenario())
    assert isinstance(refused, Refused)
    check_refusal(refused, status)


# Several workers, several ranks, missing reports


def test_busy_workers_and_no_workers_are_different_reasons(
    start_plane: Start,
) -> None:
    plane = start_plane(frontend=(*ADMISSION, "--active-prefill-tokens-threshold=0"))

    async def scenario() -> None:
        busy = await plane.worker(*STILL)
        async with asyncio.TaskGroup() as group:
            holder = Client(plane.frontend, HOLDER).start(group)
            await wait_reported(plane.frontend, blocks=HELD, worker=busy)
            assert (await until(lambda: refusal(plane.frontend, NEXT))).reason == "OVERLOADED"
            free = await plane.worker(*CACHE)
            for protocol in PROTOCOLS * 2:  # The report of the request before may still count.
                await until(partial(is_answered, plane.frontend, Request(protocol, max_tokens=2)))
            free.kill()
            await until(lambda: plane.frontend.events("worker lost", instance=free.ready["instance_id"]))
            assert (await until(lambda: refusal(plane.frontend, NEXT))).reason == "OVERLOADED"
            holder.hang_up()
        busy.kill()
        await until(lambda: plane.frontend.events("worker lost", instance=busy.ready["instance_id"]))
        refused = await refusal(plane.frontend, NEXT)
        assert refused is not None
        assert refused.reason == "NO_WORKERS"
        assert refused.code == 503
        await wait_idle(plane.frontend)
        await plane.worker(*CACHE)
        assert await answer(plane.frontend, NEXT)

    asyncio.run(scenario())


RANKS: Mapping[str, tuple[tuple[str, ...], int, bool]] = {
    "one of two ranks exceeds": (("--mocker-dp-ranks=2",), 1, False),
    "both ranks exceed": (("--mocker-dp-ranks=2",), 2, True),
    "the only known rank exceeds": (("--mocker-dp-ranks=2", "--mocker-fault=mute_rank=1"), 1, True),
    "no rank is known": (("--mocker-fault=mute_rank=0",), 1, False),
}
"""Options of the worker, the number of its requests, and whether it is busy."""


@pytest.mark.parametrize(("options", "holders", "is_busy"), RANKS.values(), ids=RANKS)
def test_worker_is_busy_only_if_every_known_rank_is(
    held: Setup, options: tuple[str, ...], holders: int, is_busy: bool
) -> None:
    model = "-".join(("ranks", str(holders), *(option.strip("-").replace("=", "-") for option in options)))
    served = f"--served-model-name={model}"

    async def scenario() -> None:
        worker = await held.plane.worker(*STILL, *options, served)
        await set_thresholds(held.frontend, None, 0, model=model)
        async with asyncio.TaskGroup() as group:
            clients = []
            for number in range(holders):
                request = Request("grpc", model=model, prompt="h" * TOKENS, max_tokens=60)
                await set_thresholds(held.frontend, None, None, model=model)
                clients.append(Client(held.frontend, request).start(group))
                await wait_load(worker, number + 1, 0)
            await wait_reported(held.frontend, blocks=0 if model.endswith("rank-0") else HELD * holders, worker=worker)
            await set_thresholds(held.frontend, None, 0, model=model)
            got = await is_refused_by_frontend(held.frontend, worker, Request(model=model, max_tokens=2), holders)
            for client in clients:
                client.hang_up()
        worker.kill()
        assert got is is_busy

    asyncio.run(scenario())


async def is_refused_by_frontend(frontend: Frontend, worker: Process, request: Request, running: int) -> bool:
    """Whether the frontend refuses a request, instead of sending it to the worker, which runs `running` others."""
    async with asyncio.TaskGroup() as group:
        client = Client(frontend, request).start(group)

        async def is_decided() -> bool:
            return client.ended is not None or (await read_metrics(worker)).running == running + 1

        await until(is_decided)
        client.hang_up()
    return isinstance(client.ended, Refused)


async def has_generated(worker: Process, tokens: float) -> bool:
    return (await read_metrics(worker)).generated_tokens >= tokens


def test_silent_worker_does_not_stay_busy(start_plane: Start) -> None:
    """The worker reports until its request has 20 tokens, when it exceeds the threshold, and never again."""
    plane = start_plane(frontend=(*ADMISSION, "--active-decode-blocks-threshold=0.3"))
    options = (*CACHE, "--mocker-itl-ms=150", "--mocker-fault=mute_after=20")

    async def scenario() -> None:
        worker = await plane.worker(*options)
        async with asyncio.TaskGroup() as group:
            holder = Client(plane.frontend, HOLDER).start(group)
            await until(lambda: refusal(plane.frontend, NEXT))
            generated = (await read_metrics(worker)).generated_tokens
            await until(lambda: has_generated(worker, generated + 20))  # All of them are the holder's.
            await read_metrics(plane.frontend)  # By now the frontend has the last report.
            mute_at = time.time()
            await until(lambda: is_answered(plane.frontend, NEXT))
            assert max(plane.frontend.times("request", outcome="OVERLOADED")) <= mute_at + EXPIRY_S_MAX
            assert holder.ended is None
            assert (await read_metrics(worker)).running == 1
            holder.hang_up()
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())
