"""A worker runs at most N requests and queues at most Q, whoever sends them and in whatever order.

Everything is counted from outside a real worker.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests at once, through one frontend or two | N and Q far below | N + Q admitted; all others learn why not |
| short requests at seeded moments | clients leave, seeded | never above N or Q; every request counts once |
| a queued request | the queue's timeout, its deadline, the queue's bound | the engine never receives it |
"""

import asyncio
import random
import time
from itertools import product

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.cancellations import deadline_s
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import is_answered, outcome, run_together
from tests.integration.harness.metrics import read_metrics, wait_idle, wait_load
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.plane.two_frontends import LIMITS, REFUSALS, TwoFrontends
from tests.integration.harness.waiting import until

BURST = 40
RANDOM_REQUESTS = 120
SEED = 20_231
BURSTS = [
    *(("mocker", slots, places) for slots, places in product(range(1, 6), range(6))),
    *(("trtllm", slots, places) for slots, places in LIMITS),
]
RANDOM_LOADS = [
    ("mocker", 1, 0),
    ("mocker", 1, 1),
    ("mocker", 2, 2),
    ("mocker", 4, 3),
    ("trtllm", 1, 1),
    ("trtllm", 2, 2),
]


@pytest.fixture(scope="module")
def two_frontends(start_plane: Start) -> TwoFrontends:
    return TwoFrontends.of(start_plane())


@pytest.mark.parametrize(("engine", "slots", "places"), BURSTS, indirect=["engine"])
def test_burst_fills_exactly_the_slots_and_the_queue(two_frontends: TwoFrontends, slots: int, places: int) -> None:
    """With an odd N + Q, requests alternate between two frontends, and only the worker can count all of them."""
    frontend_count = 1 + (slots + places) % 2

    async def scenario() -> None:
        worker, model = await two_frontends.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            clients = [
                Client(
                    two_frontends.frontends[number % frontend_count],
                    Request(PROTOCOLS[number % 3], model=model, max_tokens=ENDLESS),
                )
                for number in range(BURST)
            ]
            for client in clients:
                client.start(group)
            await until(lambda: sum(client.is_refused for client in clients) == BURST - slots - places)
            await wait_load(worker, slots, places)
            assert sum(client.ended is None for client in clients) == slots + places
            for client in clients:
                client.hang_up()
        await wait_idle(worker, *two_frontends.frontends)
        for client in clients:
            if isinstance(client.ended, Refused):
                check_refusal(client.ended, slots, places)

    asyncio.run(scenario())


def check_refusal(refused: Refused, slots: int, places: int) -> None:
    """Check that the refusal states its reason, the limits and a retry delay, for programs and for people."""
    assert refused.reason in REFUSALS
    assert "at capacity" in refused.error["message"]
    if refused.code == "RESOURCE_EXHAUSTED":
        assert refused.error["retryable"] == "true"
        assert refused.error["retry_after_s"] >= 1
    else:
        assert refused.code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.error["type"] == "overloaded_error"
        assert refused.error["retryable"] is True
    assert refused.metadata["cause"] == "capacity"
    if refused.reason == "WORKER_AT_CAPACITY":
        limits = {"engine_request_limit": slots, "request_queue_limit": places, "running": slots, "waiting": places}
        assert {name: int(refused.metadata[name]) for name in limits} == limits


# Limits at every moment


async def watch(worker: Process, stop: asyncio.Event) -> tuple[float, float]:
    """Return the highest numbers of running and of waiting requests in any scrape until `stop`."""
    running, waiting = 0.0, 0.0
    while not stop.is_set():
        metrics = await read_metrics(worker)
        running, waiting = max(running, metrics.running), max(waiting, metrics.waiting)
    return running, waiting


@pytest.mark.parametrize(("engine", "slots", "places"), RANDOM_LOADS, indirect=["engine"])
def test_random_load_never_exceeds_the_limits(two_frontends: TwoFrontends, slots: int, places: int) -> None:
    rng = random.Random(SEED - 10 * slots - places)
    outcomes: list[Answer | Refused] = []

    async def come_and_go(model: str) -> None:
        """Send a request at a random moment, and hang up at another unless it has been answered."""
        fits = min(2, slots + places)
        request = Request(rng.choice(PROTOCOLS), model=model, max_tokens=rng.randint(1, 12), n=rng.randint(1, fits))
        frontend, pause_s, patience_s = rng.choice(two_frontends.frontends), rng.random(), rng.choice((0.03, 30.0))
        await asyncio.sleep(pause_s)  # Not synchronisation: the random moment is what is tested.
        try:
            async with asyncio.timeout(patience_s):
                outcomes.append(await outcome(frontend, request))
        except TimeoutError:
            pass  # The client has hung up.

    async def scenario() -> None:
        worker, model = await two_frontends.worker(slots, places)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(worker, stop))
            await run_together(come_and_go(model) for _ in range(RANDOM_REQUESTS))
            stop.set()
        running, waiting = watching.result()
        assert running <= slots
        assert waiting <= places
        await wait_idle(worker, *two_frontends.frontends)
        refusals = [one for one in outcomes if isinstance(one, Refused)]
        assert {one.reason for one in refusals} <= set(REFUSALS)
        asked, rejected = await two_frontends.request_and_rejection_counts(model)
        assert len(outcomes) <= asked <= RANDOM_REQUESTS  # A client may have hung up before its request arrived.
        assert len(refusals) <= rejected <= len(refusals) + RANDOM_REQUESTS - len(outcomes)
        await until(lambda: is_answered(two_frontends.plane.frontend, Request("grpc", model=model)))

    asyncio.run(scenario())


