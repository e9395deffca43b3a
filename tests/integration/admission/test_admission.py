"""N requests run and Q wait, exactly, whoever asks and in whatever order: counted from outside of a real worker.

| workload | nemesis | checker |
| --- | --- | --- |
| endless requests at once, through one frontend or two | N and Q far below | N + Q are in, each other is told why not |
| short ones at seeded moments | clients leave, seeded | never above N or Q; every request counts once |
| one that waits | the queue's timeout, its deadline, the queue's bound | the engine never hears of it |
"""

import asyncio
import random
import time
from itertools import product

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.answers import Answer, Refused
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import gathered, is_answered, outcome
from tests.integration.harness.endings import deadline_s
from tests.integration.harness.pair import LIMITS, REFUSALS, Pair
from tests.integration.harness.plane import Process, until
from tests.integration.harness.readings import read, wait_load, wait_quiet
from tests.integration.harness.visits import ENDLESS, Visit

BURST = 40
HURRIES = 120
SEED = 20_231
BURSTS = [
    *(("mocker", slots, places) for slots, places in product(range(1, 6), range(6))),
    *(("trtllm", slots, places) for slots, places in LIMITS),
]
RUSHES = [("mocker", 1, 0), ("mocker", 1, 1), ("mocker", 2, 2), ("mocker", 4, 3), ("trtllm", 1, 1), ("trtllm", 2, 2)]


@pytest.fixture(scope="module")
def pair(start_plane: Start) -> Pair:
    return Pair.of(start_plane())


@pytest.mark.parametrize(("engine", "slots", "places"), BURSTS, indirect=["engine"])
def test_of_a_burst_exactly_n_and_q_are_in(pair: Pair, slots: int, places: int) -> None:
    """Through one frontend, which knows how many it has sent, or two by turns: those only the worker can count."""
    doors = 1 + (slots + places) % 2

    async def scenario() -> None:
        worker, model = await pair.worker(slots, places)
        async with asyncio.TaskGroup() as group:
            visits = [
                Visit(pair.frontends[number % doors], Ask(PROTOCOLS[number % 3], model=model, max_tokens=ENDLESS))
                for number in range(BURST)
            ]
            for visit in visits:
                visit.start(group)
            await until(lambda: sum(visit.is_refused for visit in visits) == BURST - slots - places)
            await wait_load(worker, slots, places)
            assert sum(visit.ended is None for visit in visits) == slots + places
            for visit in visits:
                visit.leave()
        await wait_quiet(worker, *pair.frontends)
        for visit in visits:
            if isinstance(visit.ended, Refused):
                check_refusal(visit.ended, slots, places)

    asyncio.run(scenario())


def check_refusal(refused: Refused, slots: int, places: int) -> None:
    """It says what happened, to programs and to people, with the limits, and when to try again."""
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
        told = {"engine_request_limit": slots, "request_queue_limit": places, "running": slots, "waiting": places}
        assert {name: int(refused.metadata[name]) for name in told} == told


# All at a time


async def watch(worker: Process, stop: asyncio.Event) -> tuple[float, float]:
    """The most that ran and waited in any scrape until `stop`."""
    running, waiting = 0.0, 0.0
    while not stop.is_set():
        reading = await read(worker)
        running, waiting = max(running, reading.running), max(waiting, reading.waiting)
    return running, waiting


@pytest.mark.parametrize(("engine", "slots", "places"), RUSHES, indirect=["engine"])
def test_in_no_moment_of_a_random_rush_are_the_limits_passed(pair: Pair, slots: int, places: int) -> None:
    rng = random.Random(SEED - 10 * slots - places)
    outcomes: list[Answer | Refused] = []

    async def hurry(model: str) -> None:
        """Come at some moment, and leave at another unless the answer is there."""
        fits = min(2, slots + places)
        ask = Ask(rng.choice(PROTOCOLS), model=model, max_tokens=rng.randint(1, 12), n=rng.randint(1, fits))
        frontend, pause_s, patience_s = rng.choice(pair.frontends), rng.random(), rng.choice((0.03, 30.0))
        await asyncio.sleep(pause_s)  # The moment is what is tested.
        try:
            async with asyncio.timeout(patience_s):
                outcomes.append(await outcome(frontend, ask))
        except TimeoutError:
            pass  # It has left.

    async def scenario() -> None:
        worker, model = await pair.worker(slots, places)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(worker, stop))
            await gathered(hurry(model) for _ in range(HURRIES))
            stop.set()
        running, waiting = watching.result()
        assert running <= slots
        assert waiting <= places
        await wait_quiet(worker, *pair.frontends)
        refusals = [one for one in outcomes if isinstance(one, Refused)]
        assert {one.reason for one in refusals} <= set(REFUSALS)
        asked, rejected = await pair.counted(model)
        assert len(outcomes) <= asked <= HURRIES  # One that left may have left before it had asked.
        assert len(refusals) <= rejected <= len(refusals) + HURRIES - len(outcomes)
        await until(lambda: is_answered(pair.plane.frontend, Ask("grpc", model=model)))

    asyncio.run(scenario())


