"""What a frontend's parts cost against the number of its workers and streams: real sessions that no wire leads to."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
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
"""Of what is cheap, for each repeat."""
ROUNDS = 10
"""Of what is done to all workers, for each repeat."""
SLOTS = 16
FOREVER_S = 3600.0
CALM, BUSY = RankLoad(kv_blocks_used=1, kv_blocks_total=100), RankLoad(kv_blocks_used=99, kv_blocks_total=100)
THRESHOLDS = AdmissionConfig(is_on=True, thresholds=Thresholds(active_decode_blocks=0.5))
NO_THRESHOLDS = AdmissionConfig()


class Silent:
    """A sink that only counts."""

    def __init__(self) -> None:
        self.count = 0

    def deliver(self, delta: Delta) -> None:
        self.count += len(delta.token_ids)


async def answer(_request: Request, _call: Call, _sink: Sink) -> Finish:
    """A worker that is done at once."""
    return Finish(FinishReason.STOP)


class Frontend:
    """The parts of one that have to do with workers, and so many of these."""

    def __init__(self, workers: int, *, rank: RankLoad = CALM, slots: int = SLOTS) -> None:
        self.catalog = models_of(CARD)
        self.pool = Pool(self.catalog, PoolConfig())
        self.workers = [bare_worker(f"w{number}", rank, slots) for number in range(workers)]
        for one in self.workers:
            one.on_news = partial(self.pool.on_worker_change, one.candidate)
            self.pool.offer(one.session)

    def admit_and_route(self, admission: AdmissionConfig) -> Layer:
        busy, rng = BusyThresholds(admission), random.Random(1)
        return Admit(Route(answer, self.pool, busy, rng), self.catalog, self.pool, busy, rng)

    def pipeline(self) -> Layer:
        """All of a request's layers, without HTTP."""
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
    """One that has reported its load, and is believed for as long as a measurement takes."""
    worker = BareWorker(name, slots=slots, places=0, config=WorkerSessionConfig(full_s=FOREVER_S))
    worker.hear(load=Load(ranks=[rank]))
    return worker


# Workers


async def us_asked(frontend: Frontend, admission: AdmissionConfig, times: int) -> float:
    """Of a request from admission to its worker's name, or to its refusal."""
    layer, request, sink = frontend.admit_and_route(admission), make_request(), Silent()
    began = time.process_time()
    for _ in range(times):
        try:
            await layer(request, Call(request_id="r", card=CARD), sink)
        except Failure as failure:
            failure.clear_tracebacks()
    return (time.process_time() - began) * 1e6 / times


def routed(
    admission: AdmissionConfig, *, rank: RankLoad = CALM, slots_taken: int = 0
) -> Callable[..., Awaitable[list[float]]]:
    async def measure(size: int, repeats: int) -> list[float]:
        frontend = Frontend(size, rank=rank)
        for worker in frontend.workers:
            for _ in range(slots_taken):
                worker.open()
        return [await us_asked(frontend, admission, OPERATIONS) for _ in range(repeats)]

    return measure


async def reports(size: int, repeats: int) -> list[float]:
    """One report of each worker."""
    workers = Frontend(size).workers

    def report() -> None:
        for one in workers:
            one.hear(load=Load(ranks=[CALM]))

    return [us_each(report, ROUNDS) / size for _ in range(repeats)]


async def sweeps(size: int, repeats: int) -> list[float]:
    sessions, now = [one.session for one in Frontend(size).workers], asyncio.get_running_loop().time()

    def sweep() -> None:
        for one in sessions:
            one.check(now)

    return [us_each(sweep, ROUNDS) / size for _ in range(repeats)]


async def finds(size: int, repeats: int) -> list[float]:
    """Workers that are found one after the other, each told to whoever asks which models there are."""
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
    """Of an idle worker's session, without its socket."""
    costs, kept = [], [Frontend(size)]  # What the first of a kind costs more is not a worker's.
    for _ in range(repeats):  # All are kept: memory that one gave back would cost the next nothing.
        before = resident_bytes()
        kept.append(Frontend(size))
        costs.append((resident_bytes() - before) / size / 1024)
    return costs


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def views(size: int, repeats: int) -> list[float]:
    """One changed instance among so many, from the registry's message to the pool's list."""
    pool, revisions = Pool(models_of(CARD), PoolConfig()), count(2)
    watcher = Watcher(["unused"], pool.on_change)
    everybody = [Instance(instance_id=f"w{number}", address="a:1", model="m") for number in range(size)]
    watcher._apply(WatchResponse(revision=1, epoch="e", snapshot=True, put=everybody))

    def change() -> None:
        revision = next(revisions)
        one = Instance(instance_id=f"w{revision % size}", address=f"a:{revision}", model="m")
        watcher._apply(WatchResponse(revision=revision, epoch="e", put=[one]))

    return [us_each(change, OPERATIONS) for _ in range(repeats)]


