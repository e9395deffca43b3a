"""Doubles: one for every layer, because every layer has the same signature, and those that routing sees."""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.core.call import Attempt, Call, RoutedSession
from services.core.errors import Failure, Reason, RefusedFor
from services.core.generation.kept import Generation, Kept
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.model_card import ModelCard, Resume, TokenizerRef
from services.core.request import FinishReason, Request, Sampling, Stop
from services.frontend.model_catalog import Model, ModelCatalog
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.worker_set import WorkerSet
from services.isolation.pool import HelperPool
from services.models.prompt_encoder import PromptEncoder
from services.models.prompt_helper import LOADER, content_of
from services.models.tokenizers import Tokenizer
from services.models.tokenizers.byte_level import VOCAB_SIZE, ByteTokenizer
from services.runtime.loop import run_on_loop
from services.stubs import worker_pb2
from services.worker.engine import RankLoad
from tests.support.clock import WAIT_S

HANG = "hang"
CARD = ModelCard(
    model="m",
    engine="mocker",
    context_length=4096,
    vocab_size=VOCAB_SIZE,
    tokenizer=TokenizerRef("bytes"),
    chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    resume=Resume(),
)
T = TypeVar("T")
Step = int | bytes | Reason | FinishReason | Exception | str


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine for WAIT_S at most."""

    async def bounded() -> T:
        async with asyncio.timeout(WAIT_S):
            return await coroutine

    return run_on_loop(bounded())


class Script:
    """A layer that plays a list of steps, a take, for each call.

    A number is a token, bytes are tokens that come in one delta, a reason is raised as a failure, an exception is
    raised, HANG waits until it is cancelled, and a finish reason ends the answer. A take without an end finishes with
    LENGTH.
    """

    def __init__(self, *takes: Sequence[Step]) -> None:
        self._takes = iter(takes)
        self.requests: list[Request] = []
        self.calls: list[Call] = []
        self.hanging = asyncio.Event()
        self.cancelled_count = 0

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.requests.append(request)
        self.calls.append(call)
        call.attempt.begin()
        try:
            return await self._play(request, sink)
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise

    async def _play(self, request: Request, sink: Sink) -> Finish:
        position = len(request.generated_token_ids)
        for step in next(self._takes):
            match step:
                case Reason():
                    raise Failure(step, f"{step} as scripted")
                case FinishReason():
                    return Finish(step)
                case Exception():
                    raise step
                case str():
                    self.hanging.set()
                    await asyncio.Event().wait()
                case _:
                    token_ids = [step] if isinstance(step, int) else list(step)
                    sink.deliver(Delta(position, token_ids, choice=request.choice))
                    position += len(token_ids)
                    await asyncio.sleep(0)
        return Finish(FinishReason.LENGTH)


@dataclass
class Collected:
    """A sink that keeps its deltas, and asserts that no choice has a gap, a repeat or a delta after its end."""

    deltas: list[Delta] = field(default_factory=list)
    finish: Finish | None = None

    def deliver(self, delta: Delta) -> None:
        before = [one for one in self.deltas if one.choice == delta.choice]
        assert not before or delta.position == before[-1].position + len(before[-1].token_ids)
        assert not before or before[-1].finish_reason is None
        self.deltas.append(delta)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def make_request(
    prompt: Sequence[int] = (1, 2), *, max_tokens: int | None = 16, sampling: Sampling | None = None, **fields: Any
) -> Request:
    """A request as it is below Preprocess. Takes the fields of Stop by name; its `token_ids` are `stop_token_ids`."""
    stop_fields = {name: fields.pop(name) for name in ("strings", "ignore_eos", "min_tokens") if name in fields}
    stop = Stop(max_tokens=max_tokens, token_ids=tuple(fields.pop("stop_token_ids", ())), **stop_fields)
    sampling = sampling or Sampling(temperature=0.0, seed=1)
    given: dict[str, Any] = {"model": "m", "token_ids": tuple(prompt), "stop": stop, "sampling": sampling}
    return Request(**(given | fields))


def make_kept(*, is_told: bool = True, **fields: Any) -> Kept:
    """What a call of a kept answer has. Takes the fields of Kept."""
    return Kept(generation=Generation(bytes(16), 30.0, is_told=is_told), **fields)


def models_of(*cards: ModelCard) -> ModelCatalog:
    """A catalog with these models and the byte tokeniser."""
    catalog = ModelCatalog()
    for card in cards or (CARD,):
        catalog.add(Model(card, encoder_of(ByteTokenizer())))
    return catalog


def encoder_of(tokenizer: Tokenizer) -> PromptEncoder:
    """An encoder with that tokeniser inside, and helper processes with the byte tokeniser, which start when needed."""
    return PromptEncoder(tokenizer, HelperPool("test", LOADER, content_of(TokenizerRef("bytes"), b"")))


async def call_layer(layer: Layer, request: Request, *, session: RoutedSession | None = None, **call: Any) -> Collected:
    """Call a layer once and return what it delivered. `session`: as if Route had chosen it."""
    collected = Collected()
    given: dict[str, Any] = {"request_id": "r", "card": CARD, "attempt": Attempt(session)}
    collected.finish = await layer(request, Call(**(given | call)), collected)
    return collected


class RecordingAttempt(Attempt):
    """An attempt that records its events."""

    def __init__(self, session: RoutedSession | None = None) -> None:
        super().__init__(session)
        self.begun_count = 0
        self.grace_s: list[float] = []

    def on_begun(self) -> None:
        self.begun_count += 1

    def on_leaving(self, grace_s: float) -> None:
        self.grace_s.append(grace_s)


@dataclass(frozen=True)
class FakeSession:
    """A session that only has a key, and its worker's limit of moves."""

    key: str
    migration_limit: int | None = None