# What ends a wait


@on_both_engines
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("cause", ["timeout", "deadline"])
def test_one_that_has_waited_too_long_never_reaches_the_engine(pair: Pair, protocol: str, cause: str) -> None:
    options = ("--queue-timeout=0.3",) if cause == "timeout" else ()

    async def scenario() -> None:
        worker, model = await pair.worker(1, 1, *options)
        async with asyncio.TaskGroup() as group:
            began = time.monotonic()
            holder = Visit(pair.plane.frontend, Ask(model=model, max_tokens=ENDLESS)).start(group)
            await until(lambda: holder.has_begun)
            timeout_s = deadline_s(time.monotonic() - began, least_s=0.3) if cause == "deadline" else None
            before = await read(worker)
            waiting = Visit(pair.other, Ask(protocol, model=model, max_tokens=ENDLESS, timeout_s=timeout_s))
            waiting.start(group)
            refused = await waiting.refusal()
            await wait_load(worker, 1, 0)
            after = await read(worker)
            holder.leave()
        if cause == "deadline":
            assert refused.is_deadline
        else:
            assert refused.reason in REFUSALS
            assert "waited 0.3 s" in refused.error["message"]
            assert (refused.metadata["cause"], refused.metadata["queue_timeout_s"]) == ("queue_timeout", "0.3")
        prompts = [one.sum("unbroken_engine_prefill_tokens_total") for one in (before, after)]
        assert prompts[0] == prompts[1]
        expired = after.sum("unbroken_queue_expired_total", cause=cause)
        if cause == "deadline":  # The frontend's clock may be a little ahead: then it says so to the worker.
            expired += after.sum("dynamo_component_cancellation_total", cause="signal", phase="queued")
        assert expired == 1

    asyncio.run(scenario())


@on_both_engines
def test_no_more_prompt_tokens_wait_than_the_limit(pair: Pair) -> None:
    async def scenario() -> None:
        worker, model = await pair.worker(1, 5, "--queue-token-limit=20")

        def visit(prompt: str) -> Visit:
            return Visit(pair.plane.frontend, Ask("grpc", model=model, prompt=prompt, max_tokens=ENDLESS))

        async with asyncio.TaskGroup() as group:
            holder = visit("a long prompt that runs at once, whatever may wait").start(group)
            await until(lambda: holder.has_begun)
            first = visit("fifteen letters").start(group)
            await wait_load(worker, 1, 1)
            refused = await visit("sixwww").start(group).refusal()
            five = visit("five!").start(group)  # At once: that too many tokens wait does not make the worker full.
            await wait_load(worker, 1, 2)
            for one in (holder, first, five):
                one.leave()
        assert refused.reason in REFUSALS
        assert "too many prompt tokens would wait (21 of at most 20)" in refused.error["message"]
        told = {"cause": "queue_tokens", "queue_token_limit": "20", "waiting_tokens": "15"}
        assert told.items() <= refused.metadata.items()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_is_too_long_for_all_workers_is_told_that_and_is_logged_so(pair: Pair, protocol: str) -> None:
    async def scenario() -> None:
        frontend = pair.plane.frontend
        model = f"two-{protocol}"
        limits = ("--engine-request-limit=1", "--queue-token-limit=20")
        workers = [await pair.plane.worker(f"--served-model-name={model}", *limits) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            holders = [Visit(frontend, Ask("grpc", model=model, max_tokens=ENDLESS)).start(group) for _ in workers]
            for worker in workers:
                await wait_load(worker, 1, 0)
            refused = await Visit(frontend, Ask(protocol, model=model, prompt="l" * 21)).start(group).refusal()
            for one in holders:
                one.leave()
        assert refused.reason == "WORKER_AT_CAPACITY"
        assert "too many prompt tokens would wait (21 of at most 20)" in refused.error["message"]
        assert (refused.metadata["cause"], refused.metadata["engine_request_limit"]) == ("queue_tokens", "1")
        (line,) = frontend.events("request", model=model, outcome="WORKER_AT_CAPACITY")
        assert line["refused_for"] == "queue_tokens"

    asyncio.run(scenario())