# Requests


async def places(size: int, repeats: int) -> list[float]:
    """A place that comes free while so many wait for one: until it is taken again."""
    frontend, order = Frontend(1, slots=1), asyncio.Queue[int]()
    (worker,) = frontend.workers

    async def take(_request: Request, _call: Call, _sink: Sink) -> Finish:
        stream = worker.open()
        order.put_nowait(stream.id)
        return await stream.ended

    layer: Layer = Route(take, frontend.pool, BusyThresholds(NO_THRESHOLDS), random.Random(1))
    call = Call(request_id="r", card=CARD, replacement_deadline=asyncio.get_running_loop().time() + FOREVER_S)
    rounds = [min(10, size) for _ in range(repeats)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(layer(make_request(), call, Silent())) for _ in range(size + sum(rounds) + 1)]
        await wait_until(lambda: not order.empty())  # All have asked, in one turn, and one was let in.
        costs = [await us_to_take(worker, order, number) for number in rounds]
        for task in tasks:
            task.cancel()
    return costs


async def us_to_take(worker: BareWorker, taken: "asyncio.Queue[int]", times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        worker.finish(await taken.get())
    return (time.process_time() - began) * 1e6 / times


async def tokens(size: int, repeats: int) -> list[float]:
    """One token for each of so many streams in one message, through all layers."""
    frontend = Frontend(1, slots=size)
    (worker,), layer, sink = frontend.workers, frontend.pipeline(), Silent()
    steps = max(1, OPERATIONS // size)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(layer(stream_request(), Call(request_id=str(one)), sink)) for one in range(size)]
        await wait_until(lambda: worker.candidate.in_flight_count == size)
        costs = [await us_to_hear(worker, step, sink) for step in steps_for(size, steps * repeats)]
        for task in asked:
            task.cancel()
    return [sum(costs[start : start + steps]) / steps / size for start in range(0, len(costs), steps)]


async def us_to_hear(worker: BareWorker, step: Step, sink: Silent) -> float:
    """Until every token has arrived: those of very many streams take several turns of the loop."""
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
    """A request of one token beside so many streams, through all layers."""
    frontend = Frontend(1, slots=size + 1)
    (worker,), layer = frontend.workers, frontend.pipeline()
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(layer(stream_request(), Call(request_id=str(one)), Silent())) for one in range(size)]
        await wait_until(lambda: worker.candidate.in_flight_count == size)
        ids = count(size + 1)
        costs = [await us_to_end(worker, layer, ids, size, OPERATIONS // 10) for _ in range(repeats)]
        for task in held:
            task.cancel()
    return costs


async def us_to_end(worker: BareWorker, layer: Layer, ids: "count[int]", held: int, times: int) -> float:
    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(times):
            task = group.create_task(layer(make_request(), Call(request_id="short"), Silent()))
            stream_id = next(ids)
            await wait_until(lambda: worker.candidate.in_flight_count > held)
            worker.tokens(stream_id, 0, 65)
            worker.finish(stream_id)
            await task
    return (time.process_time() - began) * 1e6 / times


ASKED, KEPT, CARRIED = "a request's way to its worker", "a worker that is kept", "a frontend with streams"
CURVES: Sequence[Curve] = (
    # First, for what others free would hide it.
    Curve("memory", "keep an idle worker", "workers", WORKERS[2:], resident_kib, unit="KiB"),
    Curve(ASKED, "admit and route", "workers", WORKERS, routed(NO_THRESHOLDS)),
    Curve(ASKED, "admit and route, with thresholds", "workers", WORKERS, routed(THRESHOLDS)),
    Curve(ASKED, "refuse, all full", "workers", WORKERS, routed(NO_THRESHOLDS, slots_taken=SLOTS)),
    Curve(ASKED, "refuse, all busy", "workers", WORKERS, routed(THRESHOLDS, rank=BUSY)),
    Curve(KEPT, "take a load report", "workers", WORKERS, reports),
    Curve(KEPT, "look for its silence", "workers", WORKERS, sweeps),
    Curve(KEPT, "find it, one after the other", "workers", WORKERS, finds),
    Curve(KEPT, "take one changed instance of the view", "instances", INSTANCES, views),
    Curve(CARRIED, "give a place that comes free to those that wait", "waiting", STREAMS, places),
    Curve(CARRIED, "carry a token", "streams", STREAMS, tokens),
    Curve(CARRIED, "carry a request of one token", "streams", STREAMS, requests),
)