def make_candidate(
    key: str = "a",
    *,
    slots: int = 0,
    places: int = 0,
    load: worker_pb2.Load | None = None,
    ranks: Sequence[RankLoad] = (),
    in_flight_count: int = 0,
    is_full: bool = False,
    is_draining: bool = False,
    is_lost: bool = False,
    quarantined_until: float = 0.0,
    kind: type[Candidate] = Candidate,
) -> Candidate:
    """A worker whose clock stands still. `slots`: 0 for no request limit. `is_full`: it has refused a request."""
    candidate = kind(FakeSession(key), key, full_s=math.inf, clock=lambda: 0.0)
    candidate.on_welcome(worker_pb2.Welcome(engine_request_limit=slots, request_queue_limit=places))
    if in_flight_count:
        candidate.on_opened(in_flight_count)
    if load is not None:
        candidate.on_load(load)
    report(candidate, *ranks)
    if is_full:
        fill(candidate)
    candidate.is_draining, candidate.is_lost, candidate.quarantined_until = is_draining, is_lost, quarantined_until
    return candidate


def report(candidate: Candidate, *ranks: RankLoad) -> None:
    """The worker reports the load of its ranks."""
    load = worker_pb2.Load()
    load.MergeFrom(candidate.load.last)
    del load.ranks[:]
    load.ranks.extend(
        worker_pb2.RankLoad(
            dp_rank=number,
            kv_blocks_used=rank.kv_blocks_used,
            kv_blocks_total=rank.kv_blocks_total,
            active_prefill_tokens=rank.active_prefill_tokens,
        )
        for number, rank in enumerate(ranks)
    )
    candidate.on_load(load)


def fill(candidate: Candidate) -> None:
    """The worker refuses a request for capacity."""
    candidate.on_refused(RefusedFor.CAPACITY, 1, 0)


def make_room(candidate: Candidate) -> None:
    """The worker forgets what it refused."""
    candidate.capacity.on_load(worker_pb2.Load(ranks=[worker_pb2.RankLoad()]))


class FakePool:
    """A pool as routing sees it, with workers of one model."""

    def __init__(self, *workers: Candidate) -> None:
        self.quarantined: list[str] = []
        self._worker_set = WorkerSet(CARD)
        for one in workers:
            self._worker_set.add(one)

    def worker_set(self, card: ModelCard) -> WorkerSet:
        return self._worker_set

    def candidate(self, key: str) -> Candidate | None:
        return next((one for one in self._worker_set if one.key == key), None)

    def quarantine(self, worker: Candidate) -> None:
        self.quarantined.append(worker.key)
        worker.quarantined_until = math.inf
