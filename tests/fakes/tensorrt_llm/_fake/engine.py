"""The engine's thread: requests wait in a queue without end, run in a batch, and get a token each at every step."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from random import Random

from ..executor.request import GenerationRequest, Response
from ..executor.utils import CppExecutorError
from ..llmapi.llm_args import TorchLlmArgs
from .choice import Answer, Choice
from .faults import Death, Faults
from .model import Model, State

BATCH_SIZE_MAX = 2048
"""Where max_batch_size was not given."""

Respond = Callable[[Sequence[Response]], None]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Comes through the same queue as the requests."""

    id: int


@dataclass(frozen=True, slots=True)
class Quit:
    """End all that runs, and the thread."""


class Engine(threading.Thread):
    """`respond` takes what one step did, `fail` an error that is the engine's own. Both are called on this thread."""

    def __init__(
        self, args: TorchLlmArgs, model: Model, faults: Faults, respond: Respond, fail: Callable[[Exception], None]
    ) -> None:
        super().__init__(name="tensorrt_llm_fake_engine", daemon=True)
        self.inbox: SimpleQueue[GenerationRequest | Cancel | Quit] = SimpleQueue()
        self.step_count = 0
        self._args = args
        self._model = model
        self._faults = faults
        self._respond = respond
        self._fail = fail
        self._random = Random(0)
        self._waiting: deque[Choice] = deque()
        self._active: list[Choice] = []
        self._is_over = False
        self._batch_size = args.max_batch_size or BATCH_SIZE_MAX
        self._context_length = args.max_seq_len or model.vocabulary.context_length

    def run(self) -> None:
        while not self._is_over:
            self._take_messages()
            self._admit()
            if self._active:
                time.sleep(self._faults.step_ms / 1000)
                self._step()
        ends = [choice.response(self.step_count, ("cancelled", None, 0)) for choice in self._active]
        self._respond(ends)

    def _take_messages(self) -> None:
        """All there are; while there is nothing to do, wait for one."""
        is_idle = not (self._active or self._waiting)
        while not self._is_over:
            try:
                message = self.inbox.get(block=is_idle)
            except Empty:
                return
            is_idle = False
            match message:
                case Quit():
                    self._is_over = True
                case Cancel(request_id):
                    self._cancel(request_id)
                case GenerationRequest():
                    self._accept(message)

    def _accept(self, request: GenerationRequest) -> None:
        try:
            self._waiting += self._choices(request)
        except (RuntimeError, ValueError) as error:
            self._respond([Response(id=request.id, error=str(error))])

    def _choices(self, request: GenerationRequest) -> list[Choice]:
        """Raises RuntimeError or ValueError, for this request alone."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        room = self._context_length - len(prompt)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit max_seq_len {self._context_length}")
        check_ranges(request, len(self._model.vocabulary.token_bytes))
        count = params.best_of or params.n
        answer = Answer(request=request, max_tokens=min(params.max_tokens or room, room), open_count=count)
        if self._faults.error_token in prompt:
            answer.error_after = self._faults.error_after
        state, stops = State().after(prompt), params._stops()
        return [Choice(answer, index, state, len(prompt), stops) for index in range(count)]

    def _cancel(self, request_id: int) -> None:
        """What waits is forgotten, without a word to whoever waits for it. What runs ends some steps later."""
        self._waiting = deque(one for one in self._waiting if one.answer.request.id != request_id)
        for choice in self._active:
            if choice.answer.request.id == request_id and choice.answer.cancel_at is None:
                choice.answer.cancel_at = self.step_count + self._faults.cancel_steps

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._batch_size:
            self._active.append(self._waiting.popleft())

    def _step(self) -> None:
        """Prompts are read before tokens are drawn, as many at a time as the budget of a step has room for."""
        self.step_count += 1
        budget = self._args.max_num_tokens or self._context_length
        responses: list[Response] = []
        kept: list[Choice] = []
        for choice in self._active:
            read = min(choice.prefill_left, budget)
            budget -= read or 1
            choice.prefill_left -= read
            is_open = choice.prefill_left > 0 or self._advance(choice, responses)
            if is_open:
                kept.append(choice)
        self._active = kept
        if self._is_to_die():
            self._die()
        else:
            self._respond(responses)

    def _advance(self, choice: Choice, responses: list[Response]) -> bool:
        """A token or an end. Says whether there is more to come."""
        answer = choice.answer
        if answer.cancel_at is not None and answer.cancel_at <= self.step_count:
            responses.append(choice.response(self.step_count, ("cancelled", None, 0)))
            return False
        if answer.error_after is not None and answer.error_after <= len(choice.generated):
            responses.append(Response(id=answer.request.id, error="the marked request failed"))
            return False
        token = choice.draw(self._model, self._random)
        end = choice.end(token)
        if end is not None and token == choice.params.end_id and not self._faults.end_in_tokens:
            choice.unsent.pop()
            choice.unsent_logprobs = choice.unsent_logprobs[: len(choice.unsent)]
        interval = self._args.stream_interval
        is_due = len(choice.generated) == 1 or len(choice.generated) % interval == 0
        if end is not None or (answer.request.streaming and is_due):
            responses.append(choice.response(self.step_count, end))
        return end is None

    def _is_to_die(self) -> bool:
        if self.step_count == self._faults.death_steps:
            return True
        marker = self._faults.death_token
        return any(marker in one.answer.request.prompt_token_ids and not one.prefill_left for one in self._active)

    def _die(self) -> None:
        """Nothing is done any more, but for ending when told to."""
        if self._faults.death is not Death.SILENT:
            self._fail(CppExecutorError("the engine died"))
        if self._faults.death is Death.RAISED:
            self._respond([choice.response(self.step_count) for choice in self._active])
        self._active = []
        while not isinstance(self.inbox.get(), Quit):
            pass
        self._is_over = True


def check_ranges(request: GenerationRequest, vocab_size: int) -> None:
    """What the engine finds out for itself. Raises ValueError."""
    params = request.sampling_params
    if any(not 0 <= token < vocab_size for token in request.prompt_token_ids):
        raise ValueError("token id out of range")
    if params.temperature is not None and params.temperature < 0:
        raise ValueError(f"temperature: {params.temperature}")
    if params.top_p is not None and not 0 <= params.top_p <= 1:
        raise ValueError(f"top_p: {params.top_p}")
    if params.top_k is not None and params.top_k < 0:
        raise ValueError(f"top_k: {params.top_k}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise ValueError(f"max_tokens: {params.max_tokens}")
