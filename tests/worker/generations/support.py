"""What the tests of generations share: a pipeline that the test answers, an owner that records, and a store of both."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from services.core.call import Call
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure
from services.core.interface import Delta, Finish, Sink, TokenLogprobs
from services.core.request import FinishReason, Request
from services.worker.generations.generation import Generation, Owner, Spec
from services.worker.generations.store import DetachConfig, GenerationStore
from tests.support.clock import run_clocked, settle
from tests.support.doubles import make_request

ID = bytes(range(16))
OTHER_ID = bytes(16)


def make_spec(generation_id: bytes = ID, **fields: Any) -> Spec:
    given: dict[str, Any] = {"index": 0, "base": 0, "epoch": 1, "grace_s": 30.0, "presentation": b""}
    return Spec(id=generation_id, **(given | fields))


class RecordingOwner:
    """An owner that keeps what it is told."""

    id, outbox = 0, None

    def __init__(self) -> None:
        self.begun_count = 0
        self.token_ids: list[int] = []
        self.outcomes: list[FinishReason | Failure] = []

    def on_begun(self) -> None:
        self.begun_count += 1

    def on_tokens(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids

    def on_ended(self, outcome: FinishReason | Failure) -> None:
        self.outcomes.append(outcome)

    @property
    def reasons(self) -> list[str]:
        """The outcomes by name: a finish reason, or the reason of a failure."""
        return [one.reason if isinstance(one, Failure) else one for one in self.outcomes]


class Running:
    """One request in the pipeline, which the test answers."""

    def __init__(self, request: Request, call: Call, sink: Sink) -> None:
        self.call = call
        self.is_cancelled = False
        self._request = request
        self._sink = sink
        self._position = len(request.generated_token_ids)
        self.ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        self.call.attempt.begin()

    def give(self, *token_ids: int, logprobs: Sequence[TokenLogprobs] | None = None) -> None:
        self._sink.deliver(Delta(self._position, list(token_ids), choice=self._request.choice, logprobs=logprobs))
        self._position += len(token_ids)

    async def finish(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.ended.set_result(Finish(reason))
        await settle()

    async def fail(self, failure: Failure) -> None:
        self.ended.set_exception(failure)
        await settle()


class ManualPipeline:
    """A pipeline whose requests the test answers, in the order in which they came."""

    def __init__(self) -> None:
        self.running: list[Running] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        running = Running(request, call, sink)
        self.running.append(running)
        try:
            return await running.ended
        except asyncio.CancelledError:
            running.is_cancelled = True
            raise


class Bench:
    """A store above a manual pipeline."""

    def __init__(self, **config: Any) -> None:
        self.pipeline = ManualPipeline()
        self.store = GenerationStore(self.pipeline, DetachConfig(**config))

    async def start(
        self,
        owner: Owner | None = None,
        *,
        request: Request | None = None,
        choice_group: ChoiceGroup | None = None,
        **spec: Any,
    ) -> tuple[Generation, Running]:
        """A generation that runs, as soon as the pipeline has it."""
        request = request or make_request()
        owner = owner or RecordingOwner()
        generation = Generation(make_spec(**spec), request, request.choice, choice_group, owner)
        call = Call(request_id="r", attempt=generation, ending=generation.ending, choice_group=choice_group)
        self.store.start(generation, request, call)
        await settle()
        return generation, self.pipeline.running[-1]

    async def start_detached(self, **given: Any) -> tuple[Generation, Running]:
        generation, running = await self.start(**given)
        self.store.let_go(generation, generation.owner)
        return generation, running

    def is_known(self, generation: Generation) -> bool:
        """Whether the store has its record."""
        return any(one is generation for one in self.store.locate(generation.spec.id))


def play(scenario: Callable[[Bench], Coroutine[Any, Any, Any]], **config: Any) -> Any:
    """Run the scenario on a loop whose clock the test controls."""

    async def run() -> Any:
        bench = Bench(**config)
        async with bench.store:
            return await scenario(bench)

    return run_clocked(run())
