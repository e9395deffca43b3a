"""The costs of a frontend's parts against the number of workers and streams, with real sessions but without sockets."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from bench.growth.curve import Curve, us_each, wait_until
from services.core.call import Call
from services.core.common_layers import stack
from services.core.errors import Failure
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.request import FinishReason, Request
from services.discovery.watcher import Watcher
from services.frontend.layers.admit import Admit
from services.frontend.layers.route import Route
from services.frontend.layers.transport import Transport
from services.frontend.metrics.definitions import build_metrics
from services.frontend.pipeline import PipelineConfig, frontend_layers
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.frontend.session.pool import Pool, PoolConfig
from services.frontend.session.session import WorkerSessionConfig
from services.stubs.registry_pb2 import Instance, WatchResponse
from services.stubs.worker_pb2 import Load, RankLoad, Step
from tests.frontend.support import BareWorker
from tests.support.doubles import CARD, make_request, models_of

WORKERS = (1, 10, 100, 1_000)
STREAMS = (1, 10, 100, 1_000, 10_000)
INSTANCES = (10, 100, 1_000, 10_000)
OPERATIONS = 1_000
"""Calls of a cheap operation per repeat."""
ROUNDS = 10
"""Calls of an operation on all workers per repeat."""
SLOTS = 16
FOREVER_S = 3600.0
CALM, BUSY = RankLoad(kv_blocks_used=1, kv_blocks_total=100), RankLoad(kv_blocks_used=99, kv_blocks_total=100)
THRESHOLDS = AdmissionConfig(is_on=True, thresholds=Thresholds(active_decode_blocks=0.5))
NO_THRESHOLDS = AdmissionConfig()


class CountingSink:
    """A sink that counts tokens."""

    def __init__(self) -> None:
        self.count = 0

    def deliver(self, delta: Delta) -> None:
        self.count += len(delta.token_ids)


async def answer(_request: Request, _call: Call, _sink: Sink) -> Finish:
    """A worker that answers at once."""
    return Finish(FinishReason.STOP)


class Frontend:
    """The parts of a frontend that deal with workers, with this many workers."""

    def __init__(self, workers: int, *, rank: RankLoad = CALM, slots: int = SLOTS) -> None:
        self.catalog = models_of(CARD)
        self.pool = Pool(self.catalog, PoolConfig())
        self.workers = [bare_worker(f"w{number}", rank, slots) for number in range(workers)]
        for one in self.workers:
            one.on_change = self.pool.on_worker_change
            self.pool.offer(one.session)

    def admit_and_route(self, admission: AdmissionConfig) -> Layer:
        balancer = Balancer(BusyThresholds(admission), random.Random(1))
        return Admit(Route(answer, self.pool, balancer), self.catalog, self.pool, balancer)

    def pipeline(self) -> Layer:
        """Return all layers of a request, without HTTP."""
        layers = frontend_layers(
            PipelineConfig(),
            catalog=self.catalog,
            pool=self.pool,
            busy=BusyThresholds(NO_THRESHOLDS),
            metrics=build_metrics(),
            gate=Gate(),
            rng=random.Random(1),
        )
        return stack(*layers, innermost=Transport())


def bare_worker(name: str, rank: RankLoad, slots: int) -> BareWorker:
    """Return a worker that has reported its load. The report stays valid during the measurement."""
    worker = BareWorker(name, slots=slots, places=0, config=WorkerSessionConfig(full_s=FOREVER_S))
    worker.hear(load=Load(ranks=[rank]))
    return worker


# Workers


async def us_per_request(frontend: Frontend, admission: AdmissionConfig, times: int) -> float:
    """Return the cost of a request from admission to the choice of its worker, or to its refusal."""
    layer, request, sink = frontend.admit_and_route(admission), make_request(), CountingSink()
    began = time.process_time()
    for _ in range(times):
        try:
            await layer(request, Call(request_id="r", card=CARD), sink)
        except Failure as failure:
            failure.clear_tracebacks()
    return (time.process_time() - began) * 1e6 / times


def measure_routing(
    admission: AdmissionConfig, *, rank: RankLoad = CALM, slots_taken: int = 0
) -> Callable[..., Awaitable[list[float]]]:
    async def measure(size: int, repeats: int) -> list[float]:
        frontend = Frontend(size, rank=rank)
        for worker in frontend.workers:
            for _ in range(slots_taken):
                worker.open()
        return [await us_per_request(frontend, admission, OPERATIONS) for _ in range(repeats)]

    return measure


async def load_reports(size: int, repeats: int) -> list[float]:
    """Each worker reports its load once."""
    workers = Frontend(size).workers

    def report() -> None:
        for one in workers:
            one.hear(load=Load(ranks=[CALM]))

    return [us_each(report, ROUNDS) / size for _ in range(repeats)]


async def silence_checks(size: int, repeats: int) -> list[float]:
    sessions, now = [one.session for one in Frontend(size).workers], asyncio.get_running_loop().time()

    def sweep() -> None:
        for one in sessions:
            one.check(now)

    return [us_each(sweep, ROUNDS) / size for _ in range(repeats)]


async def discoveries(size: int, repeats: int) -> list[float]:
    """Workers are discovered one after another, and the list of models is read after each."""
    costs = []
    for _ in range(repeats):
        frontend = Frontend(0)
        workers = [bare_worker(str(number), CALM, SLOTS) for number in range(size)]
        began = time.process_time()
        for one in workers:
            frontend.pool.offer(one.session)
            frontend.pool.served_cards()
        costs.append((time.process_time() - began) * 1e6 / size)
    return costs


async def resident_kib(size: int, repeats: int) -> list[float]:
    """The memory of an idle worker's session, without its socket."""
    costs, frontends = [], [Frontend(size)]  # The first frontend pays one-time costs, which are not a worker's.
    for _ in range(repeats):  # All frontends are kept: memory that one freed would make the next one look free.
        before = resident_bytes()
        frontends.append(Frontend(size))
        costs.append((resident_bytes() - before) / size / 1024)
    return costs


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def instance_changes(size: int, repeats: int) -> list[float]:
    """One of many instances changes: from the registry's message to the pool's list."""
    pool, revisions = Pool(models_of(CARD), PoolConfig()), count(2)
    watcher = Watcher(["unused"], pool.on_change)
    instances = [Instance(instance_id=f"w{number}", address="a:1", model="m") for number in range(size)]
    watcher._apply(WatchResponse(revision=1, epoch="e", snapshot=True, put=instances))

    def change() -> None:
        revision = next(revisions)
        one = Instance(instance_id=f"w{revision % size}", address=f"a:{revision}", model="m")
        watcher._apply(WatchResponse(revision=revision, epoch="e", put=[one]))

    return [us_each(change, OPERATIONS) for _ in range(repeats)]