# The end of a wait


@on_both_engines
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("cause", ["timeout", "deadline"])
def test_request_that_waits_too_long_never_reaches_the_engine(
    two_frontends: TwoFrontends, protocol: str, cause: str
) -> None:
    options = ("--queue-timeout=0.3",) if cause == "timeout" else ()

    async def scenario() -> None:
        worker, model = await two_frontends.worker(1, 1, *options)
        async with asyncio.TaskGroup() as group:
            began = time.monotonic()
            holder = Client(two_frontends.plane.frontend, Request(model=model, max_tokens=ENDLESS)).start(group)
            await until(lambda: holder.has_begun)
            timeout_s = deadline_s(time.monotonic() - began, least_s=1.5) if cause == "deadline" else None
            before = await read_metrics(worker)
            waiting = Client(
                two_frontends.other, Request(protocol, model=model, max_tokens=ENDLESS, timeout_s=timeout_s)
            )
            waiting.start(group)
            refused = await waiting.refusal()
            await wait_load(worker, 1, 0)
            after = await read_metrics(worker)
            holder.hang_up()
        if cause == "deadline":
            assert refused.is_deadline
        else:
            assert refused.reason in REFUSALS
            assert "waited 0.3 s" in refused.error["message"]
            assert (refused.metadata["cause"], refused.metadata["queue_timeout_s"]) == ("queue_timeout", "0.3")
        prompts = [one.sum("unbroken_engine_prefill_tokens_total") for one in (before, after)]
        assert prompts[0] == prompts[1]
        expired = after.sum("unbroken_queue_expired_total", cause=cause)
        if cause == "deadline":  # The frontend's clock may be ahead: then it cancels first.
            expired += after.sum("dynamo_component_cancellation_total", cause="signal", phase="queued")
        assert expired == 1

    asyncio.run(scenario())


@on_both_engines
def test_queue_holds_no_more_prompt_tokens_than_its_limit(two_frontends: TwoFrontends) -> None:
    async def scenario() -> None:
        worker, model = await two_frontends.worker(1, 5, "--queue-token-limit=20")

        def client(prompt: str) -> Client:
            return Client(two_frontends.plane.frontend, Request("grpc", model=model, prompt=prompt, max_tokens=ENDLESS))

        async with asyncio.TaskGroup() as group:
            holder = client("a long prompt, which runs at once whatever the queue's limit").start(group)
            await until(lambda: holder.has_begun)
            first = client("fifteen letters").start(group)
            await wait_load(worker, 1, 1)
            refused = await client("sixwww").start(group).refusal()
            five = client("five!").start(group)  # Admitted: too many prompt tokens do not mark the worker full.
            await wait_load(worker, 1, 2)
            for one in (holder, first, five):
                one.hang_up()
        assert refused.reason in REFUSALS
        assert "too many prompt tokens would wait (21 of at most 20)" in refused.error["message"]
        limits = {"cause": "queue_tokens", "queue_token_limit": "20", "waiting_tokens": "15"}
        assert limits.items() <= refused.metadata.items()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_prompt_too_long_for_every_queue_is_refused_and_logged_with_that_cause(
    two_frontends: TwoFrontends, protocol: str
) -> None:
    async def scenario() -> None:
        frontend = two_frontends.plane.frontend
        model = f"two-{protocol}"
        limits = ("--engine-request-limit=1", "--queue-token-limit=20")
        workers = [await two_frontends.plane.worker(f"--served-model-name={model}", *limits) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            holders = [Client(frontend, Request("grpc", model=model, max_tokens=ENDLESS)).start(group) for _ in workers]
            for worker in workers:
                await wait_load(worker, 1, 0)
            refused = await Client(frontend, Request(protocol, model=model, prompt="l" * 21)).start(group).refusal()
            for one in holders:
                one.hang_up()
        assert refused.reason == "WORKER_AT_CAPACITY"
        assert "too many prompt tokens would wait (21 of at most 20)" in refused.error["message"]
        assert (refused.metadata["cause"], refused.metadata["engine_request_limit"]) == ("queue_tokens", "1")
        (line,) = frontend.events_until_now("request", model=model, outcome="WORKER_AT_CAPACITY")
        assert line["refused_for"] == "queue_tokens"

    asyncio.run(scenario())