# Requests


async def freed_slots(size: int, repeats: int) -> list[float]:
    """A slot comes free while many requests wait for one: until it is taken again."""
    frontend, order = Frontend(1, slots=1), asyncio.Queue[int]()
    (worker,) = frontend.workers

    async def open_stream(_request: Request, _call: Call, _sink: Sink) -> Finish:
        stream = worker.open()
        order.put_nowait(stream.id)
        return await stream.ended

    layer: Layer = Route(open_stream, frontend.pool, Balancer(BusyThresholds(NO_THRESHOLDS), random.Random(1)))
    call = Call(request_id="r", card=CARD, replacement_deadline=asyncio.get_running_loop().time() + FOREVER_S)
    rounds = [min(10, size) for _ in range(repeats)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(layer(make_request(), call, CountingSink())) for _ in range(size + sum(rounds) + 1)]
        await wait_until(lambda: not order.empty())  # All requests are queued after one turn, and one is admitted.
        costs = [await us_to_fill(worker, order, number) for number in rounds]
        for task in tasks:
            task.cancel()
    return costs


async def us_to_fill(worker: BareWorker, taken: "asyncio.Queue[int]", times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        worker.finish(await taken.get())
    return (time.process_time() - began) * 1e6 / times


async def tokens(size: int, repeats: int) -> list[float]:
    """One message with one token for each stream passes through all layers."""
    frontend = Frontend(1, slots=size)
    (worker,), layer, sink = frontend.workers, frontend.pipeline(), CountingSink()
    steps = max(1, OPERATIONS // size)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(layer(stream_request(), Call(request_id=str(one)), sink)) for one in range(size)]
        await wait_until(lambda: worker.candidate.in_flight_count == size)
        costs = [await us_to_deliver(worker, step, sink) for step in steps_for(size, steps * repeats)]
        for task in asked:
            task.cancel()
    return [sum(costs[start : start + steps]) / steps / size for start in range(0, len(costs), steps)]


async def us_to_deliver(worker: BareWorker, step: Step, sink: CountingSink) -> float:
    """Return the time until every token has arrived. Tokens of very many streams take several turns of the loop."""
    due = sink.count + len(step.stream_ids)
    began = time.process_time()
    worker.hear(step=step)
    await wait_until(lambda: sink.count == due)
    return (time.process_time() - began) * 1e6


def stream_request() -> Request:
    return make_request(max_tokens=None)


def steps_for(streams: int, number: int) -> list[Step]:
    ids = range(1, streams + 1)
    return [
        Step(stream_ids=ids, positions=[position] * streams, token_counts=[1] * streams, token_ids=[65] * streams)
        for position in range(number)
    ]


async def requests(size: int, repeats: int) -> list[float]:
    """A request of one token passes through all layers beside many open streams."""
    frontend = Frontend(1, slots=size + 1)
    (worker,), layer = frontend.workers, frontend.pipeline()
    async with asyncio.TaskGroup() as group:
        held = [
            group.create_task(layer(stream_request(), Call(request_id=str(one)), CountingSink())) for one in range(size)
        ]
        await wait_until(lambda: worker.candidate.in_flight_count == size)
        ids = count(size + 1)
        costs = [await us_to_answer(worker, layer, ids, size, OPERATIONS // 10) for _ in range(repeats)]
        for task in held:
            task.cancel()
    return costs


async def us_to_answer(worker: BareWorker, layer: Layer, ids: "count[int]", held: int, times: int) -> float:
    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(times):
            task = group.create_task(layer(make_request(), Call(request_id="short"), CountingSink()))
            stream_id = next(ids)
            await wait_until(lambda: worker.candidate.in_flight_count > held)
            worker.tokens(stream_id, 0, 65)
            worker.finish(stream_id)
            await task
    return (time.process_time() - began) * 1e6 / times


ROUTING, WORKER, STREAMING = "routing a request", "managing a worker", "streaming"
CURVES: Sequence[Curve] = (
    # First: memory that the others free would hide the cost.
    Curve("memory", "keep an idle worker", "workers", WORKERS[2:], resident_kib, unit="KiB"),
    Curve(ROUTING, "admit and route", "workers", WORKERS, measure_routing(NO_THRESHOLDS)),
    Curve(ROUTING, "admit and route, with thresholds", "workers", WORKERS, measure_routing(THRESHOLDS)),
    Curve(ROUTING, "refuse, all workers full", "workers", WORKERS, measure_routing(NO_THRESHOLDS, slots_taken=SLOTS)),
    Curve(ROUTING, "refuse, all workers busy", "workers", WORKERS, measure_routing(THRESHOLDS, rank=BUSY)),
    Curve(WORKER, "handle a load report", "workers", WORKERS, load_reports),
    Curve(WORKER, "check a worker for silence", "workers", WORKERS, silence_checks),
    Curve(WORKER, "discover a worker", "workers", WORKERS, discoveries),
    Curve(WORKER, "apply one changed instance", "instances", INSTANCES, instance_changes),
    Curve(STREAMING, "give a freed slot to a waiting request", "waiting", STREAMS, freed_slots),
    Curve(STREAMING, "deliver a token", "streams", STREAMS, tokens),
    Curve(STREAMING, "serve a request of one token", "streams", STREAMS, requests),
)
